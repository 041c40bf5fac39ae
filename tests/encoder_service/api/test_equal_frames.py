"""Frames with pixels that were encoded before, in the same or another file, reuse those rows."""

import asyncio
from collections.abc import Sequence
from itertools import count

import torch

from encoder_contract.digest import content_digest
from encoder_contract.geometry import Grid
from encoder_contract.video import Frames
from encoder_service.app import Server
from encoder_service.store.tier import Entry
from prefill_client import EncoderClient, RowRequest
from prefill_client.images import Image
from testing.clips import clip
from tests.calls import collect
from tests.operator_view import settled
from tests.waiting import soon

GRID = Grid(1, 6, 10)
SHORT, LONGER = (clip("mp4", frames=frames, fps=10.0, seed=40) for frames in (60, 80))
OTHER_CONTAINER = clip("mov", frames=60, fps=10.0, seed=40)


def pairs(data: bytes, numbers: Sequence[int], grid: Grid = GRID) -> list[Image]:
    """Return pairs of frames with these first frames; the second frame is five later."""
    named = [Frames(first, first + 5, grid) for first in numbers]
    return [Image(data, content_digest(data), grid, 15, frames=frames) for frames in named]


async def rows(client: EncoderClient, images: Sequence[Image]) -> list[torch.Tensor]:
    assert [answer.error for answer in await client.submit(images)] == [None] * len(images)
    outcomes = await collect(client, [RowRequest.of(image) for image in images])
    return [outcomes[index].tensor().clone() for index in range(len(images))]


async def counted(server: Server, kept: int, copied: int) -> None:
    """Wait for these numbers of encoded and of copied pairs."""
    now = await settled(server, "encoded_images_total", kept + copied)
    assert now.total("encoded_images_total", outcome="kept") == kept
    assert now.total("encoded_images_total", outcome="copied") == copied


async def test_a_longer_clip_encodes_its_new_pairs_alone(server: Server, client: EncoderClient) -> None:
    assert content_digest(SHORT) != content_digest(LONGER)
    first = await rows(client, pairs(SHORT, range(0, 50, 10)))
    await counted(server, kept=5, copied=0)
    longer = await rows(client, pairs(LONGER, range(0, 70, 10)))
    await counted(server, kept=7, copied=5)
    assert all(torch.equal(*each) for each in zip(first, longer[:5], strict=True))
    again = await rows(client, pairs(LONGER, range(0, 70, 10)))
    await counted(server, kept=7, copied=5)
    assert all(torch.equal(*each) for each in zip(longer, again, strict=True))


async def test_equal_frames_of_another_container_are_copied(server: Server, client: EncoderClient) -> None:
    first = await rows(client, pairs(SHORT, [0, 10]))
    second = await rows(client, pairs(OTHER_CONTAINER, [0, 10]))
    await counted(server, kept=2, copied=2)
    assert all(torch.equal(*each) for each in zip(first, second, strict=True))


async def test_another_size_or_tenants_frames_are_encoded(server: Server, client: EncoderClient) -> None:
    await rows(client, pairs(SHORT, [0]))
    await rows(client, pairs(OTHER_CONTAINER, [0], Grid(1, 4, 8)))
    await counted(server, kept=2, copied=0)
    async with await EncoderClient.connect(server.endpoint, tenant_salt=b"other") as other:
        await rows(other, pairs(OTHER_CONTAINER, [0]))
    await counted(server, kept=3, copied=0)


async def test_rows_that_were_evicted_are_encoded_again(server: Server, client: EncoderClient) -> None:
    first = await rows(client, pairs(SHORT, [0]))
    await soon(lambda: server.store.stats().pins == 0)
    server.store.flush()
    second = await rows(client, pairs(OTHER_CONTAINER, [0]))
    await counted(server, kept=2, copied=0)
    assert torch.equal(*first, *second)


async def test_equal_frames_without_room_for_a_copy_wait_for_room_and_are_encoded(
    server: Server, client: EncoderClient
) -> None:
    first = await rows(client, pairs(SHORT, [0]))
    [address] = server.store.grids()
    held = server.store.pin(address)
    assert held is not None
    taken: list[Entry] = []
    for number in count():
        entry = server.store.reserve(number.to_bytes(32), 15, Grid(1, 6, 10))
        if not isinstance(entry, Entry):
            break
        taken.append(entry)
    waits = server.store.stats().waits
    second = asyncio.create_task(rows(client, pairs(OTHER_CONTAINER, [0])))
    await soon(lambda: server.store.stats().waits > waits)
    held.release()
    for entry in taken:
        server.store.abandon(entry)
    assert torch.equal(*first, *(await second))
    await counted(server, kept=2, copied=0)
