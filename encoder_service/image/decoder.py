"""Decoding image files to upright RGB pixels on the CPU.

Pillow decodes one image at a time: in separate processes (`DecoderPool`), or in the caller's thread (`PillowDecoder`).
A bad image fails alone.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Protocol

import PIL

from encoder_contract.errors import EncoderError, InvalidImageError
from encoder_contract.header import Header, unknown
from encoder_contract.video import VideoInfo
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
