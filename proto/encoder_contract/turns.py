"""Waiting in turn. Every wait for a turn or for room is one of three kinds, each with its property test.

`Turns` are units of work in a pass of an event loop, `Room` is an amount that callers share (bytes, places, threads),
and `TurnQueue` has work for several threads. In all three, holders take turns: at most one request of each other
holder goes first, however many it has. A caller that is cancelled while it waits loses and leaks nothing.
"""

import asyncio
import math
import threading
from collections import OrderedDict, deque
from collections.abc import AsyncIterator, Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass, field
from functools import partial
from typing import Generic, NamedTuple, TypeVar

T = TypeVar("T")


class RoundRobin(Generic[T]):
    """Items by holder, of which the oldest one of the holder that has waited longest is next. Not thread-safe."""

    def __init__(self) -> None:
        self.holders: OrderedDict[str, deque[T]] = OrderedDict()
        """Those that have items, in the order of their turns. Read it to ask, without a call, whether there are any."""

    def put(self, holder: str, item: T) -> None:
        """Add an item behind those of its holder, and a new holder behind the other holders."""
        self.holders.setdefault(holder, deque()).append(item)

    def pop(self, holder: str | None = None) -> T:
        """Remove the next item, or that of a `holder`, and return it. Raises `KeyError` if there is none."""
        if holder is None:
            holder = next(iter(self.holders), "")
        items = self.holders.pop(holder)
        item = items.popleft()
        if items:
            self.holders[holder] = items  # behind the other holders
        return item

    def first(self) -> Iterator[T]:
        """Yield the oldest item of each holder, in the order of their turns."""
        return (items[0] for items in self.holders.values())

    def remove(self, holder: str, item: T) -> None:
        """Remove an item, if it is there."""
        items = self.holders.get(holder, deque())
        with suppress(ValueError):
            items.remove(item)
        if not items:
            self.holders.pop(holder, None)

    def clear(self) -> None:
        """Remove all items."""
        self.holders.clear()


class Turns:
    """Allows `at_a_time` units of work in each pass of the event loop, for all callers of `take` together.

    Holders take turns, regardless of how much each requests. Work of more units than are left uses up the pass.
    """

    def __init__(self, at_a_time: int) -> None:
        self._waiting: RoundRobin[tuple[int, asyncio.Future[None]]] = RoundRobin()
        self._is_passing = False
        self._at_a_time = self._left = at_a_time

    async def take(self, holder: str, units: int = 1) -> None:
        """Wait for this holder's turn to run `units` of work. Returns at once while the loop is not contended."""
        if not self._is_passing:
            self._is_passing = True
            asyncio.get_running_loop().call_soon(self._pass)
        if self._left:
            self._left = max(0, self._left - units)
            return
        turn: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._waiting.put(holder, (units, turn))
        await turn

    def _pass(self) -> None:
        """Start a pass of the loop. Callers that wait go before new ones."""
        self._left = self._at_a_time
        while self._left and self._waiting.holders:
            units, turn = self._waiting.pop()
            if not turn.done():
                turn.set_result(None)
                self._left = max(0, self._left - units)
        self._is_passing = bool(self._waiting.holders) or self._left < self._at_a_time
        if self._is_passing:
            asyncio.get_running_loop().call_soon(self._pass)


# The share that one holder may take while no other holder has any.
SHARE = 0.75


def fair_share(held: float, more: float, free: float, share: float = SHARE) -> bool:
    """Whether a holder that has `held` may have `more`, after which `free` would stay unused.

    Its first amount only needs to fit. Greedy holders converge to equal shares, and some space stays free for new ones.
    """
    return not held or held + more <= math.floor(free * share / (1 - share))


def at_most(amount: int) -> "ShareRule":
    """Return the rule by which each holder may have this amount, however much is free."""
    return lambda held, more, _free: held + more <= amount


ShareRule = Callable[[int, int, int], bool]
"""Whether a holder that has the first amount may have the second, after which the third would stay unused."""


class Lack(NamedTuple):
    """Why an amount cannot be taken now: too little of `room` is free, or `is_share`: its holder has its share."""

    room: "Room"
    is_share: bool


