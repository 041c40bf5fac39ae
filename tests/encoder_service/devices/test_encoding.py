"""The engine's threads with real components: order, overlap, withdrawals, failing images, a responsive event loop."""

import asyncio
import threading
import time
import weakref
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any, cast

import pytest
import torch
from torch import Tensor

from encoder_contract.digest import content_digest
from encoder_contract.errors import AbandonedError, EncoderError, InternalError, OverloadedError
from encoder_contract.geometry import Grid
from encoder_contract.header import Header
from encoder_contract.orientation import UPRIGHT
from encoder_contract.video import Frames, VideoInfo
from encoder_service.devices import device_main, workers
from encoder_service.devices.device_inbox import Inbox
from encoder_service.devices.messages import Prepared
from encoder_service.devices.model import Model
from encoder_service.devices.watchdog import HungDeviceError, Watchdog
from encoder_service.image import decoder_child
from encoder_service.image.device_decoder import Decoder
from encoder_service.image.source import Source
from encoder_service.keys import ImageKey
from encoder_service.scheduler import Claim, QueueLimits, State
from encoder_service.store import Pin
from encoder_service.vision import Tower
from encoder_service.vision.tower import GridTables, cached_by_grid
from testing.photos import photo
from tests.device_bench import Bench, Changed, Gate, demanded, running
from tests.waiting import PATIENCE_S, START_S, soon


async def test_pixels_are_free_before_their_image_is_reported_as_prepared(
    model: Model, monkeypatch: pytest.MonkeyPatch
) -> None:
    pixels: list[weakref.ref[Tensor]] = []
    in_use: list[bool] = []

    def decode(source: Source) -> Tensor | EncoderError:
        decoded = model.decoder.decode(source)
        assert isinstance(decoded, Tensor)
        pixels.append(weakref.ref(decoded))
        return decoded

    async with running(model, decode=decode) as bench:
        tell = Inbox.tell

        def report(inbox: Inbox, message: object) -> None:
            if isinstance(message, Prepared):
                in_use.extend(each() is not None for each in pixels)
            tell(inbox, message)

        monkeypatch.setattr(Inbox, "tell", report)
        await bench.rows(photo(300, 200, 1), demanded())
    assert in_use == [False]


async def test_an_image_that_breaks_its_batch_fails_alone(model: Model) -> None:
    culprit = model.tower.geometry.grid(384, 256)

    def encode(patches: Sequence[Tensor], grids: Sequence[Grid], *_: object) -> list[Tensor]:
        if culprit in grids:
            raise RuntimeError("this image breaks the tower")
        return model.tower.encode(patches, grids)

    images = [photo(256, 320, n) for n in range(8)]
    images[3] = photo(384, 256, 3)
    async with running(model, encode) as bench:
        results = await asyncio.gather(
            *(bench.rows(image, demanded(str(n))) for n, image in enumerate(images)), return_exceptions=True
        )
    assert isinstance(results[3], InternalError)
    assert all(isinstance(result, Pin) for n, result in enumerate(results) if n != 3)


async def test_a_fetch_promotes_images_over_speculative_ones(model: Model) -> None:
    gate = Gate(model)
    speculative = [photo(256, 256 + 32 * n, n) for n in range(4)]
    urgent = photo(416, 256, 9)
    async with running(model, gate.encode, batch_patches=300, ahead_patches=10_000) as bench:
        bench.submit(speculative[0], Claim("s0", "test"))
        await gate.reached(1)
        for n, image in enumerate(speculative[1:], 1):
            bench.submit(image, Claim(f"s{n}", "test"))
        waiting = asyncio.create_task(bench.rows(urgent, demanded("u")))
        promoted = asyncio.create_task(bench.rows(speculative[3], demanded("p")))
        await soon(lambda: bench.jobs.scheduler.snapshot().images[State.PREPARED, True] == 2)
        gate.open.set()
        (await waiting).release()
        (await promoted).release()
        await gate.reached(5)
    of = model.tower.geometry.grid
    order = [grids[0] for grids in gate.batches]
    assert order[0] == of(256, 256)
    wanted = {order.index(of(416, 256)), order.index(of(256, 352))}
    assert max(wanted) < min(order.index(of(256, 288)), order.index(of(256, 320)))


