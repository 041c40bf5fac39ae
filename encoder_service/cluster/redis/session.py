"""The session with Redis: where it is, and whether this replica is connected. Every call goes through it.

A `Breaker` decides when failures are an outage, and how long to wait before each probe. A `Bulkhead` bounds calls of
one kind in time and number, and lets them rest after a run of failures.
"""

import asyncio
import logging
import random
from collections.abc import Awaitable, Callable, Sequence, Sized
from dataclasses import dataclass, replace
from time import monotonic
from typing import Any, Protocol, Self, TypeVar

from encoder_contract.errors import ModelMismatchError
from encoder_service.cluster.cluster import IndexState, Replica
from encoder_service.cluster.redis.connection import (
    FAULTS,
    REFUSALS,
    Connection,
    RedisUrl,
    Script,
    lost_connections,
    sensible_replies,
)
from encoder_service.cluster.redis.schema import Membership
from encoder_service.cluster.tasks import begin, end

log = logging.getLogger(__name__)


@dataclass(frozen=True, kw_only=True)
class RedisSettings:
    """Where the index is, and how long its entries live; Redis counts every time to live."""

    url: str
    namespace: str
    call_timeout_ms: int = 100
    source_timeout_ms: int = 1000  # image bytes are megabytes
    socket_timeout_ms: int = 1000  # of connecting, and of one answer, even if the bound of the call is longer
    # No caller waits for a heartbeat or a probe: time enough to open connections, including TLS and a cluster's map.
    beat_timeout_ms: int = 2000
    heartbeat_ms: int = 500
    replica_ttl_ms: int = 2000  # four heartbeats
    # Renewed three times within it. A holder that dies loses its leases as soon as it is off the roll; this time is for
    # leases that no replica asks about any more. It should be long, since a full queue has many to renew.
    lease_ttl_ms: int = 10_000
    location_ttl_s: int = 3600  # republished three times within it
    source_ttl_s: int = 600
    max_source_bytes: int = 8 << 20

    def patient(self, factor: float) -> Self:
        """Return these settings with every bound on silence so many times as long."""
        return replace(
            self,
            call_timeout_ms=int(factor * self.call_timeout_ms),
            source_timeout_ms=int(factor * self.source_timeout_ms),
            socket_timeout_ms=int(factor * self.socket_timeout_ms),
            beat_timeout_ms=int(factor * self.beat_timeout_ms),
            replica_ttl_ms=int(factor * self.replica_ttl_ms),
            lease_ttl_ms=int(factor * self.lease_ttl_ms),
        )


# Failures in a row that did not overlap: one stall of the network or of our own loop, which fails every call under way,
# is one failure.
FAILURES_TO_OPEN = 3
# A restart of Redis takes about this long; each replica waits between half and one and a half times of it.
FIRST_PROBE_S = 0.25
# Probes cost one connection each: often enough to be back within seconds of a long outage.
LAST_PROBE_S = 3.0
# A breaker that opens again within this time after it was closed continues with its longer delays.
WELL_S = 10.0


class Breaker:
    """Counts failures and paces probes. Its owner keeps the state (calls or probes) and reports what became of them."""

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
        """Count the failure of a call that began at `began` (the breaker's clock); return whether to stop calling.

        `refused`: the server answered with an error (out of memory, read-only, loading). One such answer is enough.
        """
        if refused or began >= self._last_failure:
            self._failures += 1
            self._last_failure = self._clock()
        if not refused and self._failures < FAILURES_TO_OPEN:
            return False
        if self._clock() - self._closed_at > WELL_S:
            self._probes = 0
        return True

    def succeeded(self) -> None:
        """End the run of failures."""
        self._failures = 0

    def probe_delay_s(self) -> float:
        """Return the time to wait before the next probe: doubling, bounded, and spread at random."""
        delay = min(LAST_PROBE_S, FIRST_PROBE_S * 2**self._probes)
        self._probes = min(self._probes + 1, 16)
        return self._uniform(0.5 * delay, 1.5 * delay)

    def close(self) -> None:
        """Note that calls are made again from now on: a probe succeeded."""
        self._failures = 0
        self._closed_at = self._clock()


