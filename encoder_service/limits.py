"""Limits on callers: a `Caller`, the `Budget`s that callers share, the table of budgets, units of work."""

import asyncio
import math
from collections import Counter
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Self, TypeVar
from uuid import uuid4

from encoder_contract.errors import OverloadedError
from encoder_contract.turns import Lack, Place, Room, fair_share
from encoder_service.config import GIB, QUEUED_PATCHES, Config
from encoder_service.scheduler import Claim, QueueLimits


@dataclass(frozen=True, slots=True)
class Caller:
    """The caller of one call. Created once, where the call enters, and completed from its first message."""

    host: str
    """An IPv4 address, the /64 network of an IPv6 address, or all Unix sockets."""
    holder: str
    """Its shares count against this: its tenant, or without tenants its host."""
    connection: str = ""
    is_local: bool = False
    is_peer: bool = False
    """Whether the caller is another replica of the fleet."""
    name: str = ""
    """The tenant, the client's own name, or the host."""
    request_id: str = ""
    proxy_request_id: str = ""
    """The `x-request-id` header of a proxy or framework, for the log."""
    traceparent: str = field(default="", repr=False)
    priority: int = 0
    salt: bytes = field(default=b"", repr=False)
    authorization: str | None = field(default=None, repr=False)
    certificate_names: tuple[str, ...] = ()
    signature: bytes = field(default=b"", repr=False)
    call_id: str = field(default_factory=lambda: uuid4().hex)
    """Identifies the call where the caller names no request."""

    def claim(self, chunk: int = 0, needed_at: float | None = None, *, reserves: bool = False) -> Claim:
        """Return a new claim: demanded if `needed_at` is given (a Fetch), else speculative (a Submit)."""
        return Claim(
            request_id=self.request_id or self.call_id,
            # A peer's claim counts against the holder that submitted the image: see `Claim`.
            holder="" if self.is_peer else self.holder,
            priority=self.priority,
            chunk=chunk,
            needed_at=needed_at,
            demanded=needed_at is not None,
            reserves=reserves,
        )


# A share is held for the length of a call, so it is often free again after a network round trip.
RETRY_AFTER_MS = 200


class Budget(Room):
    """A room that callers get or are refused, by name in the message. Not thread-safe: use from one event loop.

    A holder may have its `fair_share`, and at most `share`. Its first amount only needs to fit.
    """

    def __init__(
        self, size: int, name: str, *, share: float = math.inf, part_of: "Budget | None" = None
    ) -> None:
        """Amounts of a part also count in the whole, but against nobody's share of it."""

        def may_have(held: int, more: int, free: int) -> bool:
            return held + more <= share and fair_share(held, more, free)

        super().__init__(size, name, share=may_have, part_of=part_of)
        self._uses: Counter[tuple[str, bytes]] = Counter()  # by holder and key

    def hold(self, caller: Caller, amount: int = 1, *, once: bytes = b"") -> "Hold":
        """Reserve `amount` until the `with` block of the result ends. Raises `OverloadedError`.

        An amount above `size` counts as `size`. Several holds of a holder with the same key `once`, all of the same
        amount, count once.
        """
        hold = Hold(self, caller.holder, min(amount, self.size), self._uses, once)
        if (lack := hold.admit()) is not None:
            raise _refusal(lack)
        return hold

    async def hold_within(self, caller: Caller, amount: int, seconds: float, *, once: bytes = b"") -> "Hold":
        """As `hold`, but wait in turn for up to `seconds`."""
        hold = Hold(self, caller.holder, min(amount, self.size), self._uses, once)
        with suppress(TimeoutError):
            async with asyncio.timeout(seconds):
                await self.wait(hold)
                return hold
        return self.hold(caller, amount, once=once)


@dataclass(eq=False, slots=True)
class Hold(Place):
    """The `amount` of a `Budget` that one call holds until its `with` block ends."""

    uses: Counter[tuple[str, bytes]]
    """How many holds the budget has of each holder and key."""
    once: bytes

    def admit(self) -> Lack | None:
        """Take the amount now, unless another hold with the same key has it. Return None, or what lacks."""
        is_counted = bool(self.once) and self.uses[self.holder, self.once] > 0
        if self.amount and not is_counted and (lack := self.room.take_now(self.holder, self.amount)):
            return lack
        if self.amount and self.once:
            self.uses[self.holder, self.once] += 1
        self.is_taken = True
        return None

    def resize(self, amount: int) -> None:
        """Change the amount. If it raises `OverloadedError`, the amount is unchanged."""
        if amount > self.amount:
            if (lack := self.room.take_now(self.holder, amount - self.amount)) is not None:
                raise _refusal(lack)
        elif amount < self.amount:
            self.room.release(self.holder, self.amount - amount)
        self.amount = amount

    def release(self, *_: object) -> None:
        """Release everything. A second call does nothing."""
        if not self.is_taken:
            self.room.leave_line(self)
            return
        self.is_taken = False
        amount, self.amount = self.amount, 0
        if not amount:
            return
        if self.once:
            self.uses[self.holder, self.once] -= 1
            if self.uses[self.holder, self.once]:
                return
            del self.uses[self.holder, self.once]
        self.room.release(self.holder, amount)

    def __enter__(self) -> Self:
        return self

    __exit__ = release


