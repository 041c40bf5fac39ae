"""Decoding: image files to upright RGB pixels on the tower's device.

Pillow decodes one image at a time on the CPU: in separate processes (`DecoderPool`), or in the caller's thread
(`PillowDecoder`). On a GPU, DALI decodes batches of JPEGs, and Pillow decodes the images that DALI does not take. A bad
image fails alone.
"""

from collections.abc import Callable, Mapping, Sequence
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

# Why a decoder process was replaced: it crashed; it used up its CPU time; it did not answer in time; it ran out of
# memory; another process or the kernel killed it (the kernel does when memory is short); its answer was invalid.
DEATHS = ("crashed", "time", "stuck", "memory", "killed", "senseless")


# Source pixels that are decoded at the same time: this many in a batch, and this many one by one. Beside them, one
# image that is larger than this may be decoded.
DECODE_PIXELS = 50_000_000
# Images in a batch. nvJPEG is much faster on several. A more urgent image waits for the whole batch, a few
# milliseconds.
BATCH_IMAGES = 32


class FileDecoder(Protocol):
    """Decodes one image at a time on the CPU. Thread-safe.

    `name` says what decodes. `deaths` counts the decoder processes that died, by reason (`DEATHS`); `messages` counts
    the lines that they printed.
    """

    name: str

    @property
    def deaths(self) -> Mapping[str, int]: ...

    @property
    def messages(self) -> int: ...

    def start(self) -> None:
        """Wait until the decoder is ready."""

    def read_header(self, file: bytes, formats: Sequence[str]) -> Header | EncoderError:
        """Return the header of a file in one of these `RARE_FORMATS`, or the error of the file."""

    def decode(self, source: Source) -> Pixels | EncoderError:
        """Return the upright pixels of an image, uint8 [H, W, 3], or the error of the image."""

    def open_video(self, key: bytes, file: VideoFile) -> VideoInfo | EncoderError:
        """Return what the container of a video says, or the error of the video; `key` is the key of its source."""

    def read_frames(
        self, source: Source, first: int, second: int, is_wanted: Callable[[], bool]
    ) -> Pixels | EncoderError:
        """Return two frames of a video, upright, uint8 [2, H, W, 3], or their error.

        The error is `AbandonedError` if `is_wanted` returns False while the frames before them are being decoded.
        """

    def close_videos(self) -> None:
        """Stop the processes for videos; the next video starts one again."""

    def close(self) -> None:
        """Stop the decoder's processes; a further use starts them again."""


class PillowDecoder:
    """Decodes in the caller's thread: nothing protects this process from a malicious file."""

    name = f"Pillow {PIL.__version__}"
    deaths: Mapping[str, int] = dict.fromkeys(DEATHS, 0)
    messages = 0

    def start(self) -> None:
        """Do nothing: it is always ready."""

    def read_header(self, file: bytes, formats: Sequence[str]) -> Header | EncoderError:  # noqa: ARG002
        """Refuse the file: only in a decoder process is there a bound on what Pillow does to read its header."""
        return unknown(file)

    def decode(self, source: Source) -> Pixels | EncoderError:
        """See `FileDecoder`."""
        return decode_file(source)

    def open_video(self, key: bytes, file: VideoFile) -> VideoInfo | EncoderError:  # noqa: ARG002
        """Refuse the file: only decoder processes decode videos."""
        return InvalidImageError("this server takes no videos")

    def read_frames(self, *_: object) -> Pixels | EncoderError:
        """Refuse the file, as `open_video` does."""
        return InvalidImageError("this server takes no videos")

    def close_videos(self) -> None:
        """Do nothing: it has no processes."""

    def close(self) -> None:
        """Do nothing: it has no processes."""


class Decoder:
    """Decodes images into pixels on one device. Thread-safe.

    `files` decodes any image. `jpegs`, if given, works on the same device and decodes the images for which `can_batch`
    is true. Pixels are uint8 [H, W, 3] RGB on the device, upright (EXIF applied), with transparency over white; of an
    animation, the first frame. The tensors own their memory. On CUDA the caller's current stream writes them.
    """

    def __init__(self, device: torch.device, files: FileDecoder, jpegs: DaliJpegs | None = None) -> None:
        self._device = device
        self.files = files
        self._jpegs = jpegs

    @property
    def name(self) -> str:
        """What decodes; once started, also what the kernel enforces."""
        return f"{self._jpegs.name}, {self.files.name}" if self._jpegs else self.files.name

    @property
    def deaths(self) -> Mapping[str, int]:
        """Decoder processes that died, by reason."""
        return self.files.deaths

    @property
    def messages(self) -> int:
        """Lines that decoder processes have printed to standard error; the lines are dropped."""
        return self.files.messages

    @property
    def device_bytes(self) -> int:
        """An upper bound on the device memory that the decoder's buffers take, beside the pixels."""
        return DALI_BYTES if self._jpegs else 0

    def start(self) -> None:
        """Wait until the decoder is ready."""
        if self._jpegs:
            self._jpegs.start(BATCH_IMAGES)
        self.files.start()

    def close_videos(self) -> None:
        """See `FileDecoder`."""
        self.files.close_videos()

    def close(self) -> None:
        """Stop the decoder's processes; a further use starts them again."""
        self.files.close()

    @property
    def decodes_batches(self) -> bool:
        """Whether the decoder decodes any images in batches."""
        return self._jpegs is not None

    def can_batch(self, source: Source) -> bool:
        """Whether `decode_batch` takes this image."""
        return self._jpegs is not None and source.video is None and self._jpegs.takes(source)

    def decode_batch(self, sources: Sequence[Source]) -> list[Tensor | None]:
        """Return the pixels of each image; None for an image that is left to `decode`.

        `can_batch` is true for each of them. Raises `RuntimeError` if the device is lost.
        """
        return self._jpegs.decode(sources) if self._jpegs else [None] * len(sources)

    def decode(self, source: Source) -> Tensor | EncoderError:
        """Return the pixels of an image or its error.

        Raises `RuntimeError` for what is not the image's fault: no decoder process starts, or the pixels cannot be
        copied to the device.
        """
        pixels = self.files.decode(source)
        return pixels if isinstance(pixels, EncoderError) else self.on_device(pixels)

    def decode_frames(
        self, source: Source, frames: Frames, is_wanted: Callable[[], bool]
    ) -> Pixels | EncoderError:
        """Return the pixels of two frames of a video, uint8 [2, H, W, 3], on the host, or their error.

        See `FileDecoder.read_frames`. Raises as `decode` does.
        """
        return self.files.read_frames(source, frames.first, frames.second, is_wanted)

    def on_device(self, pixels: Pixels) -> Tensor:
        """Copy pixels to the device; on the CPU, return a view of them."""
        return torch.from_numpy(pixels).to(self._device)