async def test_the_job_is_dropped_when_its_last_waiter_cancels(model: Model) -> None:
    gate = Gate(model)
    async with running(model, gate.encode, batch_patches=300, ahead_patches=10_000) as bench:
        blocker = asyncio.create_task(bench.rows(photo(256, 256, 0), demanded("b")))
        await gate.reached(1)
        shared, lonely = photo(256, 320, 1), photo(320, 256, 2)
        first = asyncio.create_task(bench.rows(shared, demanded("1")))
        second = asyncio.create_task(bench.rows(shared, demanded("2")))
        alone = asyncio.create_task(bench.rows(lonely, demanded("3")))
        await soon(lambda: bench.jobs.scheduler.snapshot().images[State.PREPARED, True] == 2)
        first.cancel()
        alone.cancel()
        await asyncio.gather(first, alone, return_exceptions=True)
        assert len(bench.jobs) == 2
        assert isinstance(bench.ended[content_digest(lonely)], AbandonedError)
        gate.open.set()
        (await second).release()
        (await blocker).release()
    encoded = [grid for grids in gate.batches for grid in grids]
    assert model.tower.geometry.grid(320, 256) not in encoded


async def fill(bench: Bench) -> list[Pin]:
    """Pin images until the store is full; return the pins."""
    held: list[Pin] = []
    with pytest.raises(OverloadedError):  # noqa: PT012 - some of them fit
        for n in range(50):
            held.append(await bench.rows(photo(256, 256, n), demanded(str(n))))
    return held


async def test_a_store_full_of_pins_fails_an_image_in_time(model: Model) -> None:
    async with running(model, host_bytes=600_000) as bench:
        held = await fill(bench)
        assert held
        for pin in held:
            pin.release()
        (await bench.rows(photo(256, 256, 99), demanded("again"))).release()


async def test_a_full_queue_refuses_with_a_retry_hint_and_continues(model: Model) -> None:
    gate = Gate(model)
    limits = QueueLimits(images=3, patches=10**6, source_bytes=1 << 30, claims=100, client_share=0.99)
    async with running(model, gate.encode, limits=limits) as bench:
        bench.submit(photo(64, 64, 0), demanded("0"))
        for n in (1, 2):
            bench.submit(photo(64, 64, n), demanded(str(n)))
        with pytest.raises(OverloadedError) as refused:
            bench.submit(photo(64, 64, 3), demanded("3"))
        assert refused.value.retry_after_ms > 0
        gate.open.set()
        await soon(lambda: not bench.jobs)
        (await bench.rows(photo(64, 64, 9), demanded("9"))).release()


async def test_the_event_loop_stays_free_while_the_tower_works(model: Model) -> None:
    turns = 0  # of the event loop
    turned: list[bool] = []

    def heavy(patches: Sequence[Tensor], grids: Sequence[Grid], *_: object) -> list[Tensor]:
        began, before = time.monotonic(), turns
        square = torch.randn(1024, 1024)
        while turns < before + 50 and time.monotonic() - began < PATIENCE_S:
            square @ square
        turned.append(turns >= before + 50)
        return model.tower.encode(patches, grids)

    async with running(model, heavy) as bench:
        waiting = [asyncio.create_task(bench.rows(photo(400, 300 + n, n), demanded())) for n in range(3)]
        while not all(task.done() for task in waiting):
            await asyncio.sleep(0.005)
            turns += 1
        for task in waiting:
            task.result().release()
    assert turned
    assert all(turned), "the loop stood still during a batch"


@pytest.mark.parametrize("value", [float("nan"), float("inf"), float("-inf")])
async def test_only_rows_with_a_nan_or_infinity_are_dropped_from_a_batch(model: Model, value: float) -> None:
    broken = True

    def encode(patches: Sequence[Tensor], grids: Sequence[Grid], *_: object) -> list[Tensor]:
        rows = [of_image.clone() for of_image in model.tower.encode(patches, grids)]
        for of_image, grid in zip(rows, grids, strict=True):
            if broken and grid.h > grid.w:
                of_image[-1, -1] = value
        return rows

    async with running(model, encode) as bench:
        tall, wide = photo(64, 128, 1), photo(128, 64, 2)
        found = await asyncio.gather(
            bench.rows(tall, demanded()), bench.rows(wide, demanded()), return_exceptions=True
        )
        assert isinstance(found[0], InternalError), found
        assert isinstance(found[1], Pin)
        found[1].release()
        broken = False
        (await bench.rows(tall, demanded())).release()  # nothing of it was kept, nor the failure


