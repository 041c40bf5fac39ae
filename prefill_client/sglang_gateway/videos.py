"""Videos for SGLang: which frames its own loader samples, their sizes, and their timestamps in messages.

SGLang samples and resizes a video before the checkpoint's processor sees it (`preprocess_video` in its
`multimodal/processors/qwen_vl.py`, unchanged from 0.5.20 to 0.5.23). Its bounds do not depend on the checkpoint.
"""

import math
from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from encoder_contract.errors import ImageLimitError, InvalidImageError, InvalidRequestError
from encoder_contract.geometry import MAX_ASPECT_RATIO
from encoder_contract.video import Clip, VideoInfo, VideoSettings
from prefill_client import Description

_FPS, _MIN_FRAMES, _MAX_FRAMES = 2.0, 4, 768
_FACTOR = 28  # sides are multiples of this many pixels, for every patch size
_MIN_PIXELS, _MAX_PIXELS = 128 * _FACTOR**2, 768 * _FACTOR**2  # of one frame
_MAX_TOTAL_PIXELS = int(128000 * _FACTOR**2 * 0.9)  # of all frames


def video_settings(folder: str, description: Description) -> VideoSettings | InvalidRequestError:
    """Return the video settings of SGLang's checkpoint, or the error of parts with videos."""
    if not description.video_decoder:
        return InvalidRequestError("the encoder service accepts no videos: its log has the reason, at start")
    if not folder:
        return InvalidRequestError(
            "videos need the settings of SGLang's checkpoint: start the gateway with --language-model"
        )
    try:
        settings = VideoSettings.from_folder(folder)
    except (OSError, ValueError) as error:
        return InvalidRequestError(f"videos of this checkpoint cannot be served: {error}")
    if not settings.writes_time:
        return InvalidRequestError(
            f"videos of {description.model_type} cannot be served: in SGLang's tower, each row depends on all frames "
            "of a video, but the encoder service encodes two frames at a time; send images"
        )
    return settings


def shown(settings: VideoSettings, video: VideoInfo) -> Clip:
    """Return the frames of a video that SGLang shows a model. `settings` are those of the checkpoint.

    Raises `InvalidImageError` for a video that SGLang cannot sample, `ImageLimitError` for an aspect ratio over 200.
    """
    sampled = _sample(video)
    height, width = _size(video, len(sampled))
    clip = settings.clip(replace(video, width=width, height=height), sampled)
    if (height, width) == (video.height, video.width):
        return clip
    pairs = (pair._replace(bilinear=(height, width)) for pair in clip.pairs)
    return replace(clip, pairs=tuple(pairs))


def times(clips: Sequence[Clip | None]) -> dict[str, list[list[float]]]:
    """Return the timestamps of each video's pairs, under SGLang's name. None stands for a replacement of one pair."""
    return {"video_timestamps": [list(clip.seconds) if clip else [0.0] for clip in clips]}


def _sample(video: VideoInfo) -> list[int]:
    total = video.readable_frames  # like SGLang, count the frames in the file, not in the container's header
    if not video.fps:
        raise InvalidImageError(
            "the video's container has no frame rate, which SGLang needs to sample frames"
        )
    wanted = min(max(total / video.fps * _FPS, _MIN_FRAMES), _MAX_FRAMES, total)
    count = math.floor(wanted / 2) * 2
    if not count:
        raise InvalidImageError("the video has fewer than two frames, but these models take frames in pairs")
    return [int(number) for number in np.linspace(0, total - 1, num=count, dtype=np.int64)]


def _size(video: VideoInfo, frames: int) -> tuple[int, int]:
    """Return the height and width in pixels to which SGLang resizes each frame before the processor resizes it."""
    height, width = video.height, video.width
    if (ratio := max(height, width) / min(height, width)) > MAX_ASPECT_RATIO:
        raise ImageLimitError(f"aspect ratio {ratio:.1f} of {width}x{height} exceeds {MAX_ASPECT_RATIO}")
    max_pixels = max(min(_MAX_PIXELS, _MAX_TOTAL_PIXELS / frames * 2), int(_MIN_PIXELS * 1.05))
    sides = [max(_FACTOR, round(side / _FACTOR) * _FACTOR) for side in (height, width)]
    if math.prod(sides) > max_pixels:
        shrink = math.sqrt(height * width / max_pixels)
        sides = [max(_FACTOR, math.floor(side / shrink / _FACTOR) * _FACTOR) for side in (height, width)]
    elif math.prod(sides) < _MIN_PIXELS:
        grow = math.sqrt(_MIN_PIXELS / (height * width))
        sides = [math.ceil(side * grow / _FACTOR) * _FACTOR for side in (height, width)]
    return sides[0], sides[1]
