"""The prefetch session: what it requests and when, what it holds, and how it ends."""

import asyncio
from collections import Counter
from collections.abc import AsyncIterator, Collection, Sequence
from contextlib import asynccontextmanager
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from encoder_contract.errors import EncoderError, InvalidImageError, UnavailableError
from prefill_client import Chunk, FetchedRows, PrefetchSession, RowRequest, expand_prompt, plan
from prefill_client.transport.rows import OwnRows
from tests.waiting import PATIENCE_S, settled

IMAGE = 7
ROW_BYTES = 10
IMAGES = [RowRequest(bytes([image]) * 32) for image in range(30)]


class Encoder:
    """An in-process source of rows. The test decides when an image is ready; a row holds its image and number."""

    def __init__(self, *, ready: bool = False) -> None:
        self.all_ready = ready
        self.demands: list[RowRequest] = []
        self.open: set[int] = set()
        self._ready: dict[int, asyncio.Event] = {}
        self._errors: dict[int, EncoderError] = {}

    def finish(self, *images: int, error: EncoderError | None = None) -> None:
        for image in images:
            if error:
                self._errors[image] = error
            self._event(image).set()

    @asynccontextmanager
    async def fetch(self, requests: Sequence[RowRequest]) -> AsyncIterator[AsyncIterator[FetchedRows]]:
        self.demands += requests
        self.open.add(requests[0].chunk)
        try:
            yield self._outcomes(requests)
        finally:
            self.open.discard(requests[0].chunk)

    async def _outcomes(self, requests: Sequence[RowRequest]) -> AsyncIterator[FetchedRows]:
        for index, request in reversed(list(enumerate(requests))):
            image = request.digest[0]
            await self._event(image).wait()
            numbers = np.arange(request.row_begin, request.row_end)
            array = np.stack([np.full_like(numbers, image), numbers], axis=1)
            yield FetchedRows(index, request.digest, OwnRows(array), error=self._errors.get(image))

    def _event(self, image: int) -> asyncio.Event:
        event = self._ready.setdefault(image, asyncio.Event())
        if self.all_ready:
            event.set()
        return event

    def demanded_chunks(self) -> list[int]:
        return list(dict.fromkeys(request.chunk for request in self.demands))


def named(rows: Sequence[FetchedRows]) -> list[tuple[int, int, int]]:
    """The windows of a chunk: image, begin, end."""
    return [(int(r.array[0, 0]), int(r.array[0, 1]), int(r.array[-1, 1]) + 1) for r in rows]


class Clock:
    """A clock that the test advances."""

    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


def session_of(encoder: Encoder, chunks: Sequence[Chunk], **options: Any) -> PrefetchSession:
    return PrefetchSession(encoder.fetch, chunks, IMAGES, row_bytes=ROW_BYTES, **options)


def images_of(sizes: Sequence[int], chunk_tokens: int) -> tuple[Chunk, ...]:
    return plan(expand_prompt([IMAGE] * len(sizes), IMAGE, sizes), chunk_tokens)


@settings(max_examples=50, deadline=None)
@given(
    st.lists(st.tuples(st.integers(0, 9), st.integers(1, 30)), max_size=6),
    st.integers(1, 40),
    st.integers(1, 900),
)
def test_chunks_arrive_in_order_with_exactly_their_rows(
    parts: list[tuple[int, int]], chunk_tokens: int, max_held_bytes: int
) -> None:
    prompt = [token for text, _ in parts for token in [1] * text + [IMAGE]] + [1, 1]
    chunks = plan(expand_prompt(prompt, IMAGE, [tokens for _, tokens in parts]), chunk_tokens)

    async def run() -> None:
        encoder = Encoder(ready=True)
        session = session_of(encoder, chunks, max_held_bytes=max_held_bytes)
        seen = []
        async with session:
            async for ready in session:
                assert named(ready.rows) == [(w.image, w.row_begin, w.row_end) for w in ready.chunk.windows]
                assert session.held_bytes <= max(max_held_bytes, ready.chunk.rows * ROW_BYTES)
                seen.append(ready.chunk)
        assert seen == list(chunks)
        rows = Counter((d.digest[0], r) for d in encoder.demands for r in range(d.row_begin, d.row_end))
        assert rows == Counter((image, r) for image, (_, tokens) in enumerate(parts) for r in range(tokens))
        assert not encoder.open

    asyncio.run(run())


async def test_later_chunks_are_requested_while_the_first_one_is_awaited() -> None:
    encoder = Encoder()
    async with session_of(encoder, images_of([8] * 4, 8)) as session:
        first = asyncio.ensure_future(anext(session))
        await settled()
        assert encoder.demanded_chunks() == [0, 1, 2, 3]
        encoder.finish(1)
        await settled()
        assert not first.done()
        encoder.finish(0)
        assert named((await first).rows) == [(0, 0, 8)]


async def test_rows_of_a_chunk_are_released_with_the_next_request() -> None:
    encoder = Encoder(ready=True)
    async with session_of(encoder, images_of([8] * 3, 8)) as session:
        await anext(session)
        await settled()
        assert encoder.open == {0, 1, 2}
        await anext(session)
        await settled()
        assert encoder.open == {1, 2}


