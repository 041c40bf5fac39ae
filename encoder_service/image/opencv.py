"""Decoding with OpenCV: frames of a video to upright RGB pixels. Only decoder processes import it.

The FFmpeg inside OpenCV reads the file and decodes it in one thread. Frames are numbered as vLLM's loader does: by how
many were grabbed before, from the beginning of the file. So a frame is reached by decoding all frames before it, and an
earlier frame by starting again. The times in the container matter only where its frame rate contradicts them.
"""

import io
import math
import mmap
import os
from contextlib import suppress
from typing import Any

import cv2
import numpy as np

from encoder_contract.errors import EncoderError, InvalidImageError
from encoder_contract.video import HEAD_BYTES, UNKNOWN_FPS, VideoInfo, container_of
from encoder_service.image.pillow import Pixels

cv2.setNumThreads(1)
_OPTIONS = [cv2.CAP_PROP_N_THREADS, 1]
# Keep FFmpeg to the accepted formats: a playlist, for example, would name other files.
os.environ["OPENCV_FFMPEG_CAPTURE_OPTIONS"] = (
    "threads;1|format_whitelist;mov,matroska,webm,avi,flv,mpeg,mpegts"
)


class _Reader(io.BufferedIOBase):
    """A mapped file with the interface that OpenCV reads from."""

    def __init__(self, content: mmap.mmap) -> None:
        self._content = memoryview(content)
        self._at = 0

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def read(self, size: int | None = -1, /) -> bytes:
        end = len(self._content) if size is None or size < 0 else self._at + size
        piece = bytes(self._content[self._at : end])
        self._at += len(piece)
        return piece

    def seek(self, offset: int, whence: int = io.SEEK_SET, /) -> int:
        start = {io.SEEK_SET: 0, io.SEEK_CUR: self._at, io.SEEK_END: len(self._content)}[whence]
        self._at = max(0, start + offset)
        return self._at

    def tell(self) -> int:
        return self._at


class OpenVideo:
    """An open video. It is decoded forwards only, and from the beginning again for an earlier frame."""

    def __init__(self, content: mmap.mmap) -> None:
        """Raise `InvalidImageError` for a file without a video."""
        self._content = content
        self._open()

    def info(self) -> VideoInfo | EncoderError:
        """Return what the container says, or the error of a video without frames; then rewind."""
        capture = self._capture
        frames = int(capture.get(cv2.CAP_PROP_FRAME_COUNT))
        if container_of(self._content[:HEAD_BYTES]) == "MP4" and frames > 1:
            frames = _shown_frames(capture, frames)
        fps = capture.get(cv2.CAP_PROP_FPS)
        width, height = (
            int(capture.get(each)) for each in (cv2.CAP_PROP_FRAME_WIDTH, cv2.CAP_PROP_FRAME_HEIGHT)
        )
        rotation = int(capture.get(cv2.CAP_PROP_ORIENTATION_META)) % 360
        if width < 1 or height < 1:
            return InvalidImageError(f"damaged video: {width}x{height} pixels")
        self._open()
        readable, seconds = self._read_packets()
        self._open()
        if not readable:
            return InvalidImageError("damaged video: it has no frames")
        if frames < 1:  # the container of an interrupted recording does not say how many it has
            frames = readable
        if not math.isfinite(fps) or fps < 0:
            fps = 0.0
        if _contradicts(seconds, fps or UNKNOWN_FPS, readable, min(frames, readable)):
            # A recording without a frame rate, of which FFmpeg has guessed one, and from that the number of frames.
            frames, fps = min(frames, readable), readable / seconds
        return VideoInfo(frames, min(frames, readable), fps, width, height, rotation)

    def read(self, first: int, second: int, out: Pixels) -> EncoderError | None:
        """Write two frames to `out` [2, H, W, 3], upright RGB; return the error of a frame that cannot be read."""
        if first < self._next:
            self._open()
        for slot, number in enumerate((first, second)):
            if slot and number == first:
                out[1] = out[0]
                break
            if (error := self._read_one(number, out[slot])) is not None:
                return error
        return None

    def _read_one(self, number: int, out: Pixels) -> EncoderError | None:
        while self._next <= number:
            if not self._capture.grab():
                return InvalidImageError(
                    f"frame {number} cannot be decoded: the video is damaged, or ends after {self._next} frames"
                )
            self._next += 1
        is_read, frame = self._capture.retrieve()
        if not is_read or frame is None:
            return InvalidImageError(f"frame {number} cannot be decoded: the video is damaged")
        if frame.shape != out.shape or frame.dtype != np.uint8:
            height, width = frame.shape[:2]
            return InvalidImageError(
                f"frame {number} has {width}x{height} pixels, the video {out.shape[1]}x{out.shape[0]}"
            )
        cv2.cvtColor(frame, cv2.COLOR_BGR2RGB, dst=out)
        return None

    def _read_packets(self) -> tuple[int, float]:
        """Return the number of encoded packets in the file, without decoding them, and for how long they are shown.

        The time is 0 if the packets have no times.
        """
        self._capture.set(cv2.CAP_PROP_FORMAT, -1)
        count, first, last = 0, math.inf, -math.inf
        while self._capture.grab():
            count += 1
            at = self._capture.get(cv2.CAP_PROP_POS_MSEC) / 1000
            first, last = min(first, at), max(last, at)
        seconds = (last - first) * count / (count - 1) if count > 1 else 0.0
        return count, seconds if math.isfinite(seconds) else 0.0

    def _open(self) -> None:
        self._next = 0
        self._capture: Any = None
        reader: Any = _Reader(self._content)
        with suppress(cv2.error):
            self._capture = cv2.VideoCapture(reader, cv2.CAP_FFMPEG, _OPTIONS)
        if self._capture is None or not self._capture.isOpened():
            raise InvalidImageError("damaged or unsupported video: it cannot be opened")


def _shown_frames(capture: Any, frames: int) -> int:
    """Return how many of the frames of an MP4 are shown, as vLLM's loader counts them. This moves the position.

    The container also counts frames that an edit list hides. Seeking to the end tells how many are shown.
    """
    if capture.set(cv2.CAP_PROP_POS_AVI_RATIO, 1.0):
        shown = int(capture.get(cv2.CAP_PROP_POS_FRAMES))
        if not capture.grab() and 0 < shown < frames - 1:
            return shown
    return frames


def _contradicts(seconds: float, fps: float, *counts: int) -> bool:
    """Whether no number of frames takes about so many seconds at a rate: each is off by more than a tenth.

    A file may have more packets than frames: an edit list hides some, or a packet has half of the lines.
    """
    return seconds > 0 and all(abs(count / fps - seconds) > 0.1 * seconds for count in counts)
