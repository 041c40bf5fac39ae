"""Prefetching: while one chunk is prefilled, the rows of the following chunks are already being fetched."""

import asyncio
import time
from collections import deque
from collections.abc import AsyncIterable, AsyncIterator, Callable, Sequence
from concurrent.futures import Executor
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass, replace
from types import TracebackType
from typing import Self, TypeVar

from prefill_client.images import FetchedRows, RowRequest, Use, read
from prefill_client.prompt import Chunk

Result = TypeVar("Result")

# Fetches the rows of one chunk, like `EncoderClient.fetch`: the context yields one outcome per request, in any order,
# and holds the rows until it exits.
Fetch = Callable[[Sequence[RowRequest]], AbstractAsyncContextManager[AsyncIterable[FetchedRows]]]

# Twice the rows of a large image (2560×1440 in Qwen3-VL-8B: 118 MB), so that the next one is always being fetched.
DEFAULT_HELD_BYTES = 256 << 20
# Fetch a chunk this many recent latencies before it is needed.
_LEAD_FACTOR = 2.0
# The slowest of this many chunks counts as the recent latency: enough to remember a cache miss among hits.
_LATENCIES_KEPT = 8
# Weight of the newest chunk in the measured prefill speed. It follows growing attention and smooths a single outlier.
_SPEED_WEIGHT = 0.5


@dataclass(frozen=True, slots=True)
class ReadyChunk:
    """A chunk that can be prefilled, with the rows of each of its windows, in order.

    The session holds the rows until the caller requests the next chunk. `waited_ms` is how long the caller waited.
    """

    chunk: Chunk
    rows: tuple[FetchedRows, ...]
    waited_ms: float

    async def read(self, use: Use[Result], executor: Executor | None = None) -> Result:
        """Call `use` in a worker thread with the rows in place and return its result (see `prefill_client.read`).

        `use` may be called twice, so it must not have side effects that change the second call.
        """
        return await read(self.rows, use, executor)


