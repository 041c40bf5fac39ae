"""Claimed grids of images that a peer holds or encodes: only the image's own grid is confirmed."""

from dataclasses import replace
from typing import cast

import pytest

from encoder_contract.errors import Status
from encoder_contract.v1 import encoder_pb2 as pb
from encoder_service.config import Config
from encoder_service.devices.model import Model
from encoder_service.vision import Tower
from prefill_client import EncoderClient, read_images
from tests.calls import begin_submit, named, next_states, raw_submit
from tests.cluster_replica import Replica, Start, held_by, new_photo, starting, through_peer
from tests.device_bench import Changed

IMPOSSIBLE = {
    "empty": pb.Grid(t=1, h=0, w=0),
    "half a token": pb.Grid(t=1, h=3, w=20),
    "a film": pb.Grid(t=2, h=20, w=20),
    "tokens past 32 bits": pb.Grid(t=1, h=2**32 - 2, w=2**32 - 2),
    "over the model's size": pb.Grid(t=1, h=512, w=512),
}


def grid_of(replica: Replica, file: bytes) -> pb.Grid:
    (image,) = read_images([file], replica.client.description.geometry)
    return pb.Grid(t=image.grid.t, h=image.grid.h, w=image.grid.w)


async def first_answers(client: EncoderClient, *names: pb.ImageName) -> dict[int, pb.ImageState]:
    """Name images, read one answer each, and leave."""
    call = await begin_submit(client, *names)
    states = await next_states(call, len(names))
    call.cancel()
    return {state.index: state for state in states}


async def test_an_image_of_a_peer_is_confirmed_with_its_own_grid(start: Start) -> None:
    a, b = await start(), await start()
    file = await held_by(a, seen_by=b)
    (state,) = (await first_answers(b.client, named(0, file)[0])).values()
    assert (state.state, state.grid) == (pb.STATE_CACHED, grid_of(b, file))
    assert state.tokens == state.grid.h * state.grid.w // 4


async def test_a_wrong_grid_for_a_peers_image_is_refused_after_its_header(start: Start) -> None:
    a, b = await start(), await start()
    file = await held_by(a, seen_by=b)
    wrong = pb.Grid(t=1, h=2, w=2)
    states = await raw_submit(b.client, [named(0, file, grid=wrong)])
    assert [state.state for state in states[0]] == [pb.STATE_NEEDS_BYTES, pb.STATE_FAILED]
    assert states[0][-1].error.code == Status.INVALID_ARGUMENT.value


async def test_a_wrong_grid_for_an_image_in_progress_is_refused_after_its_bytes(start: Start) -> None:
    a, b = await start(), await start()
    file = new_photo()
    with a.gate.closed():
        await a.client.submit([file])
        (image,) = await b.client.submit([file])  # B keeps the bytes, A has the lease
        right, wrong = named(0, file)[0], named(1, file, grid=pb.Grid(t=1, h=2, w=2))[0]
        states = await first_answers(b.client, right, wrong)
    assert (states[0].state, states[0].grid) == (pb.STATE_QUEUED, grid_of(b, file))
    assert states[1].error.code == Status.INVALID_ARGUMENT.value
    assert (await b.fetch(image.digest)).error is None


@pytest.mark.parametrize("grid", IMPOSSIBLE.values(), ids=list(IMPOSSIBLE))
async def test_an_impossible_grid_fails_only_its_image(start: Start, grid: pb.Grid) -> None:
    a, b = await start(), await start()
    held, unknown = await held_by(a, seen_by=b), new_photo()
    names = [named(n, file, grid=grid)[0] for n, file in enumerate((held, unknown))]
    states = await first_answers(b.client, *names, named(2, held)[0])
    for n in (0, 1):
        assert states[n].state == pb.STATE_FAILED
        assert states[n].error.code == Status.INVALID_ARGUMENT.value
    assert states[2].state == pb.STATE_CACHED


async def test_a_peers_thinnest_image_is_accepted(config: Config, model: Model, redis_url: str) -> None:
    small = replace(cast(Tower, model.tower).geometry, min_pixels=1 << 16, max_pixels=1 << 16)
    thin = replace(model, tower=cast(Tower, Changed(model.tower, geometry=small)))
    async with starting(config, thin, redis_url) as start:
        a, b = await start(), await start()
        fetched = await through_peer(a, b, new_photo(2000, 10))
        assert len(fetched.array) > small.max_pixels // small.factor**2 + 1
