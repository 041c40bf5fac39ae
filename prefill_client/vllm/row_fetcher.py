"""Fetches rows from the service on a thread of its own, so that the scheduler never waits."""

import asyncio
import logging
import threading
from collections import defaultdict, deque
from collections.abc import Awaitable, Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from time import monotonic
from typing import Literal

import numpy as np

from encoder_contract.errors import (
    DeadlineError,
    EncoderError,
    InternalError,
    ModelMismatchError,
    UnavailableError,
)
from encoder_contract.extents import Extent
from encoder_contract.geometry import Grid
from prefill_client.blocking import LoopThread
from prefill_client.client import EncoderClient
from prefill_client.fleet.fetch_stream import FetchStream
from prefill_client.images import FetchedRows, RowRequest, read
from prefill_client.plugin.service import connect
from prefill_client.transport import BY_DEFAULT, DEVICE, TCP
from prefill_client.transport.connection import Description, traceparent
from prefill_client.vllm.host_memory import HostMemory
from prefill_client.vllm.image_name import ImageName, RequestInfo
from prefill_client.vllm.staging import Staging
from prefill_client.vllm.vllm_settings import VllmSettings

_log = logging.getLogger("vllm.encoder_service")  # a child of vLLM's logger, so it has its configuration
HOLD_S = 0.05  # how long a server holds rows that are copied, while others of the same call have not arrived
NEW_WEIGHTS = "the engine's vision weights have changed since the request began; retry"
_COPY_THREADS = 2
JOIN_S = 1.0  # how often an engine that works without the service tries to join it

# Estimates how soon rows of later steps are needed. The estimate only orders the service's work.
_PREFILL_TOKENS_PER_S = 8000


@dataclass(eq=False, slots=True)
class FetchQuery:
    """One image to fetch into `extents`."""

    name: ImageName
    rows: int
    info: RequestInfo
    tenant_salt: str = ""
    chunk: int = 0
    needed_in_ms: int = 0
    submitted_to: str = ""
    fingerprint: bytes = b""
    """The model fingerprint of the service whose rows it wants; empty: the one that is joined."""
    extents: tuple[Extent, ...] = ()
    staged: int = 0
    """The number of the copies that all workers have made of its rows; 0: the rows are in the extents."""

    @property
    def request(self) -> RowRequest:
        """What a Fetch asks for."""
        return RowRequest(
            self.name.digest,
            chunk=self.chunk,
            needed_in_ms=self.needed_in_ms,
            submitted_to=self.submitted_to,
            frames=self.name.frames,
        )


def when_needed(tokens_ahead: int, window_tokens: int) -> tuple[int, int]:
    """Return the chunk that needs an image, and in how many milliseconds, if so many tokens are prefilled before it."""
    later = max(0, tokens_ahead - window_tokens)
    return max(0, tokens_ahead) // window_tokens, 1000 * later // _PREFILL_TOKENS_PER_S


@dataclass(frozen=True, slots=True)
class Outcome:
    """How a query ended.

    `here`: the rows are in the query's extents, or staged. `failed`: the query has an `error`. `cancelled`: the
    scheduler cancelled it.
    """

    query: FetchQuery
    state: Literal["here", "failed", "cancelled"]
    error: EncoderError | None = None
    source: str = ""
    transport: str = ""
    took_s: float = 0.0


class StepFetch:
    """Images of one request that are fetched together. For one event loop.

    A server holds the rows of a Fetch until the Fetch ends. A call that has copied rows and waits for others is
    therefore renewed after `HOLD_S`: it ends, and another asks for the others. Rows would else stay held while the
    server has no memory for those that the call waits for.
    """

    def __init__(self, waiting: dict[FetchQuery, None], client: EncoderClient, *, on_device: bool) -> None:
        self.waiting = waiting
        """Queries whose rows have not arrived."""
        self.client = client
        """The service whose images these are. Another that is joined meanwhile may have other rows."""
        self.on_device = on_device
        self.began_s = monotonic()
        self.is_renewed = False
        self._is_copying = False
        self._holds = False
        self._stream: FetchStream | None = None
        self._renewal: asyncio.TimerHandle | None = None

    def renew(self) -> None:
        """End the Fetch, after a copy that runs; those that still wait are fetched again."""
        self.is_renewed = True
        if self._stream is not None and not self._is_copying:
            self._stream.close()

    @contextmanager
    def running(self, stream: FetchStream) -> Iterator[None]:
        """Let `renew` end the stream during this block."""
        self._stream, self.is_renewed, self._holds = stream, False, False
        try:
            yield
        finally:
            self._stop_timer()
            self._stream = None

    @contextmanager
    def copying(self, query: FetchQuery, *, holds: bool) -> Iterator[None]:
        """Take a query out while its rows are copied, and put it back if that is cancelled.

        `holds`: the server holds these rows until the Fetch ends.
        """
        del self.waiting[query]
        self._stop_timer()
        self._holds |= holds
        self._is_copying = True
        try:
            yield
        except asyncio.CancelledError:
            self.waiting[query] = None
            raise
        finally:
            self._is_copying = False
        if self._holds:
            self._renewal = asyncio.get_running_loop().call_later(HOLD_S, self.renew)

    def _stop_timer(self) -> None:
        if self._renewal is not None:
            self._renewal.cancel()
            self._renewal = None


