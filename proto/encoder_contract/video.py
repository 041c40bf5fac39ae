"""Videos: what a container says, which frames the model gets, and how they are paired, resized and timed.

A video is an album of pairs of frames, which the caller chooses. `VideoSettings` computes them without decoding a
pixel, as the checkpoint's own video processor in `transformers` does.
"""

import json
import math
import struct
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple, Self

from encoder_contract.errors import ImageLimitError, InvalidImageError
from encoder_contract.geometry import MAX_ASPECT_RATIO, Grid
from encoder_contract.json_file import read_json_object

if TYPE_CHECKING:
    from encoder_contract.v1 import encoder_pb2 as pb

UNKNOWN_FPS = 24.0  # Qwen3-VL's processor assumes this rate for a container that does not state one
# Container, and what its first bytes are at some offsets.
_MAGIC = (
    *(("MP4", ((4, kind),)) for kind in (b"ftyp", b"moov", b"mdat", b"wide", b"free")),
    ("WEBM", ((0, b"\x1aE\xdf\xa3"),)),
    ("AVI", ((0, b"RIFF"), (8, b"AVI "))),
    ("FLV", ((0, b"FLV\x01"),)),
    ("PS", ((0, b"\0\0\1\xba"),)),
    ("TS", ((0, b"G"), (188, b"G"))),  # packets of 188 bytes
    ("TS", ((4, b"G"), (196, b"G"))),  # the same after a time of four bytes, as cameras write them
)
HEAD_BYTES = 197
CONTAINERS = "MP4, MOV, WebM, MKV, AVI, FLV, MPEG-TS or MPEG-PS"


def container_of(head: bytes) -> str | None:
    """Return the container of a file from its first `HEAD_BYTES`, or None.

    MP4 (and MOV), WEBM (and MKV), AVI, FLV, or MPEG's program stream (PS) or transport stream (TS).
    """
    return next(
        (name for name, bytes_at in _MAGIC if all(head[at : at + len(b)] == b for at, b in bytes_at)), None
    )


class Frames(NamedTuple):
    """Two frames of a video that the tower encodes together, and the grid that they are resized to.

    `first` <= `second`, counted from 0 in display order. They are equal for the last frame of an odd number. `bilinear`
    is a height and width in pixels: some engines first resize the frames to it, with an antialiased bilinear filter.
    """

    first: int
    second: int
    grid: Grid
    bilinear: tuple[int, int] | None = None

    def to_message(self) -> "pb.Frames":
        """Return the message that names the frames. It does not contain their grid."""
        # Imported here, because decoder processes must not load protobuf.
        from encoder_contract.v1 import encoder_pb2 as pb

        height, width = self.bilinear or (0, 0)
        return pb.Frames(first=self.first, second=self.second, bilinear_height=height, bilinear_width=width)


@dataclass(frozen=True, slots=True)
class VideoInfo:
    """What a container says, as read by the server's decoder: see `VideoState` in the contract."""

    frames: int
    readable_frames: int
    fps: float
    width: int
    height: int
    rotation: int = 0

    @property
    def seconds(self) -> float:
        """Duration, from the number of frames and their rate."""
        return self.frames / (self.fps or UNKNOWN_FPS)


@dataclass(frozen=True, slots=True)
class Clip:
    """The pairs of a video that the model gets, in order.

    `seconds` has the time of each pair: the mean of its two frames. `seconds_per_pair` is the time from one pair to the
    next at the sampled rate, for models that count time in positions instead of writing it as text.
    """

    pairs: tuple[Frames, ...]
    seconds: tuple[float, ...]
    seconds_per_pair: float

    @property
    def grid(self) -> Grid:
        """The grid of every pair."""
        return self.pairs[0].grid


