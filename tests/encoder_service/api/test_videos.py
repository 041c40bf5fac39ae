"""Videos at a real server: probed, uploaded once, encoded pair by pair, and cached across sampling rates."""

import asyncio
import os
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

from encoder_contract.digest import content_digest
from encoder_contract.errors import EncoderError, InvalidImageError
from encoder_contract.geometry import Grid
from encoder_contract.v1 import encoder_pb2 as pb
from encoder_contract.video import Frames, VideoInfo, VideoSettings
from encoder_service import serving
from encoder_service.app import Server
from encoder_service.config import GIB, Config
from encoder_service.devices.model import Model
from encoder_service.image.sources import VideoLimits
from encoder_service.keys import Recipe
from prefill_client import EncoderClient, FetchedRows, RowRequest
from prefill_client.video import Video, read_videos
from testing.clips import clip, true_frames, with_index_first
from testing.photos import photo
from tests.calls import begin_submit, collect, finish, send
from tests.gate import Gate
from tests.operator_view import flush
from tests.servers import client_elsewhere, server_and_client
from tests.waiting import soon

SIZES: dict[str, Any] = {"frames": 50, "fps": 10.0}
VIDEO = clip("mp4", **SIZES)


@pytest.fixture
def settings(checkpoint: Path) -> VideoSettings:
    return VideoSettings.from_folder(checkpoint)


async def read_video(client: EncoderClient, data: bytes, settings: VideoSettings) -> Video:
    (video,) = await read_videos(client, [data], settings)
    assert isinstance(video, Video), video
    return video


def rows_of(model: Model, video: Video, data: bytes) -> list[torch.Tensor]:
    """Return the rows of each pair, from the tower and frames that were decoded in sequence."""
    frames = [torch.from_numpy(frame) for frame in true_frames(data)]
    pairs = [torch.stack([frames[pair.first], frames[pair.second]]) for pair in video.clip.pairs]
    grids = [pair.grid for pair in video.clip.pairs]
    return model.tower.encode(model.tower.inputs(pairs, grids), grids)


def equal(outcome: FetchedRows, rows: torch.Tensor) -> bool:
    return torch.equal(outcome.tensor().view(torch.uint8), rows.view(torch.uint8))


async def test_rows_of_a_clip_are_those_of_its_pairs(
    server: Server, client: EncoderClient, model: Model, settings: VideoSettings
) -> None:
    assert client.description.video_decoder == model.videos
    video = await read_video(client, VIDEO, settings)
    assert video.info == VideoInfo(50, 50, 10.0, 160, 96)
    answers = await client.submit(video.images)
    assert [answer.error for answer in answers] == [None] * len(video.images)
    assert {answer.grid for answer in answers} == {video.clip.grid}
    outcomes = await collect(client, [RowRequest.of(image) for image in video.images])
    for index, rows in enumerate(rows_of(model, video, VIDEO)):
        assert outcomes[index].error is None
        assert equal(outcomes[index], rows)
        assert outcomes[index].grid == video.clip.grid


async def test_equal_frames_are_cached_at_another_sampling_rate(
    server: Server, client: EncoderClient, settings: VideoSettings
) -> None:
    first = await read_video(client, VIDEO, settings)
    await client.submit(first.images)
    await collect(client, [RowRequest.of(image) for image in first.images])
    again = await read_video(client, VIDEO, replace(settings, fps=2.0, min_frames=len(first.images) * 2))
    assert all(answer.cached for answer in await client.submit(again.images))
    other = await read_video(client, VIDEO, replace(settings, fps=5.0))
    answers = await client.submit(other.images)
    known = {image.frames for image in first.images}
    assert [answer.cached for answer in answers] == [image.frames in known for image in other.images]


async def conversation(
    client: EncoderClient, names: Sequence[pb.ImageName], data: bytes
) -> list[pb.ImageState]:
    """Send the names, send `data` when bytes are wanted, and return all answers in order."""
    call = await begin_submit(client, *names)
    answers: list[pb.ImageState] = []
    while sum(answer.state != pb.STATE_NEEDS_BYTES for answer in answers) < len(names):
        for state in (await call.read()).states:
            answers.append(state)
            if state.state == pb.STATE_NEEDS_BYTES:
                await send(call, state.index, data)
    await finish(call)
    return answers


async def flushed(server: Server, *, files: bool) -> None:
    """Drop the videos, and all rows once no call pins them."""
    await soon(lambda: server.store.stats().pins == 0)
    assert server.store.flush() > 0
    if files:
        await flush(server)


def pair_name(index: int, digest: bytes, first: int, second: int, **fields: Any) -> pb.ImageName:
    grid = fields.pop("grid", pb.Grid(t=1, h=16, w=16))
    height, width = fields.pop("bilinear", (0, 0))
    frames = pb.Frames(first=first, second=second, bilinear_height=height, bilinear_width=width)
    return pb.ImageName(index=index, digest=digest, frames=frames, grid=grid, **fields)