class RowFetcher:
    """Fetches rows on a thread with an event loop. For one calling thread. Every query ends in exactly one outcome."""

    def __init__(
        self,
        settings: VllmSettings,
        memory: HostMemory,
        *,
        width: int,
        dtype: str,
        check: Callable[[Description], None] | None = None,
        staging: Staging | None = None,
    ) -> None:
        """Connect. Raises `UnavailableError` if no server answers within `start_timeout_s`.

        `width` and `dtype` describe a row as the engine reads it; images with other rows fail. An engine with its own
        tower does not wait for a server. It joins the service later, once `check` raises no `ValueError`. With
        `staging`, workers copy rows that a server keeps on its GPU directly from there.
        """
        self._settings = settings
        self._width = width
        self._dtype = dtype
        self._check = check
        self._staging = staging or Staging(0, 0)
        self._joining: asyncio.Task[None] | None = None
        self._leaving: set[asyncio.Task[None]] = set()
        self._client: EncoderClient | None = None
        self._description: Description | None = None
        self._services = 0  # how often `rejoin` was called
        self._joined: int | None = None  # the value of `_services` for which a service is joined
        self._memory = memory
        self._calls: dict[FetchQuery, StepFetch] = {}  # used only by the loop's thread
        self._tasks: set[asyncio.Task[None]] = set()
        self._copies = ThreadPoolExecutor(_COPY_THREADS, "encoder-rows-copy")
        self._outcomes: deque[Outcome] = deque()
        self._any_outcome = threading.Event()
        self.wake: Callable[[], None] = lambda: None
        """Called on the fetcher's thread when there is an outcome."""
        self._loop = LoopThread("encoder-rows")
        try:
            self._loop.run(self._open())
        except BaseException:  # Ctrl-C too: nothing else would end the thread
            self._loop.stop()
            raise

    @property
    def description(self) -> Description | None:
        """The service's description; None while an engine with its own tower has not joined it.

        After `rejoin`, it has the demanded fingerprint even before such a service is joined.
        """
        return self._description

    @property
    def is_joined(self) -> bool:
        """Whether a service is joined. Only then may queries start."""
        return self._joined == self._services

    def rejoin(self, fingerprint: bytes, check: Callable[[Description], None]) -> None:
        """Leave the service, and join one with another model fingerprint once it answers; none if it is empty.

        Queries that run end with an error.
        """
        self._services += 1
        if self._description is not None:
            self._description = replace(self._description, model_fingerprint=fingerprint)
        self._loop.call(self._rejoin, fingerprint, check, self._services)

    def start(self, queries: Sequence[FetchQuery]) -> None:
        """Begin queries, those of one request in one call. Their extents are in use until their outcomes."""
        self._loop.call(self._start, queries)

    def cancel(self, query: FetchQuery) -> None:
        """Cancel a query. It still has an outcome."""
        self._loop.call(self._cancel, query)

    def outcomes(self) -> Iterator[Outcome]:
        """Yield the outcomes that have arrived since the last call."""
        self._any_outcome.clear()
        while self._outcomes:
            yield self._outcomes.popleft()

    @property
    def has_outcomes(self) -> bool:
        """Whether there is an outcome that `outcomes` has not yielded."""
        return self._any_outcome.is_set()

    def wait(self, timeout_s: float) -> None:
        """Wait until there is an outcome that `outcomes` has not yielded, but at most `timeout_s`."""
        self._any_outcome.wait(timeout_s)

    def close(self) -> None:
        """Cancel all queries, close the connections and end the thread."""
        self._loop.stop(self._end())

    def release(self, query: FetchQuery) -> None:
        """Let the workers free their copies of an image, if they have any: no step needs them any more."""
        if query.staged:
            self._loop.call(self._staging.release, query.staged)

    async def _open(self) -> None:
        try:
            client = await connect(
                self._settings, wait=not self._settings.has_own_tower, receivers=self._staging.receivers
            )
            self._note_joined(client, 0)
        except (UnavailableError, DeadlineError) as error:
            if not self._settings.has_own_tower:
                raise
            _log.warning("the engine's own tower encodes until the service is available: %s", error.message)
            self._joining = asyncio.create_task(retry_join(self._join, self._settings))
        await self._staging.open()

    async def _join(
        self, fingerprint: bytes = b"", check: Callable[[Description], None] | None = None, service: int = 0
    ) -> None:
        client = await connect(
            self._settings,
            wait=False,
            receivers=self._staging.receivers,
            check=check or self._check,
            fingerprint=fingerprint,
        )
        self._note_joined(client, service)

    def _note_joined(self, client: EncoderClient, service: int) -> None:
        self._client, self._description, self._joined = client, client.description, service

    def _rejoin(self, fingerprint: bytes, check: Callable[[Description], None], service: int) -> None:
        leaving = asyncio.create_task(self._leave(self._joining, self._client))
        self._leaving.add(leaving)
        leaving.add_done_callback(self._leaving.discard)
        self._client = self._joining = None
        if fingerprint:
            join = partial(self._join, fingerprint, check, service)
            self._joining = asyncio.create_task(retry_join(join, self._settings, first_s=0.0))

    async def _leave(self, joining: asyncio.Task[None] | None, client: EncoderClient | None) -> None:
        if joining is not None:
            joining.cancel()
            await asyncio.gather(joining, return_exceptions=True)
        if client is not None:
            await client.close()

    def _start(self, queries: Sequence[FetchQuery]) -> None:
        groups: defaultdict[tuple[bool, object], list[FetchQuery]] = defaultdict(list)
        room = self._staging.free_bytes
        for query in queries:
            size = sum(length for _, length in query.extents)
            on_device = size <= room
            room -= size if on_device else 0
            info = query.info
            caller = info.request_id, info.priority, info.traceparent, query.tenant_salt, query.fingerprint
            groups[on_device, (caller, bool(query.submitted_to))].append(query)
        for (on_device, _), group in groups.items():
            self._begin(group, on_device=on_device)

    def _begin(self, queries: Sequence[FetchQuery], *, on_device: bool) -> None:
        client = self._client
        if client is None or queries[0].fingerprint not in (b"", client.description.model_fingerprint):
            error = ModelMismatchError(NEW_WEIGHTS)
            for query in queries:
                self._report(Outcome(query, "failed", error))
            return
        call = StepFetch(dict.fromkeys(queries), client, on_device=on_device)
        self._calls.update(dict.fromkeys(queries, call))
        task = asyncio.create_task(self._run(call))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    def _cancel(self, query: FetchQuery) -> None:
        call = self._calls.get(query)
        if call is not None and query in call.waiting:  # else its rows are being copied
            del call.waiting[query]
            self._ended(Outcome(query, "cancelled"))
            call.renew()  # the server must not encode the image for us

    def _ended(self, outcome: Outcome) -> None:
        del self._calls[outcome.query]
        self._report(outcome)

    def _report(self, outcome: Outcome) -> None:
        self._outcomes.append(outcome)
        self._any_outcome.set()
        self.wake()

    async def _run(self, call: "StepFetch") -> None:
        """Fetch the rows of a call's images. Every query ends in an outcome."""
        timeout_s = self._settings.timeout_s
        error: EncoderError | None = None
        try:
            async with asyncio.timeout(timeout_s):
                while call.waiting:
                    await self._fetch(call)
        except TimeoutError:
            error = DeadlineError(f"the rows did not arrive within {timeout_s:g} s")
        except EncoderError as raised:
            error = raised
        except Exception as raised:  # noqa: BLE001 - only the images fail, not the engine
            _log.error("a fetch failed unexpectedly", exc_info=raised)
            error = InternalError(f"{type(raised).__name__}: {raised}")
        finally:
            for query in call.waiting:
                self._ended(Outcome(query, "failed", error) if error else Outcome(query, "cancelled"))

    async def _fetch(self, call: "StepFetch") -> None:
        """Fetch the rows of the images that a call waits for, or of those that arrive before it is renewed."""
        queries = list(call.waiting)
        info, salt = queries[0].info, queries[0].tenant_salt
        traceparent.set(info.traceparent)  # only in this task
        host = BY_DEFAULT if self._settings.shared_memory else [TCP]
        async with call.client.for_tenant(salt.encode()).fetch(
            [query.request for query in queries],
            request_id=info.request_id,
            priority=info.priority,
            grace_ms=int(1000 * self._settings.grace_s),
            transports=[DEVICE] if call.on_device else host,
            timeout_s=self._settings.timeout_s,
            kept=bool(queries[0].submitted_to),  # the middleware keeps it submitted
        ) as stream:
            with call.running(stream):
                async for rows in stream:
                    query = queries[rows.index]
                    if query in call.waiting:
                        with call.copying(query, holds=rows.handle is not None):
                            await self._take(query, rows, call.began_s)
                    if call.is_renewed or not call.waiting:
                        return

    async def _take(self, query: FetchQuery, rows: FetchedRows, began_s: float) -> None:
        """Copy the rows of an image, and end its query; or begin it again if workers could not copy them."""
        try:
            shape = Shape(query.name.grid, query.rows, self._width, self._dtype)
            if rows.transport == DEVICE:
                shape.check(rows)
                assert rows.handle is not None
                query.staged = await self._staging.copy(rows.handle)
                if not query.staged:
                    self._begin([query], on_device=False)
                    return
            else:
                await self._copy(rows, query.extents, shape)
            outcome = Outcome(
                query, "here", source=rows.source, transport=rows.transport, took_s=monotonic() - began_s
            )
        except EncoderError as error:
            outcome = Outcome(query, "failed", error)
        except Exception as error:  # noqa: BLE001 - only the image fails, not the engine
            _log.error("rows could not be copied", exc_info=error)
            outcome = Outcome(query, "failed", InternalError(f"{type(error).__name__}: {error}"))
        self._ended(outcome)

    async def _copy(self, rows: FetchedRows, extents: Sequence[Extent], shape: "Shape") -> None:
        """Copy rows into `extents`, on a thread. Ends with the copy, even if it is cancelled.

        Raises the image's error, and `InternalError` for rows of another shape.
        """

        def write(fetched: Sequence[FetchedRows]) -> None:
            (rows,) = fetched
            shape.check(rows)
            self._memory.write(extents, rows.array.reshape(-1).view(np.uint8))

        copy = asyncio.ensure_future(read([rows], write, self._copies))
        try:
            await asyncio.shield(copy)
        except asyncio.CancelledError:
            await asyncio.wait([copy])  # else it could write into memory of another image
            raise

    async def _end(self) -> None:
        tasks = list(self._tasks)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        await self._leave(self._joining, self._client)
        await asyncio.gather(*self._leaving, return_exceptions=True)
        await self._staging.close()
        self._copies.shutdown()


