"""Pairs of a video in the queue of a real server: ordered by prefill, withdrawn with their call."""

import asyncio
import random
from dataclasses import replace
from pathlib import Path

import pytest

from encoder_contract.video import VideoSettings
from encoder_service.app import Server
from prefill_client import EncoderClient, RowRequest
from prefill_client.video import Video, read_videos
from testing.clips import clip
from tests.calls import collect
from tests.gate import Gate
from tests.waiting import soon

PAIRS = 12


@pytest.fixture
async def video(client: EncoderClient, checkpoint: Path) -> Video:
    """A video whose file the server has, and none of whose pairs is encoded."""
    data = clip("mp4", frames=120, fps=10.0, seed=60)
    (video,) = await read_videos(client, [data], VideoSettings.from_folder(checkpoint))
    assert isinstance(video, Video)
    assert len(video.images) == PAIRS
    return video


def demanded(server: Server) -> int:
    """Return how many images a Fetch waits for."""
    return sum(jobs for (_, demanded), jobs in server.jobs.scheduler.snapshot().images.items() if demanded)


async def test_pairs_are_decoded_in_the_order_in_which_prefill_needs_them(
    server: Server, client: EncoderClient, gate: Gate, video: Video
) -> None:
    """The order of need differs from those of the video, the Submit and the Fetch."""
    needed = random.Random(61).sample(video.images, PAIRS)
    with gate.closed():
        await client.submit(video.images[::-1])
        await soon(lambda: len(gate.frames) == 1)  # the decoder has started it
        requests = [
            replace(RowRequest.of(image), chunk=(chunk := needed.index(image)), needed_in_ms=100 * chunk)
            for image in video.images
        ]
        fetching = asyncio.create_task(collect(client, requests))
        await soon(lambda: demanded(server) == PAIRS)
    assert all(outcome.error is None for outcome in (await fetching).values())
    first, *others = gate.frames
    assert first == video.images[-1].frames
    assert others == [image.frames for image in needed if image.frames != first]


async def test_unfetched_pairs_are_withdrawn_when_their_retaining_call_ends(
    server: Server, client: EncoderClient, gate: Gate, video: Video
) -> None:
    with gate.closed():
        kept = await client.keep(video.images)
        await soon(lambda: len(gate.frames) == 1)
        assert len(server.jobs) == PAIRS
        await kept.close()
        await soon(lambda: len(server.jobs) <= 1)
    await soon(lambda: len(server.jobs) == 0)
    assert len(gate.frames) == 1, "only the frame that the decoder had started"


async def test_fetched_pairs_outlive_their_retaining_call(
    server: Server, client: EncoderClient, gate: Gate, video: Video
) -> None:
    async with await EncoderClient.connect(server.endpoint) as other:
        with gate.closed():
            kept = await client.keep(video.images)
            wanted = [RowRequest.of(image) for image in video.images[2:5]]
            fetching = asyncio.create_task(collect(other, wanted))
            await soon(lambda: demanded(server) == len(wanted))
            await kept.close()
            await soon(lambda: len(server.jobs) <= 1 + len(wanted))
        assert all(outcome.error is None for outcome in (await fetching).values())
    await soon(lambda: len(server.jobs) == 0)
    assert len(gate.frames) <= 1 + len(wanted)
