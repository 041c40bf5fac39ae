"""Small images that are demanded while a large one is encoded overtake it between its blocks."""

import asyncio
import threading
from collections.abc import Callable, Sequence
from time import monotonic
from typing import cast

import pytest
from torch import Tensor, get_num_threads, uint8

from encoder_contract.errors import OverloadedError
from encoder_contract.geometry import Grid
from encoder_service.devices import tower_credit
from encoder_service.devices.model import Model
from encoder_service.scheduler import Claim, State
from encoder_service.store import Pin
from encoder_service.vision import Tower
from encoder_service.vision.attention import PART_QUERIES
from encoder_service.vision.tower import CPU_TILE_PATCHES
from testing.decoding import decode_files
from testing.photos import photo
from tests.device_bench import Bench, demanded, running
from tests.waiting import PATIENCE_S, soon

LARGE = photo(640, 640, 0)  # 1600 patches
SMALL = [photo(288, 288, number) for number in range(1, 7)]  # 324 patches each


class Held:
    """The real tower, stopped before each block until released; records the order in which images complete."""

    def __init__(self, model: Model) -> None:
        self._encode = model.tower.encode
        self.begun = threading.Event()
        self.go_on = threading.Event()
        self.done: list[Grid] = []
        self.done_at: list[float] = []

    def encode(
        self, patches: Sequence[Tensor], grids: Sequence[Grid], between: Callable[[], None]
    ) -> list[Tensor]:
        """Encode as the tower does."""

        def at_a_block() -> None:
            self.begun.set()
            assert self.go_on.wait(PATIENCE_S)
            between()

        rows = self._encode(patches, grids, at_a_block)
        self.done.extend(grids)
        self.done_at.append(monotonic())
        return rows


def on_the_device(bench: Bench) -> int:
    """Return how many demanded images the device has decoded, or is encoding."""
    images = bench.jobs.scheduler.snapshot().images
    return sum(images[state, True] for state in (State.PREPARED, State.ENCODING, State.SPLIT))


def rows_alone(model: Model, file: bytes) -> bytes:
    """Return the rows of an image encoded alone."""
    [pixels] = decode_files(model.decoder, [file])
    assert isinstance(pixels, Tensor)
    grid = model.tower.geometry.grid(pixels.shape[1], pixels.shape[0])
    [rows] = model.tower.encode(model.tower.inputs([pixels], [grid]), [grid])
    return bytes(rows.contiguous().view(uint8).numpy())


async def test_small_images_overtake_a_large_one_by_less_than_its_work(
    model: Model, monkeypatch: pytest.MonkeyPatch
) -> None:
    """At most half of its 1600 patches at a time: two images of 324; a third still fits into half of the rest."""
    tower, later_s = Held(model), [0.0]
    monkeypatch.setattr(tower_credit, "monotonic", lambda: monotonic() + later_s[0])
    async with running(model, tower.encode, batch_patches=1024) as bench:
        claims = [Claim(f"r{n}", "one holder", demanded=True) for n in range(1 + len(SMALL))]
        waiting = [asyncio.create_task(bench.rows(LARGE, claims[0]))]
        await asyncio.to_thread(tower.begun.wait, PATIENCE_S)
        guess = bench.submit(photo(256, 256, 9), Claim("guess", "test"))
        waiting += [
            asyncio.create_task(bench.rows(file, claim))
            for file, claim in zip(SMALL, claims[1:], strict=True)
        ]
        await soon(lambda: on_the_device(bench) == 1 + len(SMALL))
        later_s[0] = 3600.0  # however long a small image takes, the large one has had more time
        tower.go_on.set()
        pins = await asyncio.gather(*waiting)
        await soon(lambda: not len(bench.jobs))
    assert tower.done.index(model.tower.geometry.grid(640, 640)) == 3
    assert tower.done[-1] == guess.grid
    for file, pin in zip([LARGE, *SMALL], pins, strict=True):
        assert bytes(pin.rows()[0]) == rows_alone(model, file)
        pin.release()


async def test_the_stage_of_an_overtaken_image_lasts_until_its_rows_are_there(model: Model) -> None:
    """A picture of the trace would else show a gap between the tower and the copy."""
    tower = Held(model)
    async with running(model, tower.encode, batch_patches=1024) as bench:
        large, small = (demanded(name) for name in ("large", "small"))
        jobs = [bench.submit(LARGE, large)]
        rows = [bench.jobs.wait(jobs[0], large)]
        await asyncio.to_thread(tower.begun.wait, PATIENCE_S)
        jobs.append(bench.submit(SMALL[0], small))
        rows.append(bench.jobs.wait(jobs[1], small))
        await soon(lambda: on_the_device(bench) == 2)
        tower.go_on.set()
        for pin in await asyncio.gather(*rows):
            pin.release()
    ended = [job.stage_began_s["vit"] + job.stage_ms["vit"] / 1000 for job in jobs]
    assert tower.done_at[0] <= ended[1] < tower.done_at[1] <= ended[0] <= jobs[0].stage_began_s["copy_out"]


async def test_an_image_without_store_space_does_not_overtake(model: Model) -> None:
    tower, row_bytes = Held(model), model.tower.width * model.tower.dtype.itemsize
    of_large, of_small = (model.tower.geometry.grid(side, side) for side in (640, 288))
    tokens = model.tower.geometry.tokens
    room = (tokens(of_large) + tokens(of_small) // 2) * row_bytes
    async with running(model, tower.encode, batch_patches=1024, host_bytes=room) as bench:
        large = asyncio.create_task(bench.rows(LARGE, demanded("large")))
        await asyncio.to_thread(tower.begun.wait, PATIENCE_S)
        small = asyncio.create_task(bench.rows(SMALL[0], demanded("small")))
        await soon(lambda: on_the_device(bench) == 2)
        tower.go_on.set()
        (await large).release()
        [after] = await asyncio.gather(small, return_exceptions=True)
        assert isinstance(after, Pin | OverloadedError)
        if isinstance(after, Pin):
            after.release()
    assert tower.done[0] == of_large


def test_a_large_image_can_be_interrupted_before_each_tile_and_part_of_its_attention(model: Model) -> None:
    """A small image waits for 256 patches of a block, or for 768 queries of its attention, not for a block."""
    [pixels] = decode_files(model.decoder, [LARGE])
    grid = model.tower.geometry.grid(640, 640)
    patches = model.tower.inputs([pixels], [grid])
    calls: list[None] = []
    [rows] = model.tower.encode(patches, [grid], lambda: calls.append(None))
    spec = cast(Tower, model.tower).spec
    tiles = -(-grid.patches // CPU_TILE_PATCHES)
    parts = (grid.patches // PART_QUERIES) * -(-spec.heads // get_num_threads())
    assert parts >= 2
    assert len(calls) == (2 * tiles + parts) * spec.depth
    assert bytes(rows.contiguous().view(uint8).numpy()) == rows_alone(model, LARGE)
