"""A server of a model without a tower of ours: the client names images without grids and gets their rows."""

import threading
from collections.abc import AsyncIterator
from dataclasses import replace

import pytest
import torch

from encoder_contract.errors import InvalidImageError
from encoder_contract.geometry import Grid
from encoder_service.app import Server
from encoder_service.config import Config
from encoder_service.devices.model import Model
from prefill_client import EncoderClient, Image, RowRequest, read_images
from testing.decoding import decode_files
from testing.photos import photo
from tests.calls import collect
from tests.servers import server_of

SIZES = [(640, 480), (300, 900), (97, 161), (640, 480)]


@pytest.fixture
async def served(config: Config, generic: Model) -> AsyncIterator[Server]:
    async with server_of(config, generic) as server:
        yield server


@pytest.fixture
async def caller(served: Server) -> AsyncIterator[EncoderClient]:
    async with await EncoderClient.connect(served.endpoint) as client:
        yield client


async def test_the_client_gets_the_rows_of_the_tower(caller: EncoderClient, generic: Model) -> None:
    assert caller.description.geometry is None
    assert caller.description.model_type == "qwen2_vl"
    images = [photo(width, height, seed) for seed, (width, height) in enumerate(SIZES)]
    submitted = await caller.submit(images)
    for image, answer in zip(images, submitted, strict=True):
        assert answer.error is None
        (pixels,) = decode_files(generic.decoder, [image])
        assert isinstance(pixels, torch.Tensor)
        grid = generic.tower.geometry.grid(pixels.shape[1], pixels.shape[0])
        assert (answer.grid, answer.tokens) == (grid, grid.patches)
        [expected] = generic.tower.encode(generic.tower.inputs([pixels], [grid]), [grid])
        outcome = (await collect(caller, [RowRequest(answer.digest)]))[0]
        assert torch.equal(outcome.tensor(), expected)
    again = await caller.submit(images)
    assert all(answer.cached for answer in again)
    assert [answer.tokens for answer in again] == [answer.tokens for answer in submitted]


async def test_an_image_that_the_processor_refuses_fails_alone(caller: EncoderClient) -> None:
    good, strip = photo(320, 200, 20), photo(2400, 8, 21)
    first, refused, last = await caller.submit([good, strip, photo(200, 200, 22)])
    assert (first.error, last.error) == (None, None)
    assert isinstance(refused.error, InvalidImageError)
    assert "absolute aspect ratio must be smaller than 200" in str(refused.error)


async def test_sizes_are_counted_on_threads_and_once(
    caller: EncoderClient, generic: Model, monkeypatch: pytest.MonkeyPatch
) -> None:
    counted: list[str] = []
    count = generic.tower.geometry._count  # type: ignore[attr-defined]

    def note(width: int, height: int) -> Grid:
        counted.append(threading.current_thread().name)
        grid: Grid = count(width, height)
        return grid

    monkeypatch.setattr(generic.tower.geometry, "_count", note)
    answers = await caller.submit([photo(411, 233, seed) for seed in (31, 32)])
    assert [answer.error for answer in answers] == [None, None]
    await caller.submit([photo(411, 233, 33)])
    assert all(name.startswith("validation") for name in counted)
    assert 1 <= len(counted) <= 2  # both may be counted at once


async def test_made_up_grids_are_refused(caller: EncoderClient) -> None:
    (image,) = read_images([photo(321, 222, 40)], None)
    assert isinstance(image, Image)
    for grid, said in ((Grid(1, 3, 1), "the image has"), (Grid(2, 4, 4), "not a valid grid")):
        (answer,) = await caller.submit([replace(image, grid=grid)])
        assert isinstance(answer.error, InvalidImageError)
        assert said in str(answer.error)
