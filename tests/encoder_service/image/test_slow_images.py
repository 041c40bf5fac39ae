"""Images that are slow or fail in a stage: other images do not wait for them and do not fail."""

import asyncio
import threading
import time
from collections.abc import Sequence

import pytest
import torch
from torch import Tensor

from encoder_contract.errors import EncoderError, InvalidImageError, OverloadedError
from encoder_contract.geometry import Grid
from encoder_service.devices.model import Model
from encoder_service.image.resize import Resize, to_patches
from encoder_service.image.source import Source
from encoder_service.scheduler import State
from encoder_service.store import Pin
from testing.photos import photo
from tests.device_bench import Gate, demanded, in_batches, running
from tests.waiting import PATIENCE_S, START_S, soon


@pytest.mark.attack("a file that is slow to decode, or takes much memory")
async def test_a_slow_image_does_not_delay_others(model: Model) -> None:
    fast = [photo(256, 256 + n, n) for n in range(8)]
    slow = photo(256, 320, 9, "PNG")
    held, open_ = threading.Event(), threading.Event()

    def decode(source: Source) -> Tensor | EncoderError:
        if source.data == slow:
            held.set()
            assert open_.wait(START_S)
        return model.decoder.decode(source)

    async with running(model, decode=decode) as bench:
        waiting = asyncio.create_task(bench.rows(slow, demanded("slow")))
        assert await asyncio.to_thread(held.wait, PATIENCE_S)
        for image in (*fast, photo(256, 300, 10, "PNG")):
            (await asyncio.wait_for(bench.rows(image, demanded()), 60)).release()
        assert not waiting.done(), "it is still being decoded"
        open_.set()
        (await waiting).release()


async def test_a_jpeg_refused_by_the_batch_decoder_is_decoded_single(model: Model) -> None:
    good = photo(256, 256, 1)
    tables = good.index(b"\xff\xdb")
    odd = good[:tables] + b"junk" * 9 + good[tables:]
    half = photo(320, 256, 2)[:3000]
    async with running(model) as bench:
        results = await asyncio.gather(
            *(bench.rows(image, demanded(str(n))) for n, image in enumerate([good, odd, half])),
            return_exceptions=True,
        )
    assert [type(result) for result in results] == [Pin, Pin, InvalidImageError]


async def test_single_decodes_are_bounded_in_pixels_beside_one_larger_image(model: Model) -> None:
    lock = threading.Lock()
    now: list[int] = []
    most: list[int] = []

    def decode(source: Source) -> Tensor | EncoderError:
        with lock:
            now.append(source.header.pixels)
            most.append(sum(now))
        time.sleep(0.02)
        outcome = model.decoder.decode(source)
        with lock:
            now.remove(source.header.pixels)
        return outcome

    small = [photo(100, 100 + n, n, "PNG") for n in range(6)]
    large = [photo(300, 300 + n, n, "PNG") for n in range(3)]
    mixed = [photo(100, 100, 10, "PNG"), photo(300, 300, 11, "PNG"), photo(100, 101, 12, "PNG")]
    async with running(model, decode=decode, decode_pixels=25_000) as bench:
        for images in (small, large, mixed):
            for pin in await asyncio.gather(*(bench.rows(i, demanded(str(n))) for n, i in enumerate(images))):
                pin.release()
            assert not now
            assert max(most) <= (25_000 if images is small else 25_000 + 300 * 302)


@pytest.mark.cuda
async def test_an_image_whose_patches_cannot_be_cut_fails_alone_in_its_batch(
    model: Model, monkeypatch: pytest.MonkeyPatch
) -> None:
    culprit = model.tower.geometry.grid(384, 256)
    sizes: list[int] = []

    def cut(pixels: Sequence[Tensor], grids: Sequence[Grid], resize: Resize) -> list[Tensor]:
        sizes.append(len(grids))
        if culprit in grids:
            raise torch.OutOfMemoryError("this image does not fit")
        return to_patches(pixels, grids, resize)

    monkeypatch.setattr("encoder_service.vision.tower.to_patches", cut)
    model = in_batches(model)
    gate = Gate(model)
    images = [photo(256, 320 + n, n) for n in range(6)]
    images[3] = photo(384, 256, 3)
    async with running(model, gate.encode) as bench:
        first = asyncio.create_task(bench.rows(photo(256, 256, 99), demanded("first")))
        await gate.reached(1)
        waiting = [asyncio.create_task(bench.rows(image, demanded())) for image in images]
        await asyncio.sleep(0)
        gate.open.set()
        results = await asyncio.gather(*waiting, return_exceptions=True)
        (await first).release()
    assert max(sizes) > 1, "no images were in one call"
    assert isinstance(results[3], OverloadedError)
    assert results[3].retryable
    assert all(isinstance(result, Pin) for n, result in enumerate(results) if n != 3)


async def test_the_next_image_is_decoded_while_the_vit_is_busy(model: Model) -> None:
    gate = Gate(model)
    async with running(model, gate.encode, batch_patches=300) as bench:
        waiting = [asyncio.create_task(bench.rows(photo(256, 256 + n, n), demanded())) for n in range(4)]
        await gate.reached(1)
        await soon(lambda: bench.jobs.scheduler.snapshot().images[State.PREPARED, True] >= 2)
        assert len(gate.batches) == 1, "the first batch is still in the tower"
        gate.open.set()
        for task in waiting:
            (await task).release()