async def test_queued_images_end_with_an_error_at_shutdown(model: Model) -> None:
    gate = Gate(model)
    async with running(model, gate.encode, batch_patches=300) as bench:
        images = [photo(256, 256 + 32 * n, n) for n in range(3)]
        waiting = [asyncio.create_task(bench.rows(images[0], demanded()))]
        await gate.reached(1)
        waiting += [asyncio.create_task(bench.rows(image, demanded())) for image in images[1:]]
        await asyncio.sleep(0)
        gate.open.set()
        await bench.stop()
        results = await asyncio.gather(*waiting, return_exceptions=True)
        for result in results:
            assert isinstance(result, (Pin, EncoderError)), result
        assert isinstance(results[0], Pin)


async def test_idle_devices_get_an_image_after_its_answer_is_sent(model: Model) -> None:
    async with running(model) as bench:
        image, claim = photo(64, 64, 77), demanded()
        job = bench.submit(image, claim)
        waiting = bench.jobs.wait(job, claim)
        await asyncio.sleep(0)  # the pass of the event loop that sends the answer
        assert not job.number, "it was not sent to the device"
        (await waiting).release()
        assert job.stage_ms


async def test_images_withdrawn_during_a_failed_batch_can_start_again(model: Model) -> None:
    gate = Gate(model)
    failing, fail = threading.Event(), threading.Event()

    def encode(patches: Sequence[Tensor], grids: Sequence[Grid], *_: object) -> list[Tensor]:
        if len(grids) == 2:
            failing.set()
            assert fail.wait(START_S)
            raise RuntimeError("this batch fails")
        return gate.encode(patches, grids)

    images = [photo(128, 128, 1), photo(128, 160, 2)]
    async with running(model, encode) as bench:
        blocker = asyncio.create_task(bench.rows(photo(64, 64, 0), demanded("blocker")))
        await gate.reached(1)
        left = [asyncio.create_task(bench.rows(image, demanded("left"))) for image in images]
        await soon(lambda: bench.jobs.scheduler.snapshot().images[State.PREPARED, True] == 2)
        gate.open.set()
        assert await asyncio.to_thread(failing.wait, PATIENCE_S)
        for task in left:
            task.cancel()
        await asyncio.gather(*left, return_exceptions=True)
        fail.set()
        (await blocker).release()
        await soon(lambda: not bench.jobs)
        for digest in map(content_digest, images):
            await soon(lambda digest=digest: digest in bench.ended)
            assert isinstance(bench.ended[digest], AbandonedError)
        for image in images:
            async with asyncio.timeout(PATIENCE_S):
                (await bench.rows(image, demanded("again"))).release()


async def test_an_image_without_space_in_the_store_is_refused_before_encoding(model: Model) -> None:
    gate = Gate(model)
    gate.open.set()
    async with running(model, gate.encode, host_bytes=600_000) as bench:
        held = await fill(bench)
        encoded = len(gate.batches)
        assert encoded == len(held)
        took_s = []
        for n in range(60, 70):
            began = time.monotonic()
            with pytest.raises(OverloadedError) as refused:
                await bench.rows(photo(256, 256, n), demanded(str(n)))
            took_s.append(time.monotonic() - began)
            assert refused.value.retry_after_ms > 0
        # The store has been full for its wait time, so later images do not wait again.
        assert min(took_s) < 1
        assert len(gate.batches) == encoded
        while held:
            held.pop().release()
        (await bench.rows(photo(256, 256, 99), demanded("again"))).release()


async def test_a_batch_larger_than_the_store_is_encoded_in_smaller_batches(model: Model) -> None:
    gate = Gate(model)
    async with running(model, gate.encode, host_bytes=600_000) as bench:
        bench.store.wait_s = PATIENCE_S  # no image is refused: space comes with each batch that is read

        async def read(n: int) -> None:
            (await bench.rows(photo(256, 256, n), demanded("one"))).release()

        reading = [asyncio.create_task(read(n)) for n in range(20)]
        await gate.reached(1)
        await soon(lambda: bench.jobs.scheduler.snapshot().images[State.PREPARED, True] >= 15)
        gate.open.set()
        await asyncio.gather(*reading)
    assert max(map(len, gate.batches)) < 15


