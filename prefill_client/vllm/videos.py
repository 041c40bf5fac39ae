"""Videos for vLLM: as text and pairs of frames, each pair an image, for the models that write time as text.

The prompts of Qwen3-VL and its successors show a video as pictures with a timestamp before each. Such a prompt differs
from vLLM's own prompt for the video only by the id of the placeholders. The prefill step that reads a pair fetches it,
and vLLM needs no decoder.
"""

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Self, TypeVar

from encoder_contract.errors import InvalidRequestError
from encoder_contract.video import Clip, VideoInfo, VideoSettings, timestamp

Picture = TypeVar("Picture")
# vLLM's own processor keeps these marks around a whole video since transformers 5.10, which every supported vLLM needs.
VIDEO_BEGIN, VIDEO_END = "<|vision_start|>", "<|vision_end|>"
VIDEO_PLACEHOLDER, IMAGE_PLACEHOLDER = "<|video_pad|>", "<|image_pad|>"
"""The text that the chat template writes for a video and for an image, which callers can write, too."""
OPTIONS = ("media_io_kwargs", "mm_processor_kwargs")
"""The fields of a request that set how its media are loaded and processed."""
_MAX_OPTION = 1 << 20
# The defaults of vLLM's loader, which ignores those of the checkpoint.
_FPS, _MAX_FPS, _MIN_FRAMES, _MAX_FRAMES = 2.0, 30.0, 4, 768


class UnsupportedVideoError(InvalidRequestError):
    """The service cannot encode this video for this engine. The engine's own tower may be able to."""


def prompt_parts(clip: Clip, pictures: Sequence[Picture]) -> list[str | Picture]:
    """Return what takes the place of a video's placeholder: a timestamp and a picture for each pair of frames.

    vLLM adds marks around each picture.
    """
    parts: list[str | Picture] = []
    for seconds, picture in zip(clip.seconds, pictures, strict=True):
        parts += [timestamp(seconds), picture]
    return parts


@dataclass(frozen=True, slots=True)
class VideoTokenCounts:
    """The tokens of a request's videos, which vLLM counts as images.

    `rows` are those with a row. `all` also has the timestamps and marks between them, as vLLM's own count for a video.
    """

    rows: int
    all: int

    @classmethod
    def of(
        cls, clips: Sequence[Clip], settings: VideoSettings, encode: Callable[[str], Sequence[int]]
    ) -> Self:
        """Count the tokens of videos. `encode` is the tokenizer, without special tokens at the ends."""
        rows = sum(settings.tokens(pair) for clip in clips for pair in clip.pairs)
        marks = sum(len(encode(timestamp(seconds))) + 2 for clip in clips for seconds in clip.seconds)
        return cls(rows, rows + marks)

    def in_usage(self, answer: bytes) -> bytes:
        """Return JSON or an event of vLLM's answer with these tokens counted as those of videos."""
        return _IMAGE_TOKENS.sub(self._usage, answer)

    def _usage(self, found: re.Match[bytes]) -> bytes:
        images = int(found["images"]) - self.rows
        return b'"multimodal_tokens":{%s"video":%d}' % (b'"image":%d,' % images if images else b"", self.all)


# Cannot match within a string of the JSON, where a backslash precedes each quotation mark.
_IMAGE_TOKENS = re.compile(rb'"multimodal_tokens":\s*\{"image":\s*(?P<images>\d+)\}')


@dataclass(frozen=True, slots=True)
class Sampling:
    """The options of a request for the frames of its videos.

    vLLM chooses twice. Its loader takes `fps` frames a second. If these are all frames of the video, the model's
    processor then chooses from them: `processor_frames`, or `processor_fps` a second, or what the checkpoint says.
    """

    fps: float = _FPS
    processor_fps: float | None = None
    processor_frames: int | None = None

    @classmethod
    def read(cls, body: Mapping[str, Any]) -> Self:
        """Read the options of a request. Raises `InvalidRequestError` for those that are not supported.

        `num_frames` of `media_io_kwargs` has no effect: vLLM's loader for these models ignores it.
        """
        loading, processing = (_options(name, body.get(name)) for name in OPTIONS)
        for modality in loading.keys() - {"video"}:
            raise _unsupported(f"media_io_kwargs.{modality}")
        loading = _options("media_io_kwargs.video", loading.get("video"))
        for name, options in (("media_io_kwargs.video", loading), ("mm_processor_kwargs", processing)):
            for key in options.keys() - {"fps", "num_frames"}:
                raise _unsupported(f"{name}.{key}")
        fps = _number("media_io_kwargs.video.fps", loading.get("fps"), float)
        processor_fps = _number("mm_processor_kwargs.fps", processing.get("fps"), float)
        processor_frames = _number("mm_processor_kwargs.num_frames", processing.get("num_frames"), int)
        if processor_fps and processor_frames:
            raise InvalidRequestError("mm_processor_kwargs: give fps or num_frames, not both")
        return cls(fps or _FPS, processor_fps, int(processor_frames) if processor_frames else None)

    def clip(self, settings: VideoSettings, video: VideoInfo) -> Clip:
        """Return the clip that the model is shown. Raises the errors of `VideoSettings.clip`."""
        return settings.clip(video, self.frames(settings, video))

    def frames(self, settings: VideoSettings, video: VideoInfo) -> list[int]:
        """Return the numbers of the frames that the model is shown. `settings` are those of the checkpoint."""
        fps = min(self.fps, _MAX_FPS)
        loaded = replace(settings, fps=fps, min_frames=_MIN_FRAMES, max_frames=_MAX_FRAMES).sample(video)
        if len(loaded) < video.frames or video.readable_frames < video.frames:
            return loaded
        if self.processor_frames:
            count = min(max(self.processor_frames, settings.min_frames), settings.max_frames)
            return replace(settings, min_frames=count, max_frames=count).sample(video)
        return replace(settings, fps=self.processor_fps or settings.fps).sample(video)


def _options(name: str, value: Any) -> Mapping[str, Any]:
    if value is not None and not isinstance(value, dict):
        raise InvalidRequestError(f"{name} must be an object")
    return {key: each for key, each in (value or {}).items() if each is not None}


def _number(name: str, value: Any, kind: type[int] | type[float]) -> float | None:
    """Check that `value` is a positive number of this kind, or None."""
    right_type = isinstance(value, int) or (kind is float and isinstance(value, float))
    if value is not None and (isinstance(value, bool) or not right_type or not 0 < value <= _MAX_OPTION):
        expected = "whole number" if kind is int else "number"
        raise InvalidRequestError(f"{name} must be one {expected} above 0 and at most {_MAX_OPTION}")
    return value


def _unsupported(option: str) -> InvalidRequestError:
    return InvalidRequestError(
        f"{option} is not supported: images and videos are encoded outside the engine, with the model's own settings; "
        "of videos, fps and num_frames can be chosen"
    )
