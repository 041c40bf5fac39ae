"""Videos on the client: a video is a sequence of images, each consisting of two frames."""

import asyncio
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import numpy as np

from encoder_contract.digest import content_digest
from encoder_contract.errors import EncoderError, InvalidRequestError
from encoder_contract.video import Clip, VideoInfo, VideoSettings, timestamp
from prefill_client.client import DEFAULT_TIMEOUT_S, EncoderClient
from prefill_client.images import Image
from prefill_client.prompt import TokenIds


@dataclass(frozen=True, slots=True)
class Video:
    """A video that a server has, and the pairs of frames that the model sees.

    `data` is the file and `info` its container properties. `images` are the pairs of frames, in order: submit them and
    fetch their rows as for any other image.
    """

    data: bytes = field(repr=False)
    digest: bytes
    info: VideoInfo
    clip: Clip
    images: tuple[Image, ...] = field(repr=False)


async def read_videos(
    client: EncoderClient,
    files: Sequence[bytes],
    settings: VideoSettings,
    *,
    request_id: str = "",
    timeout_s: float = DEFAULT_TIMEOUT_S,
    clip: Callable[[VideoInfo], Clip] | None = None,
) -> list[Video | EncoderError]:
    """Return a `Video` for each file, or its error. Uploads files that the server does not have.

    `settings` are those of the model's checkpoint. `settings.clip` selects the pairs of frames; pass `clip` for an
    engine with other rules.
    """
    digests = await asyncio.to_thread(lambda: [content_digest(file) for file in files])
    infos = await client.probe(files, digests, request_id=request_id, timeout_s=timeout_s)
    return [
        info
        if isinstance(info, EncoderError)
        else _video(file, digest, info, settings, clip or settings.clip)
        for file, digest, info in zip(files, digests, infos, strict=True)
    ]


def _video(
    file: bytes,
    digest: bytes,
    info: VideoInfo,
    settings: VideoSettings,
    select_frames: Callable[[VideoInfo], Clip],
) -> Video | EncoderError:
    try:
        clip = select_frames(info)
    except EncoderError as error:
        return error
    images = tuple(Image(file, digest, pair.grid, settings.tokens(pair), frames=pair) for pair in clip.pairs)
    return Video(file, digest, info, clip, images)


@dataclass(frozen=True, slots=True)
class VideoTokens:
    """The tokens with which a model's prompt marks a pair of frames. `encode` returns the token ids of a text."""

    placeholder: int
    begin: int
    end: int
    encode: Callable[[str], Sequence[int]]


def mark_pairs(
    token_ids: Sequence[int] | TokenIds,
    videos: Sequence[Video],
    tokens: VideoTokens,
    settings: VideoSettings,
) -> TokenIds:
    """Replace the placeholder of each video in a prompt by one placeholder for each of its pairs of frames.

    For a model with `writes_time`, a timestamp precedes each pair, and the begin and end tokens enclose it. Pass the
    returned prompt to `expand_prompt`. Raises `InvalidRequestError` if the prompt has another number of placeholders
    than `videos`.
    """
    ids = np.array(token_ids, dtype=np.int64)
    places = np.flatnonzero(ids == tokens.placeholder)
    if len(places) != len(videos):
        raise InvalidRequestError(
            f"the prompt has placeholders for {len(places)} videos, but the request has {len(videos)}"
        )
    pieces, begin = [], 0
    for place, video in zip(places, videos, strict=True):
        pieces += [ids[begin:place], np.array(_marks(video.clip, tokens, settings), dtype=np.int64)]
        begin = int(place) + 1
    return np.concatenate([*pieces, ids[begin:]])


def _marks(clip: Clip, tokens: VideoTokens, settings: VideoSettings) -> list[int]:
    if not settings.writes_time:
        return [tokens.placeholder] * len(clip.pairs)
    marks: list[int] = []
    for seconds in clip.seconds:
        marks += [*tokens.encode(timestamp(seconds)), tokens.begin, tokens.placeholder, tokens.end]
    return marks