def _refusal(lack: Lack) -> OverloadedError:
    room = lack.room
    return OverloadedError(
        f"this caller's share of {room.name} is used up: end other calls, or retry"
        if lack.is_share
        else f"the server's limit of {room.name} ({room.size}) is reached: retry",
        retry_after_ms=RETRY_AFTER_MS,
    )


# Claims per queueable image. They cost memory but no device time, so joining an image is free up to this number.
CLAIMS_PER_IMAGE = 16
AWAITED_IMAGES = 4096
# Windows of rows that the rows port sends at a time: each takes a connection. More are sent in their calls.
TICKETS = 512
MAX_IMAGES_PER_CALL = 512
# The share of the host store that readers may pin; the rest is room for new rows.
PINNED_SHARE = 0.9
# The part of it that callers may read in place, for as long as they like. The rest is room for rows that are sent.
LENT_SHARE = 0.75
# More than a cluster needs: every client of every engine has one to every replica, and keeps a health watch open on it.
MAX_CONNECTIONS = 4096
REFLECTION_CALLS = 8
# A request of an honest caller comes with its call, so few calls wait for one at a time.
ARRIVING_CALLS = 64
REFUSED_CALLS = 64


@dataclass(frozen=True, slots=True)
class Budgets:
    """The table of everything that callers may hold: its size, and its name in messages.

    It also bounds how long an upload or a reader of answers may stall, and how long a Fetch may wait for an image that
    is not submitted yet. The queue counts its own contents (`scheduler.admission`), by the same rule.
    """

    queue: QueueLimits
    calls: Budget
    submits: Budget
    health_calls: Budget
    reflection_calls: Budget
    arriving: Budget
    strangers: Budget
    refused: Budget
    fetched_messages: Budget
    awaited_images: Budget
    upload_bytes: Budget
    pinned_bytes: Budget
    lent_bytes: Budget
    tickets: Budget
    upload_idle_s: float = 10.0
    reader_idle_s: float = 30.0
    max_grace_ms: int = 30_000

    @classmethod
    def of(cls, config: Config) -> Self:
        host_bytes = config.store_host_gib * GIB
        upload_bytes = int(config.max_queued_gib * GIB)
        claims = CLAIMS_PER_IMAGE * config.max_queued_images
        pinned_bytes = Budget(int(host_bytes * PINNED_SHARE), "pinned bytes")
        return cls(
            queue=QueueLimits(
                images=config.max_queued_images,
                patches=QUEUED_PATCHES,  # a limit on images alone would admit any amount of work
                source_bytes=upload_bytes,
                claims=claims,
                seconds=config.max_queue_s,
            ),
            # A call has a place once its token is looked up, and counts against its host: a tenant may send garbage.
            calls=Budget(config.max_calls, "open calls"),
            # Submits stay open while their callers keep images. They must leave room for other calls.
            submits=Budget(config.max_calls, "open Submit calls"),
            health_calls=Budget(MAX_CONNECTIONS, "open health calls"),
            reflection_calls=Budget(REFLECTION_CALLS, "open reflection calls"),
            arriving=Budget(ARRIVING_CALLS, "calls whose request has not arrived"),
            # Those of health, and of callers that only their request can identify. They leave others their places.
            strangers=Budget(ARRIVING_CALLS, "calls of unknown callers whose request has not arrived"),
            refused=Budget(REFUSED_CALLS, "delayed refusals"),
            # A Fetch above this is refused whole, before its names are read: refusing must cost less than asking again.
            fetched_messages=Budget(claims // TURN_NAMES, "messages of Fetch calls", share=FETCHED_MESSAGES),
            awaited_images=Budget(AWAITED_IMAGES, "images that are not submitted yet"),
            upload_bytes=Budget(upload_bytes, "upload bytes"),
            pinned_bytes=pinned_bytes,
            lent_bytes=Budget(
                int(host_bytes * LENT_SHARE), "bytes of rows that are read in place", part_of=pinned_bytes
            ),
            tickets=Budget(TICKETS, "windows of rows that are sent beside their calls"),
        )


# Messages with rows that a holder may be owed: 0.1 s of the event loop, however many of them are due at one moment.
FETCHED_MESSAGES = 1000

# Refusals of a call, or of up to `NAMES_AT_A_TIME` images together, are delayed by this. Otherwise a caller that
# retries at once could keep the event loop busy. A caller that respects `retry_after_ms` waits longer anyway. A refused
# call holds what it has sent, so those beyond `REFUSED_CALLS` end at once.
REFUSAL_S = 0.05
# Units of work, of about 0.1 ms each, between two polls of the sockets. A call takes tens of passes of the event loop,
# most of them for gRPC's own events, and in each pass it waits for the units of others. One unit is no better than two.
AT_A_TIME = 2
# Receiving or sending this many bytes costs the event loop one unit of work.
TURN_BYTES = 128 << 10
# So does reading this many names of images.
TURN_NAMES = 4
# A call of hundreds of names is read in groups of this many: about 2 ms of work, and one query to the cluster.
NAMES_AT_A_TIME = 64

T = TypeVar("T")


def name_turns(names: Sequence[T]) -> list[tuple[Sequence[T], int]]:
    """Return the names of a call in groups, each with the units of work that it costs."""
    begins = range(0, len(names), NAMES_AT_A_TIME)
    groups = [names[begin : begin + NAMES_AT_A_TIME] for begin in begins]
    return [(group, 1 + len(group) // TURN_NAMES) for group in groups]
