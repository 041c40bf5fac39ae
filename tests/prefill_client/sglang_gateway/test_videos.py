"""Videos through the gateway: laid out as SGLang's own loader does, encoded pair by pair, sent as one block."""

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from encoder_contract.errors import EncoderError, ImageLimitError, InvalidImageError
from encoder_contract.video import VideoInfo, VideoSettings
from encoder_service.app import Server
from prefill_client import Description, EncoderClient, RowRequest
from prefill_client.sglang_gateway.frames import Modality
from prefill_client.sglang_gateway.gateway import TOO_MANY_TOKENS, stand_in
from prefill_client.sglang_gateway.parts import Part
from prefill_client.sglang_gateway.videos import shown, video_settings
from prefill_client.video import Video, read_videos
from testing.clips import clip
from testing.photos import data_url, photo
from tests.calls import collect
from tests.operator_view import numbers
from tests.sglang_gateways import gateway_for
from tests.sglang_messages import body_of
from tests.sglang_receiver import LanguageServer

FIRST = clip("mp4", frames=45, fps=10.0, seed=1)  # SGLang shows 8 frames, and makes them larger
SECOND = clip("mp4", frames=30, fps=15.0, width=336, height=308, seed=2)  # of a size that it leaves as it is


@pytest.fixture
def settings(checkpoint: Path) -> VideoSettings:
    return VideoSettings.from_folder(checkpoint)


async def rows_of(client: EncoderClient, video: Video) -> np.ndarray:
    outcomes = await collect(client, [RowRequest.of(image) for image in video.images])
    assert all(outcome.error is None for outcome in outcomes.values())
    return np.concatenate([outcomes[index].array for index in range(len(outcomes))])


async def test_videos_are_parts_with_the_rows_of_their_pairs_and_their_times(
    client: EncoderClient, server: Server, checkpoint: Path, settings: VideoSettings
) -> None:
    async with (
        gateway_for(client, language_model=str(checkpoint)) as gateway,
        LanguageServer(gateway.url) as sglang,
    ):
        answer = await sglang.to_tokenizer(
            [data_url(FIRST), data_url(SECOND)], [data_url(FIRST)], modality="VIDEO"
        )
    videos = await read_videos(client, [FIRST, SECOND], settings, clip=lambda info: shown(settings, info))
    first, second = (each for each in videos if isinstance(each, Video))
    assert [pair.bilinear for pair in first.clip.pairs] == [(252, 420)] * 4
    assert {pair.bilinear for pair in second.clip.pairs} == {None}
    both, again = answer.parts
    grids = [[len(video.clip.pairs), *video.clip.grid[1:]] for video in (first, second)]
    seconds = [list(video.clip.seconds) for video in (first, second)]
    assert (both.data.grid_dim, both.data.video_timestamps) == (grids, seconds)
    assert (again.data.grid_dim, again.data.video_timestamps) == (grids[:1], seconds[:1])
    assert both.data.modality == again.data.modality == Modality.VIDEO
    rows = [await rows_of(client, first), await rows_of(client, second)]
    np.testing.assert_array_equal(both.rows, np.concatenate(rows))
    np.testing.assert_array_equal(again.rows, rows[0])
    pairs = len(first.images) + len(second.images)
    assert (await numbers(server)).total("encoded_images_total", outcome="kept") == pairs


async def test_a_damaged_video_is_named_in_the_refusal(client: EncoderClient, checkpoint: Path) -> None:
    async with (
        gateway_for(client, language_model=str(checkpoint)) as gateway,
        LanguageServer(gateway.url) as sglang,
    ):
        for data in (photo(64, 64, 1), FIRST[:2000]):
            answer = await sglang.to_tokenizer([data_url(FIRST), data_url(data)], modality="VIDEO")
            ((status, text),) = answer.refusals
            assert status == 400
            assert "video 1: " in text


async def test_videos_need_the_checkpoint(client: EncoderClient) -> None:
    async with gateway_for(client) as gateway, LanguageServer(gateway.url) as sglang:
        answer = await sglang.to_tokenizer([data_url(FIRST)], modality="VIDEO")
        ((_, text),) = answer.refusals
        assert "start the gateway with --language-model" in text


def test_a_refused_video_has_the_reason(
    client: EncoderClient, tmp_path: Path, checkpoint: Path, kept_checkpoint: Callable[..., Path]
) -> None:
    def refused(folder: Path, description: Description) -> str:
        found = video_settings(str(folder), description)
        assert isinstance(found, EncoderError)
        return found.message

    assert "accepts no videos" in refused(checkpoint, replace(client.description, video_decoder=""))
    assert "no video_preprocessor_config.json" in refused(tmp_path, client.description)
    assert "each row depends on all frames" in refused(kept_checkpoint("qwen2_5_vl"), client.description)


@pytest.mark.parametrize("parts", [1, 2])
def test_the_stand_in_of_a_video_has_timestamps(client: EncoderClient, parts: int) -> None:
    part = Part.parse(json.dumps(body_of(["x", "y"], parts=parts, modality="VIDEO")).encode())
    made = stand_in(part, client.description)
    assert made.times == {"video_timestamps": [[0.0], [0.0]]}
    assert len(made.array) == (TOO_MANY_TOKENS + 1 if parts == 1 else 2)


@pytest.mark.parametrize(
    ("info", "error"),
    [
        (VideoInfo(1, 1, 10.0, 64, 64), InvalidImageError),
        (VideoInfo(30, 30, 0.0, 64, 64), InvalidImageError),
        (VideoInfo(30, 30, 10.0, 6000, 20), ImageLimitError),
    ],
)
def test_videos_that_sglang_cannot_sample_are_refused(
    settings: VideoSettings, info: VideoInfo, error: type[EncoderError]
) -> None:
    with pytest.raises(error):
        shown(settings, info)
