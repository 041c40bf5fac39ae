"""Decoding: image files to upright RGB pixels on the device of the tower.

Pillow decodes one image at a time on the CPU: in processes of their own (`DecoderPool`), or in the caller's thread
(`PillowDecoder`). On a GPU, DALI decodes JPEGs a batch at a time, and Pillow what DALI does not take. A bad image fails
alone.
"""

from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from importlib.metadata import PackageNotFoundError, version
from typing import Protocol

import PIL
import torch
from torch import Tensor

from encoder_contract.errors import EncoderError, InvalidImageError
from encoder_contract.header import Header, unknown
from encoder_contract.video import Frames, VideoInfo
from encoder_service.image.dali import DALI_BYTES, DaliJpegs
from encoder_service.image.pillow import Pixels, decode_file
from encoder_service.image.source import Source, VideoFile

# Why a decoder process was replaced: it crashed; it used up its processor time; it did not answer in time; it ran out
# of memory; another process or the kernel killed it (the latter when memory is short); its answer was invalid.
DEATHS = ("crashed", "time", "stuck", "memory", "killed", "senseless")


# Source pixels that are decoded at the same time, in a batch and as many one by one; one image that is larger than
# that is decoded beside them.
DECODE_PIXELS = 50_000_000
# Images in a batch. nvJPEG is much faster on several; a change of demand waits for the whole batch, which is a few
# milliseconds.
BATCH_IMAGES = 32


# The packages that have OpenCV: the first that is installed.
_OPENCV_PACKAGES = ("opencv-python-headless", "opencv-python", "opencv-contrib-python-headless")


def installed_opencv() -> str:
    """Return the OpenCV that decodes videos, with the version of its package; empty if there is none.

    The package includes FFmpeg, so its version decides pixels. Nothing is imported: that is for decoder processes.
    """
    for name in _OPENCV_PACKAGES:
        with suppress(PackageNotFoundError):
            return f"{name} {version(name)}"
    return ""


class FileDecoder(Protocol):
    """Decodes one image at a time on the CPU. Thread-safe.

    `name` says what decodes; `deaths` counts decoder processes that ended, by reason (`DEATHS`), and `messages` the
    lines that they printed.
    """

    name: str

    @property
    def deaths(self) -> Mapping[str, int]: ...

    @property
    def messages(self) -> int: ...

    def start(self) -> None:
        """Wait until it is ready to decode."""

    def read_header(self, file: bytes, formats: Sequence[str]) -> Header | EncoderError:
        """Return the header of a file in one of some `RARE_FORMATS`, or the error of that file alone."""

    def decode(self, source: Source) -> Pixels | EncoderError:
        """Return the upright pixels of an image, uint8 [H, W, 3], or the error of that image alone."""

    def open_video(self, key: bytes, file: VideoFile) -> VideoInfo | EncoderError:
        """Return what the container of a video says, or its error; `key` is that of its source."""

    def read_frames(
        self, source: Source, first: int, second: int, is_wanted: Callable[[], bool]
    ) -> Pixels | EncoderError:
        """Return two frames of a video, upright, uint8 [2, H, W, 3], or their error.

        It is `AbandonedError` if they are no longer wanted while frames before them are decoded.
        """

    def close(self) -> None:
        """End what works for it; a further use starts it again."""


class PillowDecoder:
    """Decodes in the caller's thread: nothing keeps a malicious file from this process."""

    name = f"Pillow {PIL.__version__}"
    deaths: Mapping[str, int] = dict.fromkeys(DEATHS, 0)
    messages = 0

    def start(self) -> None:
        """Do nothing: it is ready."""

    def read_header(self, file: bytes, formats: Sequence[str]) -> Header | EncoderError:  # noqa: ARG002
        """Refuse the file: what Pillow does to read its header is bounded only in a decoder process."""
        return unknown(file)

    def decode(self, source: Source) -> Pixels | EncoderError:
        """Decode an image, as `FileDecoder.decode`."""
        return decode_file(source)

    def open_video(self, key: bytes, file: VideoFile) -> VideoInfo | EncoderError:  # noqa: ARG002
        """Refuse the file: videos are only decoded in decoder processes."""
        return InvalidImageError("this server takes no videos")

    def read_frames(self, *_: object) -> Pixels | EncoderError:
        """Refuse, as `open_video`."""
        return InvalidImageError("this server takes no videos")

    def close(self) -> None:
        """Do nothing: nothing works for it."""