async def test_held_bytes_stay_bounded_and_the_next_chunk_is_always_fetched() -> None:
    encoder = Encoder(ready=True)
    chunks = images_of([4, 4, 4, 20, 4], 4)
    held, seen = [], []
    async with session_of(encoder, chunks, max_held_bytes=85) as session:
        async for ready in session:
            held.append(session.held_bytes)
            seen.append(ready.chunk.index)
    assert seen == [chunk.index for chunk in chunks]
    assert max(held) == 80
    chunks = images_of([50, 50], 50)
    async with session_of(encoder, chunks, max_held_bytes=85) as session:
        assert [(ready.chunk.index, session.held_bytes) async for ready in session] == [(0, 500), (1, 500)]


async def test_a_chunk_without_images_never_waits() -> None:
    encoder = Encoder()
    chunks = plan(expand_prompt([1] * 8 + [IMAGE] + [1] * 4, IMAGE, [4]), 4)
    async with session_of(encoder, chunks) as session:
        for index in (0, 1):
            ready = await asyncio.wait_for(anext(session), PATIENCE_S)
            assert (ready.chunk.index, ready.rows) == (index, ())
        assert encoder.demanded_chunks() == [2]
        third = asyncio.ensure_future(anext(session))
        await settled()
        assert not third.done()
        encoder.finish(0)
        assert named((await third).rows) == [(0, 0, 4)]


async def test_a_failed_image_fails_the_request_at_once() -> None:
    encoder = Encoder()
    async with session_of(encoder, images_of([8] * 4, 8)) as session:
        first = asyncio.ensure_future(anext(session))
        await settled()
        encoder.finish(2, error=InvalidImageError("no image"))
        with pytest.raises(InvalidImageError, match="image 2 of the prompt: no image") as raised:
            await asyncio.wait_for(first, PATIENCE_S)
        assert raised.value.image == 2
    assert not encoder.open


async def test_a_failed_image_fails_at_a_chunk_without_images() -> None:
    encoder = Encoder()
    chunks = plan(expand_prompt([1] * 8 + [IMAGE], IMAGE, [4]), 4)
    async with session_of(encoder, chunks) as session:
        await anext(session)
        encoder.finish(0, error=InvalidImageError("no image"))
        await settled()
        with pytest.raises(InvalidImageError):
            await anext(session)


async def test_fail_at_image_fails_only_at_the_chunk_of_the_image() -> None:
    encoder = Encoder()
    encoder.finish(0, 1, 3)
    encoder.finish(2, error=InvalidImageError("no image"))
    session = session_of(encoder, images_of([8] * 4, 8), fail_at_image=True)
    async with session:
        for index in (0, 1):
            await settled()
            assert (await anext(session)).chunk.index == index
        with pytest.raises(InvalidImageError, match="image 2"):
            await anext(session)
    assert not encoder.open


async def test_a_failed_call_fails_the_request() -> None:
    @asynccontextmanager
    async def unreachable(requests: Sequence[RowRequest]) -> AsyncIterator[AsyncIterator[FetchedRows]]:
        raise UnavailableError("no server")
        yield

    async with PrefetchSession(unreachable, images_of([8], 8), IMAGES, row_bytes=ROW_BYTES) as session:
        with pytest.raises(UnavailableError, match="no server"):
            await asyncio.wait_for(anext(session), PATIENCE_S)


async def test_a_cancelled_request_leaves_no_open_call() -> None:
    encoder = Encoder()

    async def request() -> None:
        async with session_of(encoder, images_of([8] * 4, 8)) as session:
            await anext(session)

    task = asyncio.create_task(request())
    await settled()
    assert encoder.open == {0, 1, 2, 3}
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert not encoder.open


async def test_needed_in_ms_follows_the_measured_prefill_speed() -> None:
    encoder, clock = Encoder(ready=True), Clock()
    session = session_of(
        encoder, images_of([10] * 12, 10), max_held_bytes=300, prefill_tokens_per_s=1000, clock=clock
    )
    async with session:
        async for _ in session:
            await settled()
            clock.now += 0.5  # ten tokens in half a second
    needed = {demand.chunk: demand.needed_in_ms for demand in encoder.demands}
    assert (needed[0], needed[1], needed[2]) == (0, 10, 20)
    # Later chunks are requested when memory is free, one or two chunks of half a second before they are needed.
    assert needed[11] == pytest.approx(500, abs=5)


async def test_slow_rows_are_requested_further_ahead() -> None:
    async def windows(slow: Collection[int]) -> list[int]:
        encoder, clock = Encoder(), Clock()
        encoder.finish(*(image for image in range(30) if image not in slow))
        session = session_of(encoder, images_of([10] * 30, 10), max_held_bytes=500, clock=clock)
        sizes = []
        async with session:
            for image in range(30):
                ready = asyncio.ensure_future(anext(session))
                await settled()
                if image in slow:
                    clock.now += 0.3
                    encoder.finish(image)
                await ready
                sizes.append(session.window)
                clock.now += 0.1
        return sizes

    quick, slow, slow_once = await windows([]), await windows(range(30)), await windows([12])
    assert quick[0] == slow[0] == 4  # nothing measured yet: as far as memory goes
    assert quick[13] == 1
    assert slow[13] == slow_once[13] == 4, "the slowest rows decide"
    assert slow_once[25] == 1, "it was too long ago"