@pytest.mark.cuda
async def test_grid_tables_are_made_during_preparation_not_by_the_vit(
    model: Model, monkeypatch: pytest.MonkeyPatch
) -> None:
    making: list[str] = []
    tower = cast(Tower, model.tower)
    make = tower._make_tables

    def note(grid: Grid) -> GridTables:
        making.append(threading.current_thread().name)
        return make(grid)

    monkeypatch.setattr(tower, "_tables", cached_by_grid(note, 65536))
    encoding: set[str] = set()

    def encode(patches: Sequence[Tensor], grids: Sequence[Grid], *_: object) -> list[Tensor]:
        encoding.add(threading.current_thread().name)
        return model.tower.encode(patches, grids)

    async with running(model, encode) as bench:
        for n, width in enumerate((288, 576, 672)):
            (await bench.rows(photo(width, 1024, n), demanded(str(n)))).release()
    assert len(making) == 3
    assert encoding
    assert not encoding & set(making)


def frames_before(model: Model, digest: bytes, second: int) -> tuple[ImageKey, Source]:
    """Return the key and source of frames 0 and `second` of a video."""
    key = model.recipe.frames_key(digest, Frames(0, second, Grid(1, 16, 16)))
    info = VideoInfo(second + 1, second + 1, 30.0, 160, 96)
    return key, Source(key.source_key, b"", Header("VIDEO", 160, 96, UPRIGHT, 3), info)


class EndlessFrames:
    """Decodes until the frames are unwanted, like a decoder that must first read hours of video."""

    def __init__(self) -> None:
        self.begun = self.ended = 0

    def decode(self, _source: Source, _frames: Frames, is_wanted: Callable[[], bool]) -> EncoderError:
        """Wait until the frames are unwanted."""
        self.begun += 1
        while is_wanted():
            time.sleep(0.01)
        self.ended += 1
        return AbandonedError("nobody wants them")


async def test_unwanted_frames_release_the_decoder(model: Model) -> None:
    endless = EndlessFrames()
    decoder = cast(Decoder, Changed(model.decoder, decode_frames=endless.decode))
    async with running(replace(model, decoder=decoder)) as bench:
        for number in range(2):
            key, source = frames_before(model, bytes([number]) * 32, 200_000)
            claim = demanded(str(number))
            job = bench.jobs.submit(key, source, Grid(1, 16, 16), claim)
            assert job is not None
            waiting = bench.jobs.wait(job, claim)
            await soon(lambda: endless.begun == number + 1)  # noqa: B023 - it is over with this round
            assert endless.ended == number
            if number == 0:
                waiting.cancel()
                await soon(lambda: endless.ended == 1)
        await asyncio.wait_for(bench.stop(), PATIENCE_S)  # a server that stops does not wait for them either
    assert endless.ended == 2


async def test_frames_far_into_a_video_are_not_a_hang(model: Model, monkeypatch: pytest.MonkeyPatch) -> None:
    endless, dogs = EndlessFrames(), list[Watchdog]()

    def watchdog(on_hang: Callable[[HungDeviceError], None]) -> Watchdog:
        dogs.append(Watchdog(on_hang))
        return dogs[0]

    monkeypatch.setattr(workers, "Watchdog", watchdog)
    decoder = cast(Decoder, Changed(model.decoder, decode_frames=endless.decode))
    async with running(replace(model, decoder=decoder)) as bench:
        second = 200_000
        key, source = frames_before(model, bytes(32), second)
        bench.jobs.submit(key, source, Grid(1, 16, 16), demanded())
        await soon(lambda: endless.begun == 1)
        cpu_s = 20.0 + decoder_child.FRAME_CPU_S * second
        limit_s = int(decoder_child._WALL_S + decoder_child._WALL_PER_CPU * cpu_s)
        assert not any(dogs[0].check() for _ in range(limit_s))


async def test_a_device_reports_while_it_maps_the_store(
    model: Model, monkeypatch: pytest.MonkeyPatch
) -> None:
    """That takes 0.3 s per GiB. The server kills a silent device: it would never start."""
    memory, tell, reported = device_main._memory, Inbox.tell, threading.Event()

    def slow(*args: Any) -> Any:
        assert reported.wait(PATIENCE_S)
        return memory(*args)

    def told(inbox: Inbox, report: Any) -> None:
        tell(inbox, report)
        reported.set()

    monkeypatch.setattr(device_main, "_memory", slow)
    monkeypatch.setattr(Inbox, "tell", told)
    async with running(model) as bench:
        (await bench.rows(photo(128, 128, 1), demanded())).release()