class Bulkhead:
    """Bounds on calls of one kind. While it rests, none is made; the next calls after the rest are a trial."""

    def __init__(self, timeout_ms: int, max_calls: int, clock: Callable[[], float] = monotonic) -> None:
        self.timeout_s = timeout_ms / 1000
        self.turns = asyncio.Semaphore(max_calls)
        self._clock = clock
        self._breaker = Breaker(clock)
        self._breaker.close()
        self._again_at: float | None = None  # when the trial begins; None while calls succeed

    @property
    def rests(self) -> bool:
        """Whether no call is made for now, after a run of failures."""
        return self._again_at is not None and self._clock() < self._again_at

    def failed(self, began: float) -> None:
        """Count the failure of a call that began at `began`: a run of them begins a rest, as does a failed trial."""
        if self._breaker.failed(began) if self._again_at is None else began >= self._again_at:
            self._again_at = self._clock() + self._breaker.probe_delay_s()

    def succeeded(self) -> None:
        """End the run of failures, and the rest."""
        if self._again_at is not None:
            self._breaker.close()
            self._again_at = None
        self._breaker.succeeded()


Answer = TypeVar("Answer")

# Concurrent calls: more would only queue in Redis, which serves one at a time.
MAX_CALLS = 16
# Each takes megabytes; more at once would only make each of them slower.
MAX_SOURCE_CALLS = 4
# How long a call may wait for its turn, in time bounds of a call. Such a wait is not the fault of Redis and does not
# count as a failure. A call therefore takes at most four bounds.
BOUNDS_TO_WAIT = 3

# Called with the name, seconds and success of every call whose caller stayed to its end.
OnCall = Callable[[str, float, bool], None]


class SessionEvents(Protocol):
    """What the owner of a session does at its events."""

    def on_forgotten(self) -> None:
        """Redis may have lost what it knew about us: called after connecting, and when we were off the roll."""

    def on_lost(self) -> None:
        """The index is unavailable from now on."""

    async def on_beat(self) -> None:
        """A heartbeat succeeded."""


