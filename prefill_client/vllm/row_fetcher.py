"""Fetches rows from the service on a thread of its own, so that the scheduler never waits."""

import asyncio
import logging
import threading
from collections import deque
from collections.abc import Awaitable, Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from time import monotonic
from typing import Literal

import numpy as np

from encoder_contract.errors import (
    DeadlineError,
    EncoderError,
    InternalError,
    StaleHandleError,
    UnavailableError,
)
from encoder_contract.geometry import Grid
from prefill_client.blocking import LoopThread
from prefill_client.client import EncoderClient
from prefill_client.engine.service import connect
from prefill_client.images import FetchedRows, RowRequest, refetch_lost, use_in_place
from prefill_client.transport import BY_DEFAULT, DEVICE, INLINE
from prefill_client.transport.connection import Description, traceparent
from prefill_client.vllm.host_memory import Extent, HostMemory
from prefill_client.vllm.image_name import ImageName, RequestInfo
from prefill_client.vllm.settings import Settings
from prefill_client.vllm.staging import Staging

_log = logging.getLogger("vllm.encoder_service")  # a child of vLLM's logger, so it has its configuration
JOIN_S = 1.0  # how often an engine that works without the service tries to join it


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
    extents: tuple[Extent, ...] = ()
    staged: int = 0
    """The number of the copies that all workers have made of its rows; 0: the rows are in the extents."""


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


