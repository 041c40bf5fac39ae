"""Limits on callers: a `Caller`, the `Budget`s that callers share, the table of them, `Turns` on the event loop."""

import asyncio
from collections import Counter, OrderedDict, deque
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Self, TypeVar
from uuid import uuid4

from encoder_contract.errors import OverloadedError
from encoder_service.config import GIB, Config
from encoder_service.scheduler import Claim, Limits, most_held


@dataclass(frozen=True, slots=True)
class Caller:
    """The caller of one call. Made once, where the call enters, and completed from its first message.

    `holders` are the names that its shares count against, the most particular one first: its tenant; or, without
    tenants, its client and then its host.
    """

    host: str
    """An IPv4 address, the /64 network of an IPv6 address, or all Unix sockets."""
    holders: tuple[str, ...]
    connection: str = ""
    is_local: bool = False
    is_peer: bool = False
    """Whether another replica of the fleet makes the call."""
    name: str = ""
    """Its tenant, what it calls itself, or its host."""
    request_id: str = ""
    proxy_request_id: str = ""
    """The `x-request-id` of a proxy or framework, for the log."""
    trace_id: str = ""
    priority: int = 0
    salt: bytes = field(default=b"", repr=False)
    authorization: str | None = field(default=None, repr=False)
    certificate_names: tuple[str, ...] = ()
    signature: bytes = field(default=b"", repr=False)
    call_id: str = field(default_factory=lambda: uuid4().hex)
    """The identifier of the call, where the caller names no request."""

    @property
    def holder(self) -> str:
        """The first of `holders`: the unit of every share that does not count against the host, too."""
        return self.holders[0]

    def claim(self, chunk: int = 0, needed_at: float | None = None) -> Claim:
        """Return a new claim: demanded if there is a `needed_at` (a Fetch), else speculative (a Submit)."""
        return Claim(
            request_id=self.request_id or self.call_id,
            # What a peer asks for is for those who brought the images here: see `Claim`.
            holder="" if self.is_peer else self.holder,
            priority=self.priority,
            chunk=chunk,
            needed_at=needed_at,
            demanded=needed_at is not None,
        )


# Shares are held for the length of a call, so one is likely to be free after about a network round trip.
RETRY_AFTER_MS = 200


class Budget:
    """A bounded resource that callers share; `name` is what messages call it. Belongs to one event loop.

    A holder may have as much as `most_held` says; its first amount only needs to fit.
    """

    def __init__(self, size: int, name: str, *, per_host: bool = False) -> None:
        """With `per_host`, what a caller holds counts against all of its `holders`, else against the first."""
        self.size = size
        self.held = 0
        self._name = name
        self._per_host = per_host
        self._holders: Counter[str] = Counter()
        self._uses: Counter[tuple[str, bytes]] = Counter()  # by holder and key
        self._released = asyncio.Event()

    def hold(self, caller: Caller, amount: int = 1, *, once: bytes = b"") -> "Hold":
        """Reserve `amount` until the `with` block of the result ends. Raises `OverloadedError`.

        An amount above `size` counts as all of it. What a caller holds several times under the same key `once`, always
        the same amount, counts once.
        """
        amount = min(amount, self.size)
        hold = Hold(self, caller.holders if self._per_host else caller.holders[:1], once)
        if amount and not (once and self._uses[caller.holder, once]):
            self.reserve(hold.holders, amount)
        if once and amount:
            self._uses[caller.holder, once] += 1
        hold.amount = amount
        return hold

    async def hold_within(self, caller: Caller, amount: int, seconds: float, *, once: bytes = b"") -> "Hold":
        """As `hold`, but wait up to `seconds` for others to release enough."""
        with suppress(TimeoutError):
            async with asyncio.timeout(seconds):
                while True:
                    with suppress(OverloadedError):
                        return self.hold(caller, amount, once=once)
                    self._released.clear()
                    await self._released.wait()
        return self.hold(caller, amount, once=once)

    def reserve(self, holders: Sequence[str], amount: int) -> None:
        """Count `amount` against each of `holders`; raises `OverloadedError`, and then counts nothing."""
        free = self.size - self.held - amount
        if free < 0:
            raise OverloadedError(
                f"the server's limit of {self._name} ({self.size}) is reached: retry",
                retry_after_ms=RETRY_AFTER_MS,
            )
        most = most_held(free)
        if any(held and held + amount > most for held in map(self._holders.__getitem__, holders)):
            raise OverloadedError(
                f"this caller's share of {self._name} is used up: end other calls, or retry",
                retry_after_ms=RETRY_AFTER_MS,
            )
        self.held += amount
        self._holders.update(dict.fromkeys(holders, amount))

    def release(self, holders: Sequence[str], amount: int) -> None:
        """Undo `reserve`, wholly or in part."""
        self.held -= amount
        for holder in dict.fromkeys(holders):
            self._holders[holder] -= amount
            if not self._holders[holder]:
                del self._holders[holder]
        self._released.set()

    def is_last_use(self, holder: str, once: bytes) -> bool:
        """End one use of a key; return whether there is no other."""
        self._uses[holder, once] -= 1
        if self._uses[holder, once]:
            return False
        del self._uses[holder, once]
        return True