@dataclass(frozen=True, slots=True)
class VideoSettings:
    """The settings of a checkpoint's video processor that decide frames, sizes and times.

    With `writes_time`, it is Qwen3-VL's processor: a timestamp before each pair, and bounds on the pixels of all frames
    together. Without, it is Qwen2-VL's: one run of placeholders, and bounds on the pixels of each frame.
    """

    writes_time: bool
    patch_size: int
    merge_size: int
    min_pixels: int
    max_pixels: int
    mean: tuple[float, ...]
    std: tuple[float, ...]
    rescale_factor: float = 1 / 255
    fps: float = 2.0
    min_frames: int = 4
    max_frames: int = 768
    cap_pixels_per_frame: bool = False
    max_video_tokens: int = 768

    @classmethod
    def from_folder(cls, folder: str | Path) -> Self:
        """Read the settings of a checkpoint folder, as `AutoVideoProcessor` finds them.

        Raises `OSError` or `ValueError` if the folder has no settings, or unsupported ones.
        """
        # Imported here, because decoder processes must not load blake3.
        from encoder_contract.checkpoint import read_config

        folder = Path(folder)
        path, found = _find_settings(folder)
        try:
            return cls._from_mapping(found, str(read_config(folder).get("model_type")))
        except (KeyError, TypeError) as error:
            raise ValueError(f"{path}: {error} is missing or malformed") from error
        except ValueError as error:
            raise ValueError(f"{path}: {error}") from error

    @classmethod
    def _from_mapping(cls, found: Mapping[str, Any], model_type: str) -> Self:
        kind = found.get("video_processor_type") or _KINDS.get(model_type)
        if kind not in _DEFAULTS:
            raise ValueError(f"video_processor_type {kind!r} is not supported, only {', '.join(_DEFAULTS)}")
        settings = {**_DEFAULTS[kind], **{name: value for name, value in found.items() if value is not None}}
        for name, value in _FIXED.items():
            if settings.get(name, value) != value:
                raise ValueError(f"{name} = {settings[name]!r} is not supported, only {value!r}")
        if int(settings["min_frames"]) < 2:
            raise ValueError(f"min_frames = {settings['min_frames']!r} is not supported: a pair takes two")
        size = {**_DEFAULTS[kind]["size"], **settings["size"]}
        if kind == QWEN2_VL:
            size["shortest_edge"] = found.get("min_pixels") or size["shortest_edge"]
            size["longest_edge"] = found.get("max_pixels") or size["longest_edge"]
        return cls(
            writes_time=kind == QWEN3_VL,
            patch_size=int(settings["patch_size"]),
            merge_size=int(settings["merge_size"]),
            min_pixels=int(size["shortest_edge"]),
            max_pixels=int(size["longest_edge"]),
            mean=tuple(map(float, settings["image_mean"])),
            std=tuple(map(float, settings["image_std"])),
            rescale_factor=float(settings.get("rescale_factor", 1 / 255)),
            fps=float(settings["fps"]),
            min_frames=int(settings["min_frames"]),
            max_frames=int(settings["max_frames"]),
            cap_pixels_per_frame=bool(settings.get("cap_pixels_per_frame")),
            max_video_tokens=int(settings["max_video_tokens"]),
        )

    def clip(self, video: VideoInfo, frames: Sequence[int] | None = None) -> Clip:
        """Return the pairs of a video that the model gets, without frames that the file lacks.

        `frames` are the numbers of the frames, in order. Without them, `sample` chooses. Raises `InvalidImageError` for
        a video without frames, `ImageLimitError` for an aspect ratio over 200.
        """
        chosen = self.sample(video) if frames is None else frames
        indices = [index for index in chosen if index < video.readable_frames]
        if len(indices) < 2:
            raise InvalidImageError("the file ends before the second frame that the model needs")
        grid = self.grid(len(indices), video.width, video.height)
        if len(indices) % 2:
            indices.append(indices[-1])
        pairs = tuple(Frames(*pair, grid) for pair in zip(indices[::2], indices[1::2], strict=True))
        rate = video.fps or UNKNOWN_FPS
        seconds = tuple((pair.first / rate + pair.second / rate) / 2 for pair in pairs)
        sampled_rate = len(indices) / video.frames * rate
        return Clip(pairs, seconds, 2 / sampled_rate)

    def sample(self, video: VideoInfo) -> list[int]:
        """Return the numbers of the frames that the video processor chooses."""
        total, rate = video.frames, video.fps or UNKNOWN_FPS
        if total < 2:
            raise InvalidImageError(
                "the video has fewer than two frames, and this model takes frames in pairs"
            )
        if self.writes_time:
            count = min(max(int(total / rate * self.fps), self.min_frames), self.max_frames, total)
            step = (total - 1) / (count - 1)
            return [round(number * step) for number in range(count - 1)] + [total - 1]
        most = min(self.max_frames, total) // 2 * 2
        count = math.floor(min(max(total / rate * self.fps, self.min_frames), most, total)) // 2 * 2
        # In float32, like torch.arange: rounding decides some frames, and may add one after the last.
        step = total / count
        steps = (number * step for number in range(math.ceil(total / step)))
        return [min(int(_float32(index)), total - 1) for index in steps]

    def grid(self, frames: int, width: int, height: int) -> Grid:
        """Return the grid of each pair, for a video of this size in pixels of which the model gets `frames` frames.

        Raises `InvalidImageError` for a side of zero, `ImageLimitError` for an aspect ratio over 200.
        """
        if width < 1 or height < 1:
            raise InvalidImageError(f"a video of {width}x{height} pixels has no content")
        factor = self.patch_size * self.merge_size
        counted = 1
        if self.writes_time:
            counted = frames
            if min(height, width) < factor:
                scale = max(factor / height, factor / width)
                height, width = int(height * scale), int(width * scale)
        ratio = max(height, width) / min(height, width)
        if ratio > MAX_ASPECT_RATIO:
            raise ImageLimitError(f"aspect ratio {ratio:.1f} of {width}x{height} exceeds {MAX_ASPECT_RATIO}")
        new_height, new_width = round(height / factor) * factor, round(width / factor) * factor
        most = self._most_pixels(frames)
        rounded = round(counted / 2) * 2 if self.writes_time else 1
        if rounded * new_height * new_width > most:
            shrink = math.sqrt((counted * height * width) / most)
            new_height = max(factor, math.floor(height / shrink / factor) * factor)
            new_width = max(factor, math.floor(width / shrink / factor) * factor)
        elif rounded * new_height * new_width < self.min_pixels:
            grow = math.sqrt(self.min_pixels / (counted * height * width))
            new_height = math.ceil(height * grow / factor) * factor
            new_width = math.ceil(width * grow / factor) * factor
        return Grid(1, new_height // self.patch_size, new_width // self.patch_size)

    def tokens(self, pair: Frames) -> int:
        """Return the number of rows of a pair."""
        return pair.grid.patches // self.merge_size**2

    def canonical(self) -> bytes:
        """Return the settings that decide pixels, for fingerprints: they change the rows of equal frames and grids."""
        return json.dumps(
            [self.patch_size, self.merge_size, self.mean, self.std, self.rescale_factor]
        ).encode()

    def _most_pixels(self, frames: int) -> int:
        """Return the most pixels, of all frames together with `writes_time`, else of one frame."""
        if not self.cap_pixels_per_frame:
            return self.max_pixels
        area, least = (self.patch_size * self.merge_size) ** 2, int(self.min_pixels * 1.05)
        if self.writes_time:
            return max(min(self.max_video_tokens * area, self.max_pixels // frames), least) * frames
        return max(min(self.max_pixels, int(self.max_video_tokens * area * 0.9) * 2 // frames), least)


def _float32(number: float) -> float:
    rounded: float = struct.unpack("f", struct.pack("f", number))[0]
    return rounded


def timestamp(seconds: float) -> str:
    """Return the text before a pair, for a model that `writes_time`."""
    return f"<{seconds:.1f} seconds>"


QWEN2_VL, QWEN3_VL = "Qwen2VLVideoProcessor", "Qwen3VLVideoProcessor"
_KINDS = {
    "qwen2_5_vl": QWEN2_VL,
    **dict.fromkeys(("qwen3_vl", "qwen3_vl_moe", "qwen3_5", "qwen3_5_moe", "qwen4_exp"), QWEN3_VL),
}
# The defaults of `transformers`.
_OF_BOTH: dict[str, Any] = {"merge_size": 2, "fps": 2, "min_frames": 4, "max_frames": 768}
_DEFAULTS: dict[str, dict[str, Any]] = {
    QWEN2_VL: _OF_BOTH
    | {
        "patch_size": 14,
        "size": {"shortest_edge": 128 * 28 * 28, "longest_edge": 28 * 28 * 768},
        "image_mean": [0.48145466, 0.4578275, 0.40821073],
        "image_std": [0.26862954, 0.26130258, 0.27577711],
        "max_video_tokens": 128000,
    },
    QWEN3_VL: _OF_BOTH
    | {
        "patch_size": 16,
        "size": {"shortest_edge": 128 * 32 * 32, "longest_edge": 32 * 32 * 768},
        "image_mean": [0.5, 0.5, 0.5],
        "image_std": [0.5, 0.5, 0.5],
        "max_video_tokens": 768,
    },
}
# Settings of which we implement one value.
_FIXED: dict[str, object] = {
    "do_resize": True,
    "do_rescale": True,
    "do_normalize": True,
    "resample": 3,  # PIL's number for bicubic
    "temporal_patch_size": 2,
}


def _find_settings(folder: Path) -> tuple[Path, Mapping[str, Any]]:
    nested = folder / "processor_config.json"
    if nested.is_file() and isinstance(found := read_json_object(nested).get("video_processor"), dict):
        return nested, found
    for name in ("video_preprocessor_config.json", "preprocessor_config.json"):
        if (path := folder / name).is_file():
            return path, read_json_object(path)
    raise FileNotFoundError(f"{folder} has no video processor settings: no video_preprocessor_config.json")