class RowFetcher:
    """Fetches rows on a thread with an event loop. For one calling thread. Every query ends in exactly one outcome."""

    def __init__(
        self,
        settings: Settings,
        memory: HostMemory,
        *,
        width: int,
        dtype: str,
        check: Callable[[Description], None] = lambda _: None,
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
        self._client: EncoderClient | None = None
        self._memory = memory
        self._running: dict[FetchQuery, asyncio.Task[Outcome]] = {}  # used only by the loop's thread
        self._outcomes: deque[Outcome] = deque()
        self._any_outcome = threading.Event()
        self._loop = LoopThread("encoder-rows")
        try:
            self._loop.run(self._open())
        except BaseException:  # Ctrl-C too: nothing else would end the thread
            self._loop.stop()
            raise

    @property
    def description(self) -> Description | None:
        """The service's description; None while an engine with its own tower has not joined it."""
        return self._client.description if self._client else None

    def start(self, query: FetchQuery) -> None:
        """Begin a query. Its extents are in use until its outcome."""
        self._loop.call(self._start, query)

    def cancel(self, query: FetchQuery) -> None:
        """Cancel a query. It still has an outcome."""
        self._loop.call(self._cancel, query)

    def outcomes(self) -> Iterator[Outcome]:
        """Yield the outcomes that have arrived since the last call."""
        self._any_outcome.clear()
        while self._outcomes:
            yield self._outcomes.popleft()

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
            self._client = await self._connect(wait=not self._settings.has_own_tower)
        except (UnavailableError, DeadlineError) as error:
            if not self._settings.has_own_tower:
                raise
            _log.warning("the engine's own tower encodes until the service is available: %s", error.message)
            self._joining = asyncio.create_task(retry_join(self._join, self._settings))
        await self._staging.open()

    async def _connect(self, *, wait: bool) -> EncoderClient:
        return await connect(self._settings, wait=wait, receivers=self._staging.receivers)

    async def _join(self) -> None:
        client = await self._connect(wait=False)
        try:
            await asyncio.to_thread(self._check, client.description)
        except BaseException:  # cancelled too, if the engine ends now
            await client.close()
            raise
        self._client = client

    def _start(self, query: FetchQuery) -> None:
        task = asyncio.create_task(self._run(query))
        self._running[query] = task
        task.add_done_callback(partial(self._ended, query))

    def _cancel(self, query: FetchQuery) -> None:
        if task := self._running.get(query):
            task.cancel()

    def _ended(self, query: FetchQuery, task: "asyncio.Task[Outcome]") -> None:
        del self._running[query]
        self._outcomes.append(Outcome(query, "cancelled") if task.cancelled() else task.result())
        self._any_outcome.set()

    async def _run(self, query: FetchQuery) -> Outcome:
        try:
            return await self._fetch(query)
        except EncoderError as error:
            return Outcome(query, "failed", error)
        except Exception as error:  # noqa: BLE001 - only the image fails, not the engine
            _log.error("a fetch failed unexpectedly", exc_info=error)
            return Outcome(query, "failed", InternalError(f"{type(error).__name__}: {error}"))

    async def _fetch(self, query: FetchQuery) -> Outcome:
        traceparent.set(query.info.traceparent)  # only in this task
        start_s, timeout_s = monotonic(), self._settings.timeout_s
        try:
            async with asyncio.timeout(timeout_s):
                for transports in self._transports(query):
                    if rows := await self._fetch_by(transports, query):
                        took_s = monotonic() - start_s
                        return Outcome(
                            query, "here", source=rows.source, transport=rows.transport, took_s=took_s
                        )
        except TimeoutError:
            raise DeadlineError(f"the rows did not arrive within {timeout_s:g} s") from None
        raise InternalError("the client ended a fetch without an outcome")

    def _transports(self, query: FetchQuery) -> Iterator[Sequence[str]]:
        """Yield the transports to try, one after the other."""
        if self._staging.has_room(sum(length for _, length in query.extents)):
            yield [DEVICE]
        yield BY_DEFAULT if self._settings.shared_memory else [INLINE]

    async def _fetch_by(self, transports: Sequence[str], query: FetchQuery) -> FetchedRows | None:
        """Return the rows once they are copied; None if workers could not copy them from the server's GPU."""
        assert self._client is not None, "images have names only after the service is joined"
        request = RowRequest(
            query.name.digest,
            chunk=query.chunk,
            needed_in_ms=query.needed_in_ms,
            submitted_to=query.submitted_to,
            frames=query.name.frames,
        )
        shape = Shape(query.name.grid, query.rows, self._width, self._dtype)
        async with self._client.for_tenant(query.tenant_salt.encode()).fetch(
            [request],
            request_id=query.info.request_id,
            priority=query.info.priority,
            grace_ms=int(1000 * self._settings.grace_s),
            transports=transports,
            timeout_s=self._settings.timeout_s,
            kept=bool(query.submitted_to),  # the middleware keeps it submitted
        ) as stream:
            async for rows in stream:
                if rows.transport != DEVICE:
                    await copy_rows(rows, self._memory, query.extents, shape)
                    return rows
                shape.check(rows)
                assert rows.handle is not None
                query.staged = await self._staging.copy(rows.handle)
                return rows if query.staged else None
        return None

    async def _end(self) -> None:
        tasks = list(self._running.values())
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        if self._joining is not None:
            self._joining.cancel()
            await asyncio.gather(self._joining, return_exceptions=True)
        if self._client is not None:
            await self._client.close()
        await self._staging.close()


async def retry_join(join: Callable[[], Awaitable[None]], settings: Settings) -> None:
    """Call `join` every second until it succeeds. Log each refusal once, since it may last until a restart."""
    logged: set[tuple[type[Exception], str]] = set()
    while True:
        await asyncio.sleep(JOIN_S)
        try:
            await join()
        except (UnavailableError, DeadlineError):
            continue
        except (EncoderError, ValueError, OSError) as error:  # OSError: the checkpoint cannot be read
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


async def copy_rows(rows: FetchedRows, memory: HostMemory, extents: Sequence[Extent], shape: Shape) -> None:
    """Copy rows into `extents`, on this thread: a copy on another thread could outlive a cancelled fetch.

    Raises the image's error, and `InternalError` for rows of another shape.
    """

    def write(fetched: Sequence[FetchedRows]) -> None:
        (rows,) = fetched
        shape.check(rows)
        memory.write(extents, rows.array.reshape(-1).view(np.uint8))

    while True:
        try:
            return use_in_place([rows], write)
        except StaleHandleError as error:
            (rows,) = await asyncio.gather(*refetch_lost([rows], error))
