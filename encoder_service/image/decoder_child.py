"""One decoder process, as the server sees it: it gets a file and returns pixels, and is killed if it takes too long.

Server and process share two buffers: the server writes the file to one and reads the pixels from it in place.
"""

import json
import logging
import math
import os
import socket
import threading
import weakref
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from dataclasses import asdict
from time import monotonic
from types import NoneType
from typing import Any, TypeVar

from encoder_contract.errors import EncoderError, InvalidImageError
from encoder_contract.header import Header
from encoder_contract.orientation import UPRIGHT
from encoder_contract.video import VideoInfo
from encoder_service.child import Child, IdleWatch, used_cpu_s, why_ended
from encoder_service.image.decoder_process import MESSAGE_BYTES, MESSAGE_CHARACTERS, VIDEO
from encoder_service.image.pillow import MAX_SIDE, PILLOW_BYTES_PER_PIXEL, Pixels
from encoder_service.image.shared_buffer import SharedBuffer, pixels_offset
from encoder_service.image.source import Source, VideoFile

log = logging.getLogger(__name__)

Result = TypeVar("Result")

# A process is ready in half a second, on a busy machine in five. One that is not ready after this time never will be.
START_LIMIT_S = 60.0
_MODULE = "encoder_service.image.decoder_process"
# The environment of a decoder process. Of the server's environment, which may hold passwords, it gets `PASSED_ON` only.
# As in the server, glibc reuses freed memory, but it keeps at most this much. Numpy starts no threads, because each
# takes memory.
SETTINGS = {
    "MALLOC_ARENA_MAX": "1",
    "MALLOC_MMAP_THRESHOLD_": str(1 << 30),
    "MALLOC_TRIM_THRESHOLD_": str(64 << 20),
    "OPENBLAS_NUM_THREADS": "1",
}
# A process that decodes videos fills all memory before it is used: no frame can show what another video left there.
VIDEO_SETTINGS = {"MALLOC_PERTURB_": "1"}
# Where the interpreter and its libraries are, where the server's environment says so.
PASSED_ON = ("LD_LIBRARY_PATH", "PYTHONHOME")
# How much of the processes' output is read at a time, and how much of its end is kept for an error at start.
_READ_BYTES, _TAIL_BYTES = 64 << 10, 2000


class DecoderStartError(RuntimeError):
    """No decoder process starts."""


class StderrPipe:
    """The standard error of all decoder processes: counts the lines and keeps only the last one. Thread-safe.

    Both ends are non-blocking and the server drains the pipe after each request, so a process never waits for it. What
    does not fit into the pipe is lost.
    """

    def __init__(self) -> None:
        self.lines = 0
        self._tail = b""
        self._lock = threading.Lock()
        self._reader, self.writer = os.pipe()
        for descriptor in (self._reader, self.writer):
            os.set_blocking(descriptor, False)
            weakref.finalize(self, os.close, descriptor)

    def drain(self) -> None:
        """Read and count what the processes have printed since the last call."""
        with self._lock, suppress(BlockingIOError):
            printed = os.read(self._reader, _READ_BYTES)
            self.lines += printed.count(b"\n")
            self._tail = (self._tail + printed)[-_TAIL_BYTES:]
            log.debug("a decoder process printed %s", self.last_line)

    @property
    def last_line(self) -> str:
        """The last line. An attacker may have written it, so that only printable characters are kept."""
        lines = self._tail.decode(errors="replace").splitlines() or ["nothing"]
        return printable(lines[-1])


def printable(text: str) -> str:
    """Replace each character that is not printable by a question mark."""
    return "".join(character if character.isprintable() else "?" for character in text)


