"""Videos on the client: a video is an album of images, each two of its frames."""

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
    """A video that a server has: what its container says, and the pairs of frames that the model is shown.

    `images` are these pairs, in order: submit them, and fetch their rows, as those of any image. `data` is the file.
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
    """Return the videos in these files, or the error of each: the server is sent files that it lacks.

    `settings` are those of the model's checkpoint, from which the pairs are computed. `clip` does that for an engine
    that has other rules; without, `settings.clip` does.
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
    lay_out: Callable[[VideoInfo], Clip],
) -> Video | EncoderError:
    try:
        clip = lay_out(info)
    except EncoderError as error:
        return error
    images = tuple(Image(file, digest, pair.grid, settings.tokens(pair), frames=pair) for pair in clip.pairs)
    return Video(file, digest, info, clip, images)


@dataclass(frozen=True, slots=True)
class VideoTokens:
    """The tokens with which a model's prompt marks videos; `encode` returns those of a text."""

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
    """Return a prompt with one placeholder for each pair of a video, from one with a placeholder for each video.

    A model that `writes_time` has a timestamp before each pair, and the marks of a picture around it. Expand what is
    returned with `expand_prompt`. Raises `InvalidRequestError` if the prompt marks another number of videos.
    """
    ids = np.array(token_ids, dtype=np.int64)
    marked = np.flatnonzero(ids == tokens.placeholder)
    if len(marked) != len(videos):
        raise InvalidRequestError(f"the prompt marks {len(marked)} videos, but {len(videos)} are given")
    pieces, begin = [], 0
    for place, video in zip(marked, videos, strict=True):
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
