"""Limits on callers: `Shares` of a resource, which leave room for newcomers, and `Turns` on the event loop."""

import asyncio
import math
from collections import Counter, OrderedDict, deque
from collections.abc import Collection, Iterator, Sequence
from typing import TypeVar

from encoder_contract.errors import OverloadedError

# What one holder may take while no other holds any.
SHARE = 0.75
# Shares are held for the length of a call, so one is likely to be free after about a network round trip.
RETRY_AFTER_MS = 200


class Shares:
    """A bounded resource that named holders share; `what` names it in messages.

    A holder may have `SHARE / (1 - SHARE)` times what stays free, so greedy holders converge to equal shares and a part
    stays free for newcomers; a holder's first amount only needs to fit.
    """

    def __init__(self, size: int, what: str) -> None:
        self._what = what
        self.size = size
        self.held = 0
        self._holders: Counter[str] = Counter()

    def take(self, holders: Collection[str], amount: int = 1) -> None:
        """Lend `amount`, counted against each of `holders`; raises `OverloadedError`, and then lends nothing."""
        free = self.size - self.held - amount
        if free < 0:
            raise OverloadedError(
                f"the server's limit of {self._what} ({self.size}) is reached: retry",
                retry_after_ms=RETRY_AFTER_MS,
            )
        most = math.floor(free * SHARE / (1 - SHARE))
        if any(held and held + amount > most for held in map(self._holders.__getitem__, holders)):
            raise OverloadedError(
                f"this caller's share of {self._what} is used up: end other calls, or retry",
                retry_after_ms=RETRY_AFTER_MS,
            )
        self.held += amount
        self._holders.update(dict.fromkeys(holders, amount))

    def give_back(self, holders: Collection[str], amount: int = 1) -> None:
        """Undo a `take`, wholly or in part."""
        self.held -= amount
        for holder in set(holders):
            self._holders[holder] -= amount
            if not self._holders[holder]:
                del self._holders[holder]


# Pieces of work between two polls of the sockets, of about 0.1 ms each. A call takes tens of passes of the loop, most
# for gRPC's own events, and waits in each for the work of others that fits into it. One piece gains nothing over two.
AT_A_TIME = 2
# Taking or sending so many bytes costs the event loop as much as one such piece of work.
TURN_BYTES = 128 << 10
# Reading so many names of images costs as much, too.
TURN_NAMES = 4
# Names that are read at a time, of a call of hundreds: some 2 ms of work, and one question to the cluster.
NAMES_AT_A_TIME = 64

T = TypeVar("T")


def name_turns(names: Sequence[T]) -> Iterator[tuple[Sequence[T], int]]:
    """Yield the names of a call, a few at a time, each time with the pieces of work that they are."""
    for begin in range(0, len(names), NAMES_AT_A_TIME):
        some = names[begin : begin + NAMES_AT_A_TIME]
        yield some, 1 + len(some) // TURN_NAMES


class Turns:
    """Allows `AT_A_TIME` pieces of work in each pass of its event loop, for all callers of `take` together.

    Clients take turns, however much each one asks for. A piece of work larger than a whole pass ends the pass.
    """

    def __init__(self) -> None:
        self._waiting: OrderedDict[str, deque[tuple[int, asyncio.Future[None]]]] = OrderedDict()
        self._is_passing = False
        self._left = AT_A_TIME

    async def take(self, client_id: str, pieces: int = 1) -> None:
        """Return when it is this client's turn to do `pieces` of work: at once while few ask."""
        if not self._is_passing:
            self._is_passing = True
            asyncio.get_running_loop().call_soon(self._pass)
        if self._left:
            self._left = max(0, self._left - pieces)
            return
        turn: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._waiting.setdefault(client_id, deque()).append((pieces, turn))
        await turn

    def _pass(self) -> None:
        """Begin another pass of the loop: callers that wait go before new ones."""
        self._left = AT_A_TIME
        while self._left and self._waiting:
            client_id, turns = self._waiting.popitem(last=False)
            pieces, turn = turns.popleft()
            if turns:
                self._waiting[client_id] = turns  # behind the others
            if not turn.done():
                turn.set_result(None)
                self._left = max(0, self._left - pieces)
        self._is_passing = bool(self._waiting) or self._left < AT_A_TIME
        if self._is_passing:
            asyncio.get_running_loop().call_soon(self._pass)