async def test_a_file_that_many_pairs_need_is_requested_once(server: Server, client: EncoderClient) -> None:
    data = clip("mp4", **SIZES, seed=20)
    names = [pair_name(index, content_digest(data), 2 * index, 2 * index + 1) for index in range(20)]
    answers = await conversation(client, names, data)
    assert [answer.state for answer in answers].count(pb.STATE_NEEDS_BYTES) == 1
    assert sorted(answer.index for answer in answers[1:]) == list(range(20))
    assert {answer.state for answer in answers[1:]} == {pb.STATE_QUEUED}


async def test_a_file_with_another_digest_fails_all_its_pairs(server: Server, client: EncoderClient) -> None:
    names = [pair_name(index, content_digest(b"other"), 2 * index, 2 * index + 1) for index in range(5)]
    answers = await conversation(client, names, clip("mp4", **SIZES, seed=21))
    assert [answer.state for answer in answers] == [pb.STATE_NEEDS_BYTES] + [pb.STATE_FAILED] * 5
    assert all("hash to" in answer.error.message for answer in answers[1:])


@pytest.mark.parametrize("files", [False, True], ids=["evicted pairs", "a lost file"])
async def test_lost_pairs_are_decoded_again_from_the_file_which_is_uploaded_again_if_it_is_lost(
    server: Server, client: EncoderClient, settings: VideoSettings, files: bool
) -> None:
    video = await read_video(client, clip("mp4", **SIZES, seed=22 + files), settings)
    await client.submit(video.images)
    requests = [RowRequest.of(image) for image in video.images]
    first = await collect(client, requests)
    await flushed(server, files=files)
    for wanted in ([1], range(len(requests))):
        again = await collect(client, [requests[index] for index in wanted])
        assert all(equal(again[at], first[index].tensor()) for at, index in enumerate(wanted))


async def test_a_retained_video_is_requested_again_once(
    server: Server, client: EncoderClient, settings: VideoSettings
) -> None:
    data = clip("mp4", **SIZES, seed=24)
    video = await read_video(client, data, settings)
    requests = [RowRequest.of(image) for image in video.images]
    async with await client.keep(video.images), await EncoderClient.connect(server.endpoint) as other:
        first = await collect(other, requests, kept=True)
        await flushed(server, files=True)
        again = await collect(other, requests, kept=True)
    for index in range(len(requests)):
        assert again[index].error is None
        assert equal(again[index], first[index].tensor())


async def test_frames_that_do_not_exist_are_refused_alone(server: Server, client: EncoderClient) -> None:
    data = clip("mp4", **SIZES, seed=25)
    digest = content_digest(data)
    names = [pair_name(0, digest, 0, 1), pair_name(1, digest, 49, 50), pair_name(2, digest, 48, 49)]
    answers = {answer.index: answer for answer in await conversation(client, names, data)}
    assert answers[0].state == answers[2].state == pb.STATE_QUEUED
    assert "frame 50 does not exist: the video has 50 frames" in answers[1].error.message