class _Process:
    """A process that was started. `is_confined` is whether the kernel enforces its sandbox: None until it is ready."""

    def __init__(self, stderr: StderrPipe, memory_bytes: int, *, videos: bool) -> None:
        """Start the process. Raises `OSError` if memory, processes or descriptors are short."""
        # Two, so that the next request can be answered while the pixels of the last one are in use. They take memory
        # only where they are used, and a descriptor until they are first sent.
        self.buffers = [SharedBuffer(), SharedBuffer()]
        self.is_confined: bool | None = None
        self.channel, child_end = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        weakref.finalize(self, self.channel.close)
        env = {
            **SETTINGS,
            **(VIDEO_SETTINGS if videos else {}),
            **{name: os.environ[name] for name in PASSED_ON if name in os.environ},
        }
        settings = {"memory_bytes": memory_bytes, "videos": videos}
        with child_end:
            self.child = Child(_MODULE, [child_end.fileno()], settings, env, stderr=stderr.writer)
        self.pid = self.child.pid

    def wait_ready(self) -> bool:
        """Wait until the process is ready; return False if it never will be. Raises `TimeoutError` if it hangs."""
        if self.is_confined is None:
            with suppress(ConnectionError, ProcessLookupError):
                self.child.await_message(self.channel, START_LIMIT_S, works=True)
                if hello := self.channel.recv(MESSAGE_BYTES):
                    self.is_confined = bool(json.loads(hello)["confined"])
        return self.is_confined is not None

    def end(self) -> int:
        """Kill the process if it is alive; return its exit status, which is negative for a signal."""
        self.channel.close()
        return self.child.end()

    def free_buffer(self, needed_bytes: int) -> tuple[int, SharedBuffer]:
        """Return the number of a free buffer, and the buffer, made large enough."""
        number = next(n for n, buffer in enumerate(self.buffers) if buffer.is_free)
        if self.buffers[number].size < needed_bytes:
            self.buffers[number] = SharedBuffer(needed_bytes)
        return number, self.buffers[number]

    def pixels(self, number: int, shape: tuple[int, ...], offset: int) -> Pixels:
        """Return pixels in a buffer; a copy if the other buffer is in use, so that one is always free."""
        pixels = self.buffers[number].lend(shape, offset)
        return pixels if self.buffers[1 - number].is_free else pixels.copy()


# Why the server killed a process that was decoding frames without callers. It is not one of `DEATHS`.
ABANDONED = "abandoned"
# How often the server checks a process that has not answered.
_CHECK_S, _FIRST_CHECK_S = 0.5, 0.01
# What a process may take beside pixels: the file, copies of it without metadata, and what its libraries keep.
BASE_BYTES = 256 << 20
# CPU time for a header that Pillow reads: a sound one takes a few milliseconds.
HEADER_CPU_S = 1.0
# CPU time for each video frame that is decoded on the way: one of 2160p takes 30 ms.
FRAME_CPU_S = 0.1
# Wall-clock limit of a request: this many seconds for each second of its CPU time, because the process shares the
# cores with the vision tower, and a constant.
_WALL_PER_CPU, _WALL_S = 3.0, 3.0
DECODE_LIMIT_S = 15.0  # of CPU time, for an image


class DecoderDiedError(Exception):
    """A process died before it answered. `reason` is one of `DEATHS`, or `ABANDONED`. Another is being started."""

    def __init__(self, reason: str, status: int) -> None:
        super().__init__(f"{reason}, status {status}")
        self.reason = reason