class RedisSession:
    """Joined while Redis answers in time and accepts us; otherwise alone, with probes in the background."""

    def __init__(
        self,
        settings: RedisSettings,
        jobs: Sized,
        on_call: OnCall,
        events: SessionEvents,
        roll_key: bytes,
    ) -> None:
        self._settings = settings
        self._url = RedisUrl(settings.url)
        self._jobs = jobs
        self._on_call = on_call
        self._events = events
        self._roll_key = roll_key
        self.calls = Bulkhead(settings.call_timeout_ms, MAX_CALLS)
        self.puts = Bulkhead(settings.source_timeout_ms, MAX_SOURCE_CALLS)
        self.gets = Bulkhead(settings.source_timeout_ms, MAX_SOURCE_CALLS)
        self._resting = (self.puts, self.gets)  # slow for megabytes need not be slow for others
        self.beats = Bulkhead(settings.beat_timeout_ms, 1)
        self._breaker = Breaker()
        self._reason = ""
        self._has_joined = False
        self._connection: Connection | None = None
        self._keeper: asyncio.Task[None] | None = None
        self.state = IndexState.ALONE
        self.membership: Membership | None = None

    @property
    def notify_command(self) -> bytes:
        """The command with which a script notifies waiting replicas."""
        return (
            b"SPUBLISH" if self._connection is not None and self._connection.sharded_channels else b"PUBLISH"
        )

    async def ask(
        self,
        name: str,
        call: Callable[[Connection, Membership], Awaitable[Answer]],
        bulkhead: Bulkhead | None = None,
    ) -> Answer | None:
        """Return the answer of `call`, or None without one: at once while alone, otherwise within the bound."""
        bulkhead = bulkhead or self.calls
        if self.state is not IndexState.JOINED or bulkhead.rests:
            return None
        try:
            async with asyncio.timeout(BOUNDS_TO_WAIT * bulkhead.timeout_s):
                await bulkhead.turns.acquire()
        except TimeoutError:
            return None
        try:
            return await self._ask_now(name, call, bulkhead)
        finally:
            bulkhead.turns.release()

    async def run(
        self,
        name: str,
        script: Script,
        keys: Sequence[Sequence[bytes]],
        *arguments: bytes | int,
        each: Sequence[bytes] = (),
    ) -> list[Any] | None:
        """Run a script as `Connection.run` does, within the bound; None without an answer."""
        return await self.ask(name, lambda connection, _: connection.run(script, keys, *arguments, each=each))

    async def _ask_now(
        self, name: str, call: Callable[[Connection, Membership], Awaitable[Answer]], bulkhead: Bulkhead
    ) -> Answer | None:
        if self.state is not IndexState.JOINED or bulkhead.rests:
            return None  # it was lost while we waited for our turn
        assert self._connection is not None
        assert self.membership is not None
        began = monotonic()
        try:
            with sensible_replies():
                async with asyncio.timeout(bulkhead.timeout_s):
                    answer = await call(self._connection, self.membership)
        except FAULTS as fault:
            self._failed(began, fault, bulkhead)
            self._on_call(name, monotonic() - began, False)
            return None
        self._succeeded(began, bulkhead)
        self._on_call(name, monotonic() - began, True)
        return answer

    async def register(self, replica: Replica) -> None:
        """Join, or stay alone and keep trying. Raises `ModelMismatchError`; nothing has been started then."""
        assert self.membership is None, "a replica registers once"
        self.membership = Membership(replica, self._roll_key, self._settings.replica_ttl_ms, self._jobs)
        try:
            await self._probe()
        except FAULTS as fault:
            self._enter(IndexState.ALONE, _describe(fault))
        except ModelMismatchError:
            self.membership = None
            raise
        self._keeper = begin(self._keep(), "index-keeper")

    async def heartbeat(self, bulkhead: Bulkhead) -> bool | None:
        """Send a heartbeat and update the live replicas; return whether we were on the roll, None without an answer."""
        try:
            return await self.ask(
                "beat", lambda connection, ours: ours.heartbeat(connection, "beat"), bulkhead
            )
        except ModelMismatchError as refusal:
            if self.state is IndexState.JOINED:
                self._breaker.failed(monotonic(), refused=True)
                self._lose(refusal.message)
            return None

    async def leave(self) -> None:
        """Leave the roll, and make no more calls."""
        await end(self._keeper)
        await self.ask("leave", lambda connection, ours: ours.heartbeat(connection, "leave"))
        self._enter(IndexState.LEFT, "drained")
        self._events.on_lost()

    async def close(self) -> None:
        """Stop, and close the connections."""
        await end(self._keeper)
        self.state = IndexState.LEFT
        if self._connection is not None:
            await self._disconnect(self._connection)
            self._connection = None

    async def _keep(self) -> None:
        while True:
            if self.state is IndexState.JOINED:
                await asyncio.sleep(self._settings.heartbeat_ms / 1000)
                await self._beat()
            else:
                await asyncio.sleep(self._breaker.probe_delay_s())
                await self._probe_quietly()

    async def _beat(self) -> None:
        was_present = await self.heartbeat(self.beats)
        if was_present is False:
            self._events.on_forgotten()
        if was_present is not None:
            await self._events.on_beat()

    async def _probe(self) -> None:
        # Each probe opens a new connection: what the last one knew of names, nodes and sockets may be what was wrong.
        with sensible_replies():
            async with asyncio.timeout(self._settings.beat_timeout_ms / 1000):
                connection = await self._open()
        before, self._connection = self._connection, connection
        self._has_joined = True
        self._breaker.close()
        self._enter(IndexState.JOINED, "registered")
        self._events.on_forgotten()
        if before is not None:
            await self._disconnect(before)

    async def _open(self) -> Connection:
        """Connect, and join or be back on the roll."""
        assert self.membership is not None
        connection = await Connection.open(self._url, self._settings.socket_timeout_ms / 1000)
        try:
            await self.membership.heartbeat(connection, "beat" if self._has_joined else "join")
        except BaseException:  # cancelled too: nothing else would close the connection
            await self._disconnect(connection)
            raise
        return connection

    async def _probe_quietly(self) -> None:
        try:
            await self._probe()
        except FAULTS as fault:
            log.debug("the index is still unavailable: %s", _describe(fault))
        except ModelMismatchError as refusal:
            self._enter(IndexState.ALONE, refusal.message)

    def _succeeded(self, began: float, bulkhead: Bulkhead) -> None:
        if bulkhead in self._resting:
            bulkhead.succeeded()
        # A heartbeat that took longer says nothing about calls.
        elif monotonic() - began <= self.calls.timeout_s:
            self._breaker.succeeded()

    def _failed(self, began: float, fault: Exception, bulkhead: Bulkhead) -> None:
        refused = isinstance(fault, REFUSALS)
        if bulkhead in self._resting and not refused:
            bulkhead.failed(began)
        elif self.state is IndexState.JOINED and self._breaker.failed(began, refused=refused):
            self._lose(_describe(fault))

    def _lose(self, reason: str) -> None:
        assert self.membership is not None
        self.membership.peers.clear()
        self._enter(IndexState.ALONE, reason)
        self._events.on_lost()

    def _enter(self, state: IndexState, reason: str) -> None:
        if (state, reason) == (self.state, self._reason):
            return
        self.state, self._reason = state, reason
        log.log(
            logging.INFO if state is not IndexState.ALONE else logging.WARNING,
            "index: %s (%s)",
            state.value,
            reason,
        )

    async def _disconnect(self, connection: Connection) -> None:
        try:
            with lost_connections():
                await connection.close()
        except FAULTS as fault:
            log.debug("closing a broken connection: %s", _describe(fault))


def _describe(fault: BaseException) -> str:
    return f"{type(fault).__name__}: {fault}" if str(fault) else type(fault).__name__