async def test_a_truncated_video_is_encoded_from_its_readable_frames(
    server: Server, client: EncoderClient, model: Model, settings: VideoSettings
) -> None:
    data = with_index_first(clip("mp4", **SIZES, seed=26))
    data = data[: len(data) * 2 // 3]
    video = await read_video(client, data, settings)
    assert 25 < video.info.frames < 50
    behind = Frames(48, 49, video.clip.grid)
    answers = await client.submit([*video.images, replace(video.images[0], frames=behind)])
    assert [answer.error for answer in answers[:-1]] == [None] * len(video.images)
    assert isinstance(answers[-1].error, InvalidImageError)
    outcomes = await collect(client, [RowRequest.of(image) for image in video.images])
    for index, rows in enumerate(rows_of(model, video, data)):
        assert equal(outcomes[index], rows)


@pytest.mark.parametrize(
    ("limits", "message"),
    [
        (VideoLimits(49, 3600), "50 frames exceed max_video_frames 49"),
        (VideoLimits(216_000, 4.5), "5.0 s exceed max_video_seconds 4.5"),
        ({"video_gib": 1000 / GIB}, "larger than max_video_bytes = 1000"),
        ({"max_image_pixels": 15_000}, "exceed max_image_pixels 15000"),
    ],
)
async def test_video_errors_name_the_limit(
    config: Config,
    model: Model,
    settings: VideoSettings,
    monkeypatch: pytest.MonkeyPatch,
    limits: VideoLimits | dict[str, Any],
    message: str,
) -> None:
    if isinstance(limits, VideoLimits):
        monkeypatch.setattr(serving, "VIDEO_LIMITS", limits)
        limits = {}
    async with server_and_client(config, model, **limits) as (_, client):
        (found,) = await read_videos(client, [VIDEO], settings)
        assert isinstance(found, InvalidImageError)
        assert message in found.message
        (image,) = await client.submit([photo(100, 100, 1)])
        assert image.error is None


async def test_a_file_cannot_change_after_its_digest_was_checked(
    server: Server, client: EncoderClient, settings: VideoSettings
) -> None:
    await read_video(client, VIDEO, settings)
    (kept,) = server._videos._files.values()
    assert kept.file is not None
    for change in (
        partial(os.pwrite, kept.file.descriptor, b"x", 0),
        partial(os.ftruncate, kept.file.descriptor, 0),
    ):
        with pytest.raises(PermissionError):
            change()


async def test_a_file_that_is_not_a_video_is_refused(client: EncoderClient, settings: VideoSettings) -> None:
    for data in (photo(64, 64, 1), b"#EXTM3U\n" + bytes(100), clip("mp4")[:3000]):
        (found,) = await read_videos(client, [data], settings)
        assert isinstance(found, InvalidImageError), found


@pytest.mark.parametrize(
    ("name", "message"),
    [
        (pair_name(0, bytes(32), 0, 1, grid=None), "must be named with their grid"),
        (pair_name(0, bytes(32), 3, 1), "must not come after"),
        (pair_name(0, bytes(32), 0, 1, video=True), "either that of a video or of its frames"),
        (pair_name(0, bytes(32), 0, 1, variant=pb.Variant(max_pixels=70000)), "without a variant"),
        (pair_name(0, bytes(32), 0, 1, grid=pb.Grid(t=2, h=16, w=16)), "not a valid grid"),
        (pair_name(0, bytes(32), 0, 1, grid=pb.Grid(t=1, h=9000, w=9000)), "not a valid grid"),
        (pair_name(0, bytes(32), 0, 1, bilinear=(56, 0)), "must be given together"),
        (pair_name(0, bytes(32), 0, 1, bilinear=(1 << 20, 1 << 20)), "exceed max_image_pixels"),
    ],
)
async def test_impossible_frames_are_refused(client: EncoderClient, name: pb.ImageName, message: str) -> None:
    (answer,) = await conversation(client, [name], b"")
    assert answer.state == pb.STATE_FAILED
    assert message in answer.error.message


async def test_a_fetch_refuses_names_as_a_submit_does(client: EncoderClient, settings: VideoSettings) -> None:
    """The server has the file, so only the name is wrong."""
    video = await read_video(client, VIDEO, settings)
    pair = video.clip.pairs[0]
    for wrong, message in (
        (pair._replace(grid=Grid(2, 16, 16)), "not a valid grid"),
        (pair._replace(grid=Grid(1, 15, 16)), "not a valid grid"),
        (pair._replace(bilinear=(11_000, 11_000)), "exceed max_image_pixels"),
        (pair._replace(second=50), "frame 50 does not exist"),
    ):
        outcome = (await collect(client, [RowRequest(video.digest, frames=wrong)]))[0]
        assert outcome.error is not None, wrong
        assert message in outcome.error.message
    assert (await collect(client, [RowRequest(video.digest, frames=pair)]))[0].error is None


async def test_servers_without_decoders_say_so(config: Config, model: Model, settings: VideoSettings) -> None:
    without = replace(model, recipe=replace(model.recipe, video=b""), videos="")
    async with server_and_client(config, without) as (_, client):
        assert client.description.video_decoder == ""
        (found,) = await read_videos(client, [VIDEO], settings)
        assert isinstance(found, EncoderError)
        assert "takes no videos" in found.message


def test_addresses_differ_by_frames_size_decoder_and_still(model: Model) -> None:
    recipe, digest = model.recipe, bytes(32)

    def address(recipe: Recipe, first: int, second: int, grid: Grid) -> bytes:
        return recipe.frames_key(digest, Frames(first, second, grid)).address

    grid = Grid(1, 16, 16)
    addresses = [
        address(recipe, 0, 1, grid),
        address(recipe, 0, 2, grid),
        address(recipe, 1, 1, grid),
        address(recipe, 0, 1, Grid(1, 8, 32)),
        address(replace(recipe, video=b"another decoder"), 0, 1, grid),
        address(replace(recipe, dtype="float16"), 0, 1, grid),
        recipe.frames_key(digest, Frames(0, 1, grid, (56, 84))).address,
        recipe.frames_key(digest, Frames(0, 1, grid, (84, 56))).address,
        recipe.frames_key(digest, Frames(0, 1, grid), salt=b"tenant").address,
        recipe.key(digest).address,
    ]
    assert len(set(addresses)) == len(addresses)


async def test_images_wait_for_no_pair_of_a_clip(server: Server, gate: Gate, settings: VideoSettings) -> None:
    """Only one pair is decoded at a time, which leaves a thread for images."""
    data = clip("mp4", frames=300, fps=10.0, seed=30)
    async with await EncoderClient.connect(server.endpoint) as clips, client_elsewhere(server) as images:
        video = await read_video(clips, data, replace(settings, fps=10.0))
        assert len(video.images) > 100
        with gate.closed(frames_only=True):
            await clips.submit(video.images)
            whole = asyncio.create_task(collect(clips, [RowRequest.of(image) for image in video.images]))
            await soon(lambda: bool(gate.frames))
            file = photo(300, 200, 31)
            await images.submit([file])
            (outcome,) = (await collect(images, [RowRequest(content_digest(file))])).values()
            assert outcome.error is None
            assert len(gate.frames) == 1, "the image was encoded while the first pair was being decoded"
        assert all(each.error is None for each in (await whole).values())