class Room:
    """An amount that holders share; messages call it by `name`. Not thread-safe.

    Callers that wait are served in turn. Nobody in line goes before one that waits because too little is free, so that
    a large request gets its turn. One whose holder has its share is passed over.
    """

    def __init__(
        self,
        size: int,
        name: str = "",
        *,
        share: ShareRule = lambda _held, _more, _free: True,
        part_of: "Room | None" = None,
    ) -> None:
        """`share` is the rule of a holder's share, such as `fair_share`; without one, holders only take turns.

        Amounts of a part also count in the whole, but against nobody's share of it. Nobody waits for a part.
        """
        self.size = size
        self.name = name
        self.held = 0
        self._share = share
        self._whole = part_of
        self._holders: dict[str, int] = {}
        self._line: RoundRobin[Place] = RoundRobin()

    def held_by(self, holder: str) -> int:
        """Return how much a holder has."""
        return self._holders.get(holder, 0)

    def take_now(self, holder: str | None, amount: int = 1) -> Lack | None:
        """Take an amount, against the share of `holder` if given, before all that wait. Return None, or what lacks."""
        free = self.size - self.held - amount
        if free < 0:
            return Lack(self, is_share=False)
        held = 0
        if holder is not None:
            held = self._holders.get(holder, 0)
            if held and not self._share(held, amount, free):
                return Lack(self, is_share=True)
        if self._whole is not None and (lack := self._whole.take_now(None, amount)) is not None:
            return lack
        self.held += amount
        if holder is not None:
            self._holders[holder] = held + amount
        return None

    def release(self, holder: str | None, amount: int = 1) -> None:
        """Undo `take_now`, in whole or in part."""
        if self._whole is not None:
            self._whole.release(None, amount)
        self.held -= amount
        if holder is not None and (left := self._holders.pop(holder, 0) - amount):
            self._holders[holder] = left
        if self._line.holders:
            self._serve_line()

    def line_up(self, place: "Place") -> None:
        """Put a place in line. It `is_taken` at once, or when it is its turn and its amount is free."""
        assert self._whole is None, "nobody waits for a part"
        assert place.amount <= self.size, f"{place.amount} is more than all {self.name}, {self.size}"
        if self._line.holders or place.admit() is not None:
            self._line.put(place.holder, place)
            self._serve_line()

    def leave_line(self, place: "Place") -> None:
        """Give up a place in line, if it is there."""
        if self._line.holders:
            self._line.remove(place.holder, place)
            self._serve_line()

    async def wait(self, place: "Place") -> None:
        """Wait in turn until a place is taken. A call that is cancelled has released it."""
        self.line_up(place)
        if not place.is_taken:
            place.taken = asyncio.get_running_loop().create_future()
            try:
                await place.taken
            except BaseException:
                place.release()
                raise

    async def take(self, holder: str = "", amount: int = 1) -> "Place":
        """Wait in turn for an amount. The caller releases it."""
        place = Place(self, holder, amount)
        await self.wait(place)
        return place

    @asynccontextmanager
    async def taken(self, holder: str = "", amount: int = 1) -> AsyncIterator[None]:
        """Wait in turn for an amount, and have it until the end of the block."""
        place = await self.take(holder, amount)
        try:
            yield
        finally:
            place.release()

    def _serve_line(self) -> None:
        while (place := self._admitted()) is not None:
            self._line.pop(place.holder)
            if place.taken is not None and not place.taken.done():
                place.taken.set_result(None)

    def _admitted(self) -> "Place | None":
        """Take the amount of the first place in line that may have it, and return that place."""
        for place in self._line.first():
            if (lack := place.admit()) is None:
                return place
            if not lack.is_share:
                return None
        return None


@dataclass(eq=False, slots=True)
class Place:
    """What one caller wants of a `Room`: a place in line, then the amount."""

    room: Room
    holder: str
    amount: int
    is_taken: bool = field(default=False, init=False)
    taken: "asyncio.Future[None] | None" = field(default=None, init=False)
    """Of a caller that waits on an event loop: done once the place is taken."""

    def admit(self) -> Lack | None:
        """Take the amount now. Return None, or what lacks."""
        lack = self.room.take_now(self.holder, self.amount)
        self.is_taken = lack is None
        return lack

    def release(self) -> None:
        """Release the amount, or leave the line. A second call does nothing."""
        if self.is_taken:
            self.is_taken = False
            self.room.release(self.holder, self.amount)
        else:
            self.room.leave_line(self)


class ThreadTurns:
    """A few threads for short work, each a place in a `Room`. Not thread-safe: use from one event loop."""

    def __init__(self, threads: int, name: str) -> None:
        self._room = Room(threads)
        self._threads = ThreadPoolExecutor(threads, thread_name_prefix=name)

    async def run(self, caller: str, work: Callable[[], T]) -> T:
        """Run `work` on a thread and return its result. Work that has begun continues if the call is cancelled."""
        place = await self._room.take(caller)
        running = self._threads.submit(work)
        running.add_done_callback(partial(self._work_ended, asyncio.get_running_loop(), place))
        return await asyncio.wrap_future(running)

    def _work_ended(self, loop: asyncio.AbstractEventLoop, place: Place, _work: "Future[T]") -> None:
        with suppress(RuntimeError):  # the loop was closed
            loop.call_soon_threadsafe(place.release)


class TurnQueue(Generic[T]):
    """Items for several threads, which wait for them. Thread-safe."""

    def __init__(self) -> None:
        self._waiting: RoundRobin[T] = RoundRobin()
        self._changed = threading.Condition()
        self._closed = False

    def put(self, holder: str, item: T) -> None:
        """Add an item, in the turns of `holder`."""
        with self._changed:
            self._waiting.put(holder, item)
            self._changed.notify()

    def take(self) -> T | None:
        """Return the next item; wait for one. Returns None after `close`."""
        with self._changed:
            while not self._waiting.holders:
                if self._closed:
                    return None
                self._changed.wait()
            return self._waiting.pop()

    @property
    def is_empty(self) -> bool:
        """Whether no item waits. It may change at once."""
        return not self._waiting.holders

    def close(self) -> None:
        """Drop all items, and end `take` of all threads."""
        with self._changed:
            self._closed = True
            self._waiting.clear()
            self._changed.notify_all()
