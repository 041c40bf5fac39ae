"""The session with Redis: its settings, and whether this replica is connected. Every call goes through it.

A `Breaker` decides when failures are an outage, and how long to wait before each probe. A `Bulkhead` bounds calls of
one kind in time and number.
"""

import asyncio
import logging
import random
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, replace
from time import monotonic
from typing import Any, NamedTuple, Protocol, Self, TypeVar

from encoder_contract.backoff import backoff_s
from encoder_contract.errors import ModelMismatchError
from encoder_contract.turns import Room
from encoder_service.cluster.cluster import IndexState, Replica
from encoder_service.cluster.redis.connection import (
    FAULTS,
    REFUSALS,
    RedisConnection,
    RedisUrl,
    Script,
    invalid_replies,
    lost_connections,
)
from encoder_service.cluster.redis.schema import Membership
from encoder_service.cluster.tasks import cancel_task, start_task

log = logging.getLogger(__name__)


@dataclass(frozen=True, kw_only=True)
class RedisSettings:
    """The URL of the index, its timeouts, and the time to live of its entries, which Redis enforces."""

    url: str
    namespace: str
    call_timeout_ms: int = 100
    socket_timeout_ms: int = 1000  # for connecting and for one answer, even if the call's own limit is longer
    # Longer, as no caller waits for a heartbeat or a probe: it includes opening connections, TLS and a cluster's map.
    beat_timeout_ms: int = 2000
    heartbeat_ms: int = 500
    replica_ttl_ms: int = 2000  # four heartbeats; the same for all replicas: see `heartbeat.lua`
    # A lease lives as long as its replica: a dead one loses its leases once its `replica_ttl_ms` is over. This time
    # ends leases that nobody asks about, or that were never released. It is long: they are renewed three times within
    # it, and a fleet with full queues has more than 100,000.
    lease_ttl_ms: int = 300_000
    location_ttl_s: int = 3600  # locations are republished three times within it

    def with_timeouts_scaled(self, factor: float) -> Self:
        """Return these settings with every timeout multiplied by `factor`."""
        return replace(
            self,
            call_timeout_ms=int(factor * self.call_timeout_ms),
            socket_timeout_ms=int(factor * self.socket_timeout_ms),
            beat_timeout_ms=int(factor * self.beat_timeout_ms),
            replica_ttl_ms=int(factor * self.replica_ttl_ms),
            lease_ttl_ms=int(factor * self.lease_ttl_ms),
        )


# Consecutive failures that did not overlap. One stall of the network or of our own loop fails every running call, and
# counts as one failure.
FAILURES_TO_OPEN = 3
# A restart of Redis takes about this long. Each replica waits between half and one and a half times as long.
FIRST_PROBE_S = 0.25
# The longest delay. Each probe opens a connection; this is often enough to reconnect within seconds of a long outage.
LAST_PROBE_S = 3.0
# If failures stop calls again within this time of the last outage, the delays continue where they were.
STABLE_S = 10.0


class Breaker:
    """Counts failures and paces probes. Its owner makes the calls and probes, and reports their results."""

    def __init__(
        self,
        clock: Callable[[], float] = monotonic,
        uniform: Callable[[float, float], float] = random.uniform,
    ) -> None:
        self._clock = clock
        self._uniform = uniform
        self._failures = 0
        self._last_failure = float("-inf")
        self._probes = 0
        self._closed_at = float("-inf")

    def failed(self, began: float, *, refused: bool = False) -> bool:
        """Count the failure of a call that began at `began` (by the breaker's clock); return whether to stop calls.

        `refused` means that the server answered with an error (out of memory, read-only, loading). One is enough to
        stop calls.
        """
        if refused or began >= self._last_failure:
            self._failures += 1
            self._last_failure = self._clock()
        if not refused and self._failures < FAILURES_TO_OPEN:
            return False
        if self._clock() - self._closed_at > STABLE_S:
            self._probes = 0
        return True

    def succeeded(self) -> None:
        """Reset the count of consecutive failures."""
        self._failures = 0

    def probe_delay_s(self) -> float:
        """Return the time to wait before the next probe: it doubles, up to a limit, and has random jitter."""
        delay = backoff_s(self._probes, FIRST_PROBE_S, LAST_PROBE_S)
        self._probes += 1
        return self._uniform(0.5 * delay, 1.5 * delay)

    def close(self) -> None:
        """Record that a probe succeeded, so that calls are made again."""
        self._failures = 0
        self._closed_at = self._clock()


