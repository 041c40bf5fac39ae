"""A prefetching session: while chunk k is prefilled, the rows of the chunks behind it are already on their way."""

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

# A call for the rows of one chunk, as `EncoderClient.fetch` makes it: it yields one outcome per request, in any order,
# and holds the rows until it is left.
Fetch = Callable[[Sequence[RowRequest]], AbstractAsyncContextManager[AsyncIterable[FetchedRows]]]

# Twice what a large image takes (2560×1440 in Qwen3-VL-8B: 118 MB), so that the next is always on its way.
DEFAULT_HELD_BYTES = 256 << 20
# Rows are asked for this many times as long before their need as they lately took to come.
_LEAD_FACTOR = 2.0
# The slowest of this many chunks counts: long enough to remember the last cache miss among hits.
_LATENCIES_KEPT = 8
# Weight of the newest chunk in the measured prefill speed: follows growing attention, forgives one hiccup.
_SPEED_WEIGHT = 0.5


@dataclass(frozen=True, slots=True)
class ReadyChunk:
    """A chunk that can be prefilled, with the rows of each of its windows, in their order.

    The rows are held until the next chunk is asked for. `waited_ms` is how long the caller waited for them.
    """

    chunk: Chunk
    rows: tuple[FetchedRows, ...]
    waited_ms: float

    async def read(self, use: Use[Result], executor: Executor | None = None) -> Result:
        """Call `use` in a worker thread with the rows in place and return its result (see `prefill_client.read`).

        `use` may be called twice: what it does before it returns must not change the second call.
        """
        return await read(self.rows, use, executor)


class PrefetchSession:
    """Iterates over the chunks of one prompt, each with its rows, and fetches rows ahead of the caller's prefill.

        async with PrefetchSession(client.fetch, chunks, images, row_bytes=row_bytes) as session:
            async for ready in session:
                inputs = await ready.read(lambda rows: embed(ready.chunk, [each.tensor() for each in rows]))
                await asyncio.to_thread(prefill, ready.chunk, inputs)

    The session takes the time between two chunks as the caller's prefill time, and tells the server from it how soon
    each row is needed. How far ahead it fetches adapts to how long rows take to arrive. `max_held_bytes` bounds the
    rows that are fetched or held, but the next chunk is always fetched. A chunk without images never waits.

    A failed image ends the iteration with its error: as soon as the error is known, or with `fail_at_image` when its
    chunk is reached. Leaving the session ends every open call.
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
        """`images` names each image of the prompt, without rows: those come from `chunks`. A row has `row_bytes` bytes.

        `prefill_tokens_per_s` is used until the first chunk has been prefilled and measured.
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
        self._demanded = 0  # chunks before this one have been asked for
        self._held: dict[int, _Held] = {}
        self._leaving: set[asyncio.Task[None]] = set()
        self._latencies_s: deque[float] = deque(maxlen=_LATENCIES_KEPT)
        self._handed_out_at: float | None = None

    @property
    def held_bytes(self) -> int:
        """Bytes of rows that are being fetched or held."""
        return sum(self._chunks[index].rows for index in self._held) * self._row_bytes

    @property
    def window(self) -> int:
        """Number of chunks being fetched or held behind the one that was returned last."""
        return self._demanded - self._next

    async def __aenter__(self) -> Self:
        self._demand()
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        tasks = {held.task for held in self._held.values()} | self._leaving
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
        self._demand()
        chunk, asked_at = self._chunks[self._next], self._clock()
        rows = await self._rows_of(chunk)
        self._next += 1
        self._handed_out_at = self._clock()
        return ReadyChunk(chunk, rows, waited_ms=(self._handed_out_at - asked_at) * 1000)

    def _finish_last(self) -> None:
        """Measure the chunk that the caller has just prefilled, and release its rows."""
        if self._handed_out_at is None:
            return
        last = self._chunks[self._next - 1]
        measured = (self._clock() - self._handed_out_at) / last.tokens
        self._seconds_per_token += _SPEED_WEIGHT * (measured - self._seconds_per_token)
        self._handed_out_at = None
        if held := self._held.pop(last.index, None):
            held.release()
            self._leaving.add(held.task)
            held.task.add_done_callback(self._leaving.discard)

    def _demand(self) -> None:
        """Fetch the rows of the next chunk, and of those behind it as far as lead time and memory allow."""
        lead_s = _LEAD_FACTOR * max(self._latencies_s, default=float("inf"))
        while self._demanded < len(self._chunks):
            chunk, ahead = self._chunks[self._demanded], self._demanded - self._next
            needed_in_s = (chunk.begin - self._chunks[self._next].begin) * self._seconds_per_token
            if ahead > 1 and needed_in_s > lead_s:
                return
            if ahead > 0 and self.held_bytes + chunk.rows * self._row_bytes > self._max_held_bytes:
                return
            if chunk.windows:
                self._open(chunk, round(needed_in_s * 1000))
            self._demanded += 1

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
        asked_at = self._clock()
        held = _Held(self._fetch, chunk, requests)
        held.rows.add_done_callback(lambda _: self._latencies_s.append(self._clock() - asked_at))
        self._held[chunk.index] = held

    async def _rows_of(self, chunk: Chunk) -> tuple[FetchedRows, ...]:
        """Wait for the chunk's rows. Raises the error of any failed image; with `fail_at_image`, of this chunk."""
        held = self._held.get(chunk.index)
        watched = [held] if held else []
        if not self._fail_at_image:
            watched = list(self._held.values())
        if held:
            waits: set[asyncio.Future[object]] = {held.rows, *(other.task for other in watched)}  # type: ignore[arg-type]
            await asyncio.wait(waits, return_when=asyncio.FIRST_COMPLETED)
        for other in watched:
            if other.task.done():
                other.task.result()  # raises: such a task ends early only by an error
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
                    raise outcome.error.about(f"image {image} of the prompt") from outcome.error
                arrived[outcome.index] = outcome
            self.rows.set_result(tuple(arrived[index] for index in range(len(requests))))
            await self._released.wait()

    def release(self) -> None:
        self._released.set()
