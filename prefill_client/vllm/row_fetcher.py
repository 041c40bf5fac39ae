"""Fetches rows into host memory, on a thread with an event loop of its own: the scheduler's thread never waits."""

import asyncio
import logging
import threading
from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from time import monotonic

import numpy as np

from encoder_contract.errors import DeadlineError, EncoderError, InternalError, StaleHandleError
from prefill_client.client import EncoderClient
from prefill_client.images import FetchedRows, RowRequest
from prefill_client.transport import INLINE, TRANSPORTS
from prefill_client.transport.connection import Description, traceparent
from prefill_client.transport.reading import again, use_in_place
from prefill_client.vllm.host_memory import Extent, HostMemory
from prefill_client.vllm.image_name import ImageName
from prefill_client.vllm.settings import Settings

_log = logging.getLogger("vllm.encoder_service")  # below vLLM's own: configured, and shown, with it


@dataclass(frozen=True, slots=True)
class Caller:
    """Who wants rows: what the middleware said about the request, repeated with every Fetch."""

    request_id: str = ""
    priority: int = 0
    traceparent: str = ""


@dataclass(eq=False, slots=True)
class Wanted:
    """One image to fetch, into `extents`; itself is what its outcome is known by."""

    name: ImageName
    tokens: int
    caller: Caller
    chunk: int = 0
    needed_in_ms: int = 0
    extents: tuple[Extent, ...] = ()


@dataclass(frozen=True, slots=True)
class Outcome:
    """What came of one: its rows lie in its extents, or there is an error, or it was cancelled."""

    wanted: Wanted
    error: EncoderError | None = None
    cancelled: bool = False
    source: str = ""
    transport: str = ""
    took_s: float = 0.0


class RowFetcher:
    """For one thread. Every `fetch` ends in exactly one outcome, of which `outcomes` tells."""

    def __init__(self, settings: Settings, memory: HostMemory) -> None:
        """Connect. Raises `UnavailableError` when no server answers in `start_timeout_s`."""
        self._settings = settings
        self._memory = memory
        self._tasks: dict[Wanted, asyncio.Task[Outcome]] = {}  # of the loop's thread
        self._ended: deque[Outcome] = deque()
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="encoder-rows", daemon=True)
        self._thread.start()
        try:
            self._client = asyncio.run_coroutine_threadsafe(connect(settings), self._loop).result()
        except BaseException:
            self._stop()
            raise

    @property
    def description(self) -> Description:
        """What the service said it is."""
        return self._client.description

    def fetch(self, wanted: Wanted) -> None:
        """Begin to fetch an image's rows. Its extents are in use until its outcome is told."""
        self._loop.call_soon_threadsafe(self._begin, wanted)

    def cancel(self, wanted: Wanted) -> None:
        """Give up; the outcome still comes."""
        self._loop.call_soon_threadsafe(self._cancel, wanted)

    def outcomes(self) -> Iterator[Outcome]:
        """Yield what has ended since the last time."""
        while self._ended:
            yield self._ended.popleft()

    def close(self) -> None:
        """End every fetch, the connections and the thread."""
        asyncio.run_coroutine_threadsafe(self._close(), self._loop).result()
        self._stop()

    def _begin(self, wanted: Wanted) -> None:
        task = self._loop.create_task(self._fetch(wanted))
        self._tasks[wanted] = task
        task.add_done_callback(partial(self._end, wanted))

    def _cancel(self, wanted: Wanted) -> None:
        if task := self._tasks.get(wanted):
            task.cancel()

    def _end(self, wanted: Wanted, task: "asyncio.Task[Outcome]") -> None:
        del self._tasks[wanted]
        if task.cancelled():
            self._ended.append(Outcome(wanted, cancelled=True))
        elif (error := task.exception()) is None:
            self._ended.append(task.result())
        elif isinstance(error, EncoderError):
            self._ended.append(Outcome(wanted, error))
        else:
            _log.error("a fetch ended in a way that it never should", exc_info=error)
            self._ended.append(Outcome(wanted, InternalError(f"{type(error).__name__}: {error}")))

    async def _fetch(self, wanted: Wanted) -> Outcome:
        traceparent.set(wanted.caller.traceparent)  # of this task alone
        begun_s, timeout_s = monotonic(), self._settings.timeout_s
        request = RowRequest(wanted.name.digest, chunk=wanted.chunk, needed_in_ms=wanted.needed_in_ms)
        try:
            async with (
                asyncio.timeout(timeout_s),
                self._client.fetch(
                    [request],
                    request_id=wanted.caller.request_id,
                    priority=wanted.caller.priority,
                    grace_ms=int(1000 * self._settings.grace_s),
                    transports=TRANSPORTS if self._settings.shared_memory else [INLINE],
                    timeout_s=timeout_s,
                ) as stream,
            ):
                async for rows in stream:
                    await self._keep(wanted, rows)
                    took_s = monotonic() - begun_s
                    return Outcome(wanted, source=rows.source, transport=rows.transport, took_s=took_s)
        except TimeoutError:
            raise DeadlineError(f"no rows within {timeout_s:g} s") from None
        raise InternalError("the client ended a fetch without an outcome")

    async def _keep(self, wanted: Wanted, rows: FetchedRows) -> None:
        """Copy rows to where they are wanted. On this thread: a copy in another would outlive a cancelled fetch."""
        while True:
            try:
                return use_in_place([rows], partial(self._write, wanted))
            except StaleHandleError as error:
                (rows,) = await asyncio.gather(*again([rows], error))

    def _write(self, wanted: Wanted, fetched: Sequence[FetchedRows]) -> None:
        (rows,) = fetched
        shape = (wanted.tokens, self.description.width)
        if rows.grid != wanted.name.grid or rows.shape != shape or rows.dtype != self.description.dtype:
            raise InternalError(
                f"the service has grid {rows.grid} and rows {rows.shape} of {rows.dtype} for an image named "
                f"with grid {wanted.name.grid}, {shape} of {self.description.dtype}"
            )
        self._memory.write(wanted.extents, rows.array.reshape(-1).view(np.uint8))

    async def _close(self) -> None:
        tasks = list(self._tasks.values())
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        await self._client.close()

    def _stop(self) -> None:
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()


async def connect(settings: Settings, *, wait: bool = True) -> EncoderClient:
    """Return a client of the service; with `wait`, of one that is still being started."""
    return await EncoderClient.connect(
        settings.endpoints,
        model_fingerprint=bytes.fromhex(settings.model_fingerprint),
        tenant_salt=settings.tenant_salt.encode(),
        timeout_s=settings.start_timeout_s if wait else settings.submit_timeout_s,
        wait=wait,
    )