class PrefetchSession:
    """Iterates over the chunks of one prompt with their rows, and fetches rows ahead of the caller's prefill.

        async with PrefetchSession(client.fetch, chunks, images, row_bytes=row_bytes) as session:
            async for ready in session:
                inputs = await ready.read(lambda rows: embed(ready.chunk, [each.tensor() for each in rows]))
                await asyncio.to_thread(prefill, ready.chunk, inputs)

    The session measures the caller's prefill speed from the time between two chunks, and tells the server how soon each
    row is needed. The longer rows take to arrive, the further ahead it fetches. `max_held_bytes` bounds the rows that
    are being fetched or held, except that the next chunk is always fetched. A chunk without images never waits.

    A failed image ends the iteration with its error: as soon as the error is known, or, with `fail_at_image`, when the
    iteration reaches its chunk. Leaving the session ends every open call.
    """

    def __init__(
        self,
        fetch: Fetch,
        chunks: Sequence[Chunk],
        images: Sequence[RowRequest],
        *,
        row_bytes: int,
        max_held_bytes: int = DEFAULT_HELD_BYTES,
        prefill_tokens_per_s: float = 8000.0,
        fail_at_image: bool = False,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """`images` has one request per image of the prompt; the rows to fetch come from `chunks`.

        A row has `row_bytes` bytes. `prefill_tokens_per_s` is the assumed prefill speed until the first measurement.
        """
        self._fetch = fetch
        self._chunks = chunks
        self._images = images
        self._row_bytes = row_bytes
        self._max_held_bytes = max_held_bytes
        self._seconds_per_token = 1 / prefill_tokens_per_s
        self._fail_at_image = fail_at_image
        self._clock = clock
        self._next = 0
        self._requested = 0  # the chunks before this one have been requested
        self._held: dict[int, _Held] = {}
        self._releasing: set[asyncio.Task[None]] = set()
        self._latencies_s: deque[float] = deque(maxlen=_LATENCIES_KEPT)
        self._returned_at: float | None = None

    @property
    def held_bytes(self) -> int:
        """Bytes of rows that are being fetched or held."""
        return sum(self._chunks[index].rows for index in self._held) * self._row_bytes

    @property
    def window(self) -> int:
        """Number of chunks being fetched or held after the one that was returned last."""
        return self._requested - self._next

    async def __aenter__(self) -> Self:
        self._request_ahead()
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        tasks = {held.task for held in self._held.values()} | self._releasing
        self._held.clear()
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    def __aiter__(self) -> AsyncIterator[ReadyChunk]:
        return self

    async def __anext__(self) -> ReadyChunk:
        self._finish_last()
        if self._next == len(self._chunks):
            raise StopAsyncIteration
        self._request_ahead()
        chunk, began_at = self._chunks[self._next], self._clock()
        rows = await self._rows_of(chunk)
        self._next += 1
        self._returned_at = self._clock()
        return ReadyChunk(chunk, rows, waited_ms=(self._returned_at - began_at) * 1000)

    def _finish_last(self) -> None:
        """Measure the speed of the chunk that the caller has just prefilled, and release its rows."""
        if self._returned_at is None:
            return
        last = self._chunks[self._next - 1]
        measured = (self._clock() - self._returned_at) / last.tokens
        self._seconds_per_token += _SPEED_WEIGHT * (measured - self._seconds_per_token)
        self._returned_at = None
        if held := self._held.pop(last.index, None):
            held.release()
            self._releasing.add(held.task)
            held.task.add_done_callback(self._releasing.discard)

    def _request_ahead(self) -> None:
        """Request the rows of the next chunk, and of those after it as far as lead time and memory allow."""
        lead_s = _LEAD_FACTOR * max(self._latencies_s, default=float("inf"))
        while self._requested < len(self._chunks):
            chunk, ahead = self._chunks[self._requested], self._requested - self._next
            needed_in_s = (chunk.begin - self._chunks[self._next].begin) * self._seconds_per_token
            if ahead > 1 and needed_in_s > lead_s:
                return
            if ahead > 0 and self.held_bytes + chunk.rows * self._row_bytes > self._max_held_bytes:
                return
            if chunk.windows:
                self._open(chunk, round(needed_in_s * 1000))
            self._requested += 1

    def _open(self, chunk: Chunk, needed_in_ms: int) -> None:
        requests = [
            replace(
                self._images[window.image],
                row_begin=window.row_begin,
                row_end=window.row_end,
                chunk=chunk.index,
                needed_in_ms=needed_in_ms,
            )
            for window in chunk.windows
        ]
        began_at = self._clock()
        held = _Held(self._fetch, chunk, requests)
        held.rows.add_done_callback(lambda _: self._latencies_s.append(self._clock() - began_at))
        self._held[chunk.index] = held

    async def _rows_of(self, chunk: Chunk) -> tuple[FetchedRows, ...]:
        """Wait for the chunk's rows. Raises the error of any failed image; of this chunk only with `fail_at_image`."""
        held = self._held.get(chunk.index)
        watched = [held] if held else []
        if not self._fail_at_image:
            watched = list(self._held.values())
        if held:
            waits: set[asyncio.Future[object]] = {held.rows, *(other.task for other in watched)}  # type: ignore[arg-type]
            await asyncio.wait(waits, return_when=asyncio.FIRST_COMPLETED)
        for other in watched:
            if other.task.done():
                other.task.result()  # raises, because the task of a held chunk ends only with an error
        return held.rows.result() if held else ()


class _Held:
    """The open call of one chunk, which keeps its rows valid."""

    def __init__(self, fetch: Fetch, chunk: Chunk, requests: Sequence[RowRequest]) -> None:
        self.rows: asyncio.Future[tuple[FetchedRows, ...]] = asyncio.get_running_loop().create_future()
        self._released = asyncio.Event()
        self.task = asyncio.create_task(self._hold(fetch, chunk, requests))

    async def _hold(self, fetch: Fetch, chunk: Chunk, requests: Sequence[RowRequest]) -> None:
        """Collect the rows, then keep the call open until they are released. Raises the error of a failed image."""
        arrived: dict[int, FetchedRows] = {}
        async with fetch(requests) as outcomes:
            async for outcome in outcomes:
                if outcome.error is not None:
                    image = chunk.windows[outcome.index].image
                    raise outcome.error.about(f"image {image} of the prompt", image) from outcome.error
                arrived[outcome.index] = outcome
            self.rows.set_result(tuple(arrived[index] for index in range(len(requests))))
            await self._released.wait()

    def release(self) -> None:
        self._released.set()