class Decoder:
    """Decodes images into pixels on one device. Thread-safe.

    `files` decodes any image; `jpegs`, if it is given, is on the same device and decodes those for which `batches` is
    true. Pixels are uint8 [H, W, 3] RGB on the device, upright (EXIF applied), transparency laid over white, the first
    frame of an animation; their memory lives as long as they do. On CUDA they are written by the caller's current
    stream.
    """

    def __init__(self, device: torch.device, files: FileDecoder, jpegs: DaliJpegs | None = None) -> None:
        self._device = device
        self._files = files
        self._jpegs = jpegs

    @property
    def name(self) -> str:
        """What decodes, and what the kernel enforces once it is started."""
        return f"{self._jpegs.name}, {self._files.name}" if self._jpegs else self._files.name

    @property
    def deaths(self) -> Mapping[str, int]:
        """Decoder processes that ended, by reason."""
        return self._files.deaths

    @property
    def messages(self) -> int:
        """Lines that decoder processes have printed to standard error; they are thrown away."""
        return self._files.messages

    @property
    def device_bytes(self) -> int:
        """The most memory of the device that its own buffers take, beside the pixels."""
        return DALI_BYTES if self._jpegs else 0

    def start(self) -> None:
        """Wait until it is ready to decode."""
        if self._jpegs:
            self._jpegs.start(BATCH_IMAGES)
        self._files.start()

    def close(self) -> None:
        """End what works for it; a further use starts it again."""
        self._files.close()

    def read_header(self, file: bytes, formats: Sequence[str]) -> Header | EncoderError:
        """Return the header of a file in one of some `RARE_FORMATS`, as `FileDecoder.read_header`."""
        return self._files.read_header(file, formats)

    def open_video(self, key: bytes, file: VideoFile) -> VideoInfo | EncoderError:
        """Return what the container of a video says, or its error, as `FileDecoder.open_video`."""
        return self._files.open_video(key, file)

    @property
    def decodes_batches(self) -> bool:
        """Whether there is anything that it decodes in batches."""
        return self._jpegs is not None

    def batches(self, source: Source) -> bool:
        """Whether an image is for `decode_batch`."""
        return self._jpegs is not None and source.video is None and self._jpegs.takes(source)

    def decode_batch(self, sources: Sequence[Source]) -> list[Tensor | None]:
        """Return the pixels of each image for which `batches` is true; None for those that are left to `decode`.

        Raises `RuntimeError` if the device is lost.
        """
        return self._jpegs.decode(sources) if self._jpegs else [None] * len(sources)

    def decode(self, source: Source) -> Tensor | EncoderError:
        """Return the pixels of an image or its error.

        Raises `RuntimeError` if no decoder process starts or the device does not take the pixels: neither is the
        image's fault.
        """
        return self._on_device(self._files.decode(source))

    def decode_frames(
        self, source: Source, frames: Frames, is_wanted: Callable[[], bool]
    ) -> Tensor | EncoderError:
        """Return the pixels of two frames of a video, uint8 [2, H, W, 3], or their error, as `FileDecoder.read_frames`.

        Raises as `decode`.
        """
        return self._on_device(self._files.read_frames(source, frames.first, frames.second, is_wanted))

    def _on_device(self, pixels: Pixels | EncoderError) -> Tensor | EncoderError:
        if isinstance(pixels, EncoderError):
            return pixels
        return torch.from_numpy(pixels).to(self._device)