class Bulkhead(NamedTuple):
    """The time limit of calls of one kind, and room for those that run at once."""

    timeout_s: float
    room: Room


Answer = TypeVar("Answer")

# Concurrent calls: more would only queue in Redis, which serves one at a time.
MAX_CALLS = 16
# How long a call may wait for its turn, in multiples of its timeout. This wait is not the fault of Redis and does not
# count as a failure. So a call takes at most four times its timeout.
TIMEOUTS_TO_WAIT = 3

# Called with the name, seconds and success of every call that was not cancelled.
OnCall = Callable[[str, float, bool], None]


class IndexEvents(Protocol):
    """The callbacks of the index; `RedisCluster` implements them."""

    def on_entries_lost(self) -> None:
        """Redis may have lost this replica's entries. Called after connecting, and after the replica was not listed."""

    def on_unavailable(self) -> None:
        """The index is unavailable from now on."""

    async def on_heartbeat(self) -> None:
        """A heartbeat succeeded."""

    def on_changed(self, address: bytes) -> None:
        """A notification said that the address changed."""


class RedisSession:
    """Joined while Redis answers in time and accepts us; otherwise alone, with probes in the background."""

    def __init__(
        self,
        settings: RedisSettings,
        on_call: OnCall,
        events: IndexEvents,
        membership_keys: Sequence[bytes],
    ) -> None:
        self._settings = settings
        self._url = RedisUrl(settings.url)
        self._on_call = on_call
        self._events = events
        self._membership_keys = membership_keys
        self.calls = Bulkhead(settings.call_timeout_ms / 1000, Room(MAX_CALLS))
        self.beats = Bulkhead(settings.beat_timeout_ms / 1000, Room(1))
        self._breaker = Breaker()
        self._reason = ""
        self._has_joined = False
        self._connection: RedisConnection | None = None
        self._task: asyncio.Task[None] | None = None
        self.state = IndexState.ALONE
        self.membership: Membership | None = None

    @property
    def notify_command(self) -> bytes:
        """The command that scripts use to notify waiting replicas."""
        return (
            b"SPUBLISH" if self._connection is not None and self._connection.sharded_channels else b"PUBLISH"
        )

    async def call(
        self,
        name: str,
        function: Callable[[RedisConnection, Membership], Awaitable[Answer]],
        bulkhead: Bulkhead | None = None,
    ) -> Answer | None:
        """Return the answer of `function`; None if it fails or times out, and at once while this replica is alone."""
        bulkhead = bulkhead or self.calls
        if self.state is not IndexState.JOINED:
            return None
        try:
            async with asyncio.timeout(TIMEOUTS_TO_WAIT * bulkhead.timeout_s):
                place = await bulkhead.room.take()
        except TimeoutError:
            return None
        try:
            return await self._call_now(name, function, bulkhead)
        finally:
            place.release()

    async def run(
        self,
        name: str,
        script: Script,
        keys: Sequence[Sequence[bytes]],
        *arguments: bytes | int,
        each: Sequence[bytes] = (),
    ) -> list[Any] | None:
        """Run a script as `RedisConnection.run` does; None if it fails or times out."""
        return await self.call(
            name, lambda connection, _: connection.run(script, keys, *arguments, each=each)
        )

    async def _call_now(
        self,
        name: str,
        function: Callable[[RedisConnection, Membership], Awaitable[Answer]],
        bulkhead: Bulkhead,
    ) -> Answer | None:
        if self.state is not IndexState.JOINED:
            return None  # the connection was lost while this call waited for its turn
        assert self._connection is not None
        assert self.membership is not None
        began = monotonic()
        try:
            with invalid_replies():
                async with asyncio.timeout(bulkhead.timeout_s):
                    answer = await function(self._connection, self.membership)
        except FAULTS as fault:
            self._failed(began, fault)
            self._on_call(name, monotonic() - began, False)
            return None
        self._succeeded(began)
        self._on_call(name, monotonic() - began, True)
        return answer

    @property
    def never_joined(self) -> str:
        """Why this replica has not joined since its start; empty if it has."""
        return "" if self._has_joined else self._reason or "not tried yet"

    async def register(self, replica: Replica) -> None:
        """Join, or stay alone and keep trying. Raises `ModelMismatchError`, before anything is started."""
        assert self.membership is None, "a replica registers once"
        self.membership = Membership(replica, self._membership_keys, self._settings.replica_ttl_ms)
        try:
            await self._probe()
        except FAULTS as fault:
            self._set_state(IndexState.ALONE, _describe(fault))
        except ModelMismatchError:
            self.membership = None
            raise
        self._task = start_task(self._run(), "index-session")

    async def heartbeat(self, bulkhead: Bulkhead) -> bool | None:
        """Send a heartbeat and update the peers; return whether this replica was listed, None without an answer."""
        try:
            return await self.call(
                "beat", lambda connection, ours: ours.heartbeat(connection, "beat"), bulkhead
            )
        except ModelMismatchError as refusal:
            if self.state is IndexState.JOINED:
                self._breaker.failed(monotonic(), refused=True)
                self._go_alone(refusal.message)
            return None

    async def leave(self) -> None:
        """Remove this replica from the list, and make no more calls."""
        await cancel_task(self._task)
        await self.call("leave", lambda connection, ours: ours.heartbeat(connection, "leave"))
        self._set_state(IndexState.LEFT, "drained")
        self._events.on_unavailable()

    async def close(self) -> None:
        """Stop, and close the connections."""
        await cancel_task(self._task)
        self.state = IndexState.LEFT
        if self._connection is not None:
            await self._close_connection(self._connection)
            self._connection = None

    async def _run(self) -> None:
        while True:
            if self.state is IndexState.JOINED:
                await asyncio.sleep(self._settings.heartbeat_ms / 1000)
                await self._send_heartbeat()
            else:
                await asyncio.sleep(self._breaker.probe_delay_s())
                await self._try_probe()

    async def _send_heartbeat(self) -> None:
        was_listed = await self.heartbeat(self.beats)
        if was_listed is False:
            self._events.on_entries_lost()
        if was_listed is not None:
            await self._events.on_heartbeat()

    async def _probe(self) -> None:
        # Each probe opens a new connection: stale names, nodes or sockets of the last one may have caused the outage.
        with invalid_replies():
            async with asyncio.timeout(self._settings.beat_timeout_ms / 1000):
                connection = await self._open()
        before, self._connection = self._connection, connection
        self._has_joined = True
        self._breaker.close()
        self._set_state(IndexState.JOINED, "registered")
        self._events.on_entries_lost()
        if before is not None:
            await self._close_connection(before)

    async def _open(self) -> RedisConnection:
        """Connect, and join, or renew this replica's entry after an outage."""
        assert self.membership is not None
        connection = await RedisConnection.open(self._url, self._settings.socket_timeout_ms / 1000)
        try:
            await self.membership.heartbeat(connection, "beat" if self._has_joined else "join")
        except BaseException:  # also when cancelled: nothing else would close the connection
            await self._close_connection(connection)
            raise
        return connection

    async def _try_probe(self) -> None:
        try:
            await self._probe()
        except REFUSALS as refusal:  # the same words again are not logged
            self._set_state(IndexState.ALONE, _describe(refusal))
        except FAULTS as fault:
            log.debug("the index is still unavailable: %s", _describe(fault))
        except ModelMismatchError as refusal:
            self._set_state(IndexState.ALONE, refusal.message)

    def _succeeded(self, began: float) -> None:
        # A success that took longer than a call may take does not show that calls would succeed.
        if monotonic() - began <= self.calls.timeout_s:
            self._breaker.succeeded()

    def _failed(self, began: float, fault: Exception) -> None:
        refused = isinstance(fault, REFUSALS)
        if self.state is IndexState.JOINED and self._breaker.failed(began, refused=refused):
            self._go_alone(_describe(fault))

    def _go_alone(self, reason: str) -> None:
        assert self.membership is not None
        self.membership.forget_peers()
        self._set_state(IndexState.ALONE, reason)
        self._events.on_unavailable()

    def _set_state(self, state: IndexState, reason: str) -> None:
        if (state, reason) == (self.state, self._reason):
            return
        self.state, self._reason = state, reason
        log.log(
            logging.INFO if state is not IndexState.ALONE else logging.WARNING,
            "index: %s (%s)",
            state.value,
            reason,
        )

    async def _close_connection(self, connection: RedisConnection) -> None:
        try:
            with lost_connections():
                await connection.close()
        except FAULTS as fault:
            log.debug("closing a connection failed: %s", _describe(fault))


def _describe(fault: BaseException) -> str:
    return f"{type(fault).__name__}: {fault}" if str(fault) else type(fault).__name__