class DecoderChild:
    """One decoder process, restarted when it dies; for one thread at a time.

    Each process may take `memory_bytes`, and `cpu_s` of CPU time per image. The `launcher` thread must start it,
    because the kernel kills it when the thread that started it ends. The methods that send a request raise
    `DecoderDiedError` and the errors of `ready`. Only a child for `videos` opens videos.
    """

    def __init__(
        self,
        launcher: ThreadPoolExecutor,
        stderr: StderrPipe,
        *,
        memory_bytes: int,
        cpu_s: float,
        videos: bool = False,
    ) -> None:
        self._launcher = launcher
        self._stderr = stderr
        self._memory_bytes = memory_bytes
        self._cpu_s = cpu_s
        self._videos = videos
        self._launched: Future[_Process] | None = None
        self.open_video_key: bytes | None = None
        """The key of the video that the process has open."""
        self._next_frame = 0  # the process has decoded the open video up to this frame

    def launch(self) -> None:
        """Start a process in the background, unless there is one."""
        if self._launched is None:
            self._launched = self._launcher.submit(
                _Process, self._stderr, self._memory_bytes, videos=self._videos
            )

    def ready(self) -> _Process:
        """Return the process, once it is ready.

        Raises `DecoderStartError` if it does not start, `OSError` if memory or descriptors are short.
        """
        for is_last in (False, True):
            self.launch()
            assert self._launched is not None
            try:
                process = self._launched.result()
            except Exception:
                self._launched = None
                raise
            try:
                if process.wait_ready():
                    return process
            except TimeoutError:
                self.end()
                if not is_last:
                    log.warning("a decoder process hung while it started: starting another")
                    continue
            break
        self.end()
        self._stderr.drain()
        raise DecoderStartError(f"no decoder process starts; the last one printed: {self._stderr.last_line}")

    def read_header(self, file: bytes, formats: Sequence[str]) -> Header | EncoderError:
        """Return the header of a file in one of these formats, or its error."""
        process = self.ready()
        number, buffer = process.free_buffer(len(file))
        buffer.write(file)
        request = {"buffer": number, "bytes": len(file), "formats": formats, "may_take": BASE_BYTES}
        answer = self._request(process, buffer, request, HEADER_CPU_S, Header)
        if isinstance(answer, Header) and answer.format not in formats:
            raise self._replaced("senseless")
        return answer

    def decode(self, source: Source) -> Pixels | EncoderError:
        """Return the upright pixels of an image, or its error. The pixels live as long as the array."""
        process = self.ready()
        offset = pixels_offset(source)
        number, buffer = process.free_buffer(offset + 3 * source.header.pixels)
        buffer.write(source.data)
        request = {
            "buffer": number,
            "bytes": len(source.data),
            "header": asdict(source.header),
            "out": offset,
            "may_take": decoding_bytes(source.header),
        }
        error = self._request(process, buffer, request, self._cpu_s, NoneType)
        if error is not None:
            return error
        width, height = source.header.upright
        return process.pixels(number, (height, width, 3), offset)

    def open_video(self, key: bytes, file: VideoFile) -> VideoInfo | EncoderError:
        """Close the open video, open this one, and return what its container says, or its error."""
        process = self.ready()
        self.open_video_key = None
        request = {"buffer": VIDEO, "may_take": self._memory_bytes}
        answer = self._request(process, file, request, self._cpu_s, VideoInfo)
        if isinstance(answer, VideoInfo):
            self.open_video_key, self._next_frame = key, 0
        return answer

    def read_frames(
        self, source: Source, first: int, second: int, is_wanted: Callable[[], bool]
    ) -> Pixels | EncoderError:
        """Return two frames of the open video, upright, uint8 [2, H, W, 3], or their error."""
        process = self.ready()
        width, height = source.header.upright
        number, buffer = process.free_buffer(2 * 3 * source.header.pixels)
        begin = self._next_frame if first >= self._next_frame else 0
        self._next_frame = second + 1
        request = {
            "buffer": number,
            "frames": (first, second),
            "shape": (height, width),
            "may_take": self._memory_bytes,
        }
        cpu_s = self._cpu_s + FRAME_CPU_S * (second - begin)
        error = self._request(process, buffer, request, cpu_s, NoneType, is_wanted)
        return error if error is not None else process.pixels(number, (2, height, width, 3), 0)

    def end(self) -> int:
        """Kill the process and return its exit status, 0 if there was none. The next use starts another."""
        launched, self._launched = self._launched, None
        self.open_video_key = None
        if launched is None:
            return 0
        try:
            return launched.result().end()
        except Exception:  # noqa: BLE001 - it was never started
            return 0

    def _request(
        self,
        process: _Process,
        buffer: SharedBuffer | VideoFile,
        request: dict[str, Any],
        cpu_s: float,
        kind: type[Result],
        is_wanted: Callable[[], bool] = lambda: True,
    ) -> Result | InvalidImageError:
        """Send a request and return the answer, which is of type `kind`, or the error of the image."""
        message = json.dumps({**request, "size": buffer.size}).encode()
        try:
            began_s = used_cpu_s(process.pid)
            process.channel.settimeout(_WALL_S + _WALL_PER_CPU * cpu_s)
            is_sent = isinstance(buffer, VideoFile) or buffer.is_new
            socket.send_fds(process.channel, [message], [buffer.descriptor] if is_sent else [])
        except (ConnectionError, ProcessLookupError):  # it died before the request: not the image's fault
            raise self._replaced("killed") from None
        if isinstance(buffer, SharedBuffer):
            buffer.close_descriptor()
        try:
            reply = self._wait_for_reply(process, began_s, cpu_s, is_wanted)
        except (ConnectionError, ProcessLookupError):
            reply = b""
        self._stderr.drain()
        if not reply:
            raise self._replaced()
        try:
            answer = parse_reply(reply)
        except (ValueError, RecursionError):  # the latter for deeply nested JSON
            raise self._replaced("senseless") from None
        if isinstance(answer, kind):
            return answer
        if not isinstance(answer, tuple):
            raise self._replaced("senseless")
        text, is_memory_short = answer
        if is_memory_short:
            raise self._replaced("memory")
        return InvalidImageError(text)

    def _wait_for_reply(
        self, process: _Process, began_s: float, cpu_s: float, is_wanted: Callable[[], bool]
    ) -> bytes:
        """Return the reply; empty if the process died. Raises `DecoderDiedError` after ending a process that must end.

        The server does the timing, because an attacker's code inside the process could stop a timer there.
        """
        ends_at = monotonic() + _WALL_S + _WALL_PER_CPU * cpu_s
        watch, used_s = IdleWatch(process.pid), 0.0
        while True:
            check_s = min(_CHECK_S, max(cpu_s - used_s, _FIRST_CHECK_S))
            process.channel.settimeout(check_s)
            try:
                return process.channel.recv(MESSAGE_BYTES)
            except TimeoutError:
                used_s = used_cpu_s(process.pid) - began_s
            if used_s > cpu_s:
                raise self._replaced("time")
            if not is_wanted():
                raise self._replaced(ABANDONED)
            if watch.is_hanging(check_s) or monotonic() > ends_at:
                raise self._replaced("stuck")

    def _replaced(self, reason: str = "") -> DecoderDiedError:
        """Kill and reap the process, launch another, and return the error to raise.

        Without a `reason`, the exit status tells it.
        """
        status = self.end()
        self.launch()
        return DecoderDiedError(reason or why_ended(status), status)