async def retry_join(
    join: Callable[[], Awaitable[None]], settings: VllmSettings, *, first_s: float = JOIN_S
) -> None:
    """Call `join` after `first_s` and then every second until it succeeds. Log each refusal once: it may last."""
    logged: set[tuple[type[Exception], str]] = set()
    pause_s = first_s
    while True:
        await asyncio.sleep(pause_s)
        pause_s = JOIN_S
        try:
            await join()
        except (UnavailableError, DeadlineError):
            continue
        except (EncoderError, ValueError) as error:
            # The text of an internal error has a new incident id each time.
            kind = type(error), "" if isinstance(error, InternalError) else str(error)
            if kind not in logged:
                logged.add(kind)
                endpoints = ", ".join(settings.endpoints)
                _log.error("the encoder service at %s answers but cannot be used: %s", endpoints, error)
        else:
            return


@dataclass(frozen=True, slots=True)
class Shape:
    """The shape that an image's rows must have: `rows` of `width` elements, for this grid."""

    grid: Grid
    rows: int
    width: int
    dtype: str

    def check(self, rows: FetchedRows) -> None:
        """Raise `InternalError` for rows of another shape."""
        right = rows.grid == self.grid and rows.shape == (self.rows, self.width)
        if not right or rows.dtype != self.dtype:
            raise InternalError(
                f"the service has grid {rows.grid} and rows {rows.shape} of {rows.dtype}, not {self}"
            )