class Hold:
    """What one call holds of a `Budget`, `amount` in all, until its `with` block ends."""

    __slots__ = ("_budget", "_once", "amount", "holders")

    def __init__(self, budget: Budget, holders: Sequence[str], once: bytes) -> None:
        self.holders = holders
        self.amount = 0
        self._budget = budget
        self._once = once

    @property
    def most(self) -> int:
        """The size of the budget."""
        return self._budget.size

    def resize(self, amount: int) -> None:
        """Hold `amount` from now on. Raises `OverloadedError`, and then holds what it did before."""
        if amount > self.amount:
            self._budget.reserve(self.holders, amount - self.amount)
        else:
            self._budget.release(self.holders, self.amount - amount)
        self.amount = amount

    def release(self) -> None:
        """Release all; a second time does nothing."""
        amount, self.amount = self.amount, 0
        if amount and (not self._once or self._budget.is_last_use(self.holders[0], self._once)):
            self._budget.release(self.holders, amount)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.release()


# Claims per image that may be queued. They cost memory but no device time, so up to here joining is free.
CLAIMS_PER_IMAGE = 16
# Of 3,900 images of 1024×1024 pixels. A number of images alone would admit any amount of work.
QUEUED_PATCHES = 16_000_000
AWAITED_IMAGES = 4096
# Of the host store, what readers may pin; the rest is room to encode into.
PINNED_SHARE = 0.9
# Of the host store, what rows that callers put may take before they are complete.
PUT_SHARE = 0.5
# Calls of all clients' channels, and of probes.
HEALTH_CALLS = 512


@dataclass(frozen=True, slots=True)
class Budgets:
    """All that callers may hold of a server: how much there is of each, what messages call it, whom it counts against.

    And for how long they may stall: an upload, a reader of answers, and a Fetch of an image that is not submitted yet.

    The queue counts what it holds itself (`scheduler.admission`), by the same rule.
    """

    queue: Limits
    calls: Budget
    submits: Budget
    health_calls: Budget
    fetched_images: Budget
    awaited_images: Budget
    upload_bytes: Budget
    pinned_bytes: Budget
    put_leases: Budget
    put_bytes: Budget
    upload_idle_s: float = 10.0
    reader_idle_s: float = 30.0
    max_grace_ms: int = 30_000

    @classmethod
    def of(cls, config: Config) -> Self:
        """Return the budgets of a server with these settings."""
        host_bytes = config.store_host_gib * GIB
        upload_bytes = int(config.max_queued_gib * GIB)
        claims = CLAIMS_PER_IMAGE * config.max_queued_images
        return cls(
            queue=Limits(
                images=config.max_queued_images,
                patches=QUEUED_PATCHES,
                source_bytes=upload_bytes,
                claims=claims,
                seconds=config.max_queue_s,
            ),
            # Calls count before anything of them is read: against their host.
            calls=Budget(config.max_calls, "open calls"),
            # These stay open for as long as their callers keep images, and must leave room for others.
            submits=Budget(config.max_calls, "open Submit calls"),
            health_calls=Budget(HEALTH_CALLS, "open health calls"),
            # A Fetch over this is refused as a whole and first of all: refusing must be cheaper than asking again.
            fetched_images=Budget(claims, "images in Fetch calls"),
            awaited_images=Budget(AWAITED_IMAGES, "images that are not submitted yet"),
            upload_bytes=Budget(upload_bytes, "upload bytes", per_host=True),
            pinned_bytes=Budget(int(host_bytes * PINNED_SHARE), "pinned bytes"),
            put_leases=Budget(config.max_queued_images, "Put leases", per_host=True),
            put_bytes=Budget(int(host_bytes * PUT_SHARE), "bytes of rows being put", per_host=True),
        )


# How late a refusal is answered: of a call, or of up to `NAMES_AT_A_TIME` images together. A caller that asks again at
# once would otherwise keep the event loop from everyone else. One that heeds `retry_after_ms` waits longer anyway.
REFUSAL_S = 0.05
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