def decoding_bytes(header: Header) -> int:
    """Return how much memory a process may take to decode an image."""
    return BASE_BYTES + PILLOW_BYTES_PER_PIXEL * header.pixels


# The answer of a process: None if the pixels are in the buffer, a header, what a container says of its video, or the
# text of an error and whether memory was short.
Answer = Header | VideoInfo | tuple[str, bool] | None


def parse_reply(reply: bytes) -> Answer:
    """Return the answer in a reply.

    Raises `ValueError` or `RecursionError` if it is invalid: an attacker may control the process by now.
    """
    match json.loads(reply):
        case None:
            return None
        case [str(text), bool(is_memory_short)]:
            return printable(text)[:MESSAGE_CHARACTERS], is_memory_short
        case {"format": str(name), "width": int(width), "height": int(height), "channels": int(channels)}:
            if 1 <= width <= MAX_SIDE and 1 <= height <= MAX_SIDE:
                return Header(name, width, height, UPRIGHT, channels)
        case {
            "frames": int(frames),
            "readable_frames": int(readable),
            "fps": float(fps),
            "width": int(width),
            "height": int(height),
            "rotation": int(rotation),
        }:
            sizes = 1 <= width <= MAX_SIDE and 1 <= height <= MAX_SIDE
            if sizes and 1 <= readable <= frames <= MAX_SIDE and 0 <= fps < math.inf and 0 <= rotation < 360:
                return VideoInfo(frames, readable, fps, width, height, rotation)
    raise ValueError("the reply is neither a header nor an error")
