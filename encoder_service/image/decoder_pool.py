"""Decoding in separate processes: a malicious file can fail only itself.

`DecoderPool` runs one process more than there are decoding threads. When a process dies, the spare takes its place and
the pool starts another in the background. A `DecoderChild` is the server's end of one process: it sends a file, waits
for the pixels, and kills a process that takes too long. The two share a `SharedBuffer`: the server writes the file to
it and reads the pixels from it in place. `OPEN_VIDEOS` further processes, which start with the first video, each keep
one video open.
"""

import ctypes
import fcntl
import json
import logging
import math
import mmap
import os
import signal
import socket
import subprocess
import sys
import threading
import time
import weakref
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import asdict
from itertools import count
from time import monotonic
from types import NoneType
from typing import Any, TypeVar

import numpy as np
import PIL

from encoder_contract.errors import (
    AbandonedError,
    EncoderError,
    InvalidImageError,
    OverloadedError,
    UndecodableImageError,
    UnknownImageError,
)
from encoder_contract.header import Header
from encoder_contract.orientation import UPRIGHT
from encoder_contract.video import VideoInfo
from encoder_service.image.decoder import DEATHS
from encoder_service.image.decoder_process import MESSAGE_BYTES, MESSAGE_CHARACTERS, VIDEO
from encoder_service.image.pillow import MAX_SIDE, PILLOW_BYTES_PER_PIXEL, Pixels, is_shortage
from encoder_service.image.source import Source, VideoFile

log = logging.getLogger(__name__)

Result = TypeVar("Result")

# A process is ready in half a second, on a busy machine in five. One that is not ready after this time never will be.
START_LIMIT_S = 60.0
_PROGRAM = "import sys; sys.path[:] = {path!r}; from {module} import main; main({descriptor}, **{settings!r})"
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


# A child that could shrink the memory could have the server killed by SIGBUS.
_SEALS = fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL
# A buffer larger than this gives its pages back as soon as its pixels are no longer in use.
_KEPT_BYTES = 64 << 20
_SMALLEST_BYTES, _ALIGNMENT = 1 << 20, 64
_libc = ctypes.CDLL(None, use_errno=True)


class SharedBuffer:
    """Memory shared with a decoder process, for one request at a time: the file goes in, the pixels come out.

    `descriptor` stays open until `close_descriptor` is called or this object is garbage-collected.
    """

    def __init__(self, size: int = _SMALLEST_BYTES) -> None:
        self.size = size
        descriptor = os.memfd_create("decoder", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
        try:
            os.ftruncate(descriptor, size)
            fcntl.fcntl(descriptor, fcntl.F_ADD_SEALS, _SEALS)
            self._bytes = mmap.mmap(descriptor, size)
        except OSError:
            os.close(descriptor)
            raise
        self.descriptor = descriptor
        self.close_descriptor = weakref.finalize(self, os.close, descriptor)
        self._numbers = count()
        self._lent: set[int] = set()  # one number for each array that is still in use

    @property
    def is_free(self) -> bool:
        """Whether no array of its pixels is in use."""
        return not self._lent

    @property
    def is_new(self) -> bool:
        """Whether the decoder process has not received it yet."""
        return self.close_descriptor.alive

    def write(self, file: bytes) -> None:
        """Write a file to the beginning."""
        self._bytes[: len(file)] = file

    def lend(self, shape: tuple[int, ...], offset: int) -> Pixels:
        """Return the pixels at `offset`, uint8 of this shape. The buffer is in use for as long as the array lives."""
        pixels = np.frombuffer(self._bytes, np.uint8, math.prod(shape), offset).reshape(shape)
        number = next(self._numbers)
        self._lent.add(number)
        weakref.finalize(pixels, self._take_back, number).atexit = False
        return pixels

    def _take_back(self, number: int) -> None:
        # Free the pages first: once the buffer counts as free, another request may use it.
        if self._lent == {number} and self.size > _KEPT_BYTES:
            self._free_pages()
        self._lent.discard(number)

    def _free_pages(self) -> None:
        """Give the pages back to the kernel. `mmap.madvise` would hold the GIL for about 25 ms per 100 MB."""
        address = ctypes.addressof(ctypes.c_char.from_buffer(self._bytes))
        if _libc.madvise(ctypes.c_void_p(address), ctypes.c_size_t(self.size), mmap.MADV_REMOVE):
            raise OSError(ctypes.get_errno(), "a decoder's memory cannot be given back")


def pixels_offset(source: Source) -> int:
    """Return where the pixels of an image begin in its buffer: behind the file."""
    return -(-len(source.data) // _ALIGNMENT) * _ALIGNMENT


class _Process:
    """A process that was started. `is_confined` is whether the kernel enforces its sandbox: None until it is ready."""

    def __init__(self, stderr: StderrPipe, memory_bytes: int, *, videos: bool) -> None:
        """Start the process. Raises `OSError` if memory, processes or descriptors are short."""
        # Two, so that the next request can be answered while the pixels of the last one are in use. They take memory
        # only where they are used, and a descriptor until they are first sent.
        self.buffers = [SharedBuffer(), SharedBuffer()]
        self.is_confined: bool | None = None
        self.channel, child_end = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        with child_end:
            settings = {"parent": os.getpid(), "memory_bytes": memory_bytes, "videos": videos}
            program = _PROGRAM.format(
                path=sys.path, module=_MODULE, descriptor=child_end.fileno(), settings=settings
            )
            process = subprocess.Popen(  # noqa: S603 - our own interpreter and module
                [sys.executable, "-c", program],
                pass_fds=[child_end.fileno()],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                stderr=stderr.writer,
                env={
                    **SETTINGS,
                    **(VIDEO_SETTINGS if videos else {}),
                    **{name: os.environ[name] for name in PASSED_ON if name in os.environ},
                },
                start_new_session=True,  # Ctrl-C in the terminal is for the server alone
            )
        self.pid = process.pid
        self.end = weakref.finalize(self, _end, process, self.channel)
        """Kill the process if it is alive; return its exit status, which is negative for a signal."""

    def wait_ready(self) -> bool:
        """Wait until the process is ready; return False if it never will be. Raises `TimeoutError` if it hangs."""
        if self.is_confined is None:
            with suppress(ConnectionError, ProcessLookupError):
                if hello := self._first_message():
                    self.is_confined = bool(json.loads(hello)["confined"])
        return self.is_confined is not None

    def _first_message(self) -> bytes:
        """Return what the process sends when it is ready; empty if it ended."""
        watch = _IdleWatch(self.pid)
        ends_at = monotonic() + START_LIMIT_S
        self.channel.settimeout(_CHECK_S)
        while True:
            try:
                return self.channel.recv(MESSAGE_BYTES)
            except TimeoutError:
                if watch.is_hanging(_CHECK_S) or monotonic() > ends_at:
                    raise

    def free_buffer(self, needed_bytes: int) -> tuple[int, SharedBuffer]:
        """Return the number of a free buffer, and the buffer, made large enough."""
        number = next(n for n, buffer in enumerate(self.buffers) if buffer.is_free)
        if self.buffers[number].size < needed_bytes:
            self.buffers[number] = SharedBuffer(max(_SMALLEST_BYTES, 1 << (needed_bytes - 1).bit_length()))
        return number, self.buffers[number]

    def pixels(self, number: int, shape: tuple[int, ...], offset: int) -> Pixels:
        """Return pixels in a buffer; a copy if the other buffer is in use, so that one is always free."""
        pixels = self.buffers[number].lend(shape, offset)
        return pixels if self.buffers[1 - number].is_free else pixels.copy()


def _end(process: "subprocess.Popen[bytes]", channel: socket.socket) -> int:
    channel.close()
    process.kill()
    return process.wait()


# Why the server killed a process that was decoding frames without callers. It is not one of `DEATHS`.
_ABANDONED = "abandoned"
# How often the server checks a process that has not answered.
_CHECK_S, _FIRST_CHECK_S = 0.5, 0.01
# A process hangs if it uses less CPU time than this in this many seconds: even the busiest machine gives it more.
_HANGING_CPU_S, _HANGING_S = 0.01, 5.0
_CPU_CLOCK = 2  # CPUCLOCK_SCHED of a process, from <linux/posix-timers.h>
# What a process may take beside pixels: the file, copies of it without metadata, and what its libraries keep.
_BASE_BYTES = 256 << 20
# CPU time for a header that Pillow reads: a sound one takes a few milliseconds.
_HEADER_CPU_S = 1.0
# CPU time for each video frame that is decoded on the way: one of 2160p takes 30 ms.
_FRAME_CPU_S = 0.1
# Wall-clock limit of a request: this many seconds for each second of its CPU time, because the process shares the
# cores with the vision tower, and a constant.
_WALL_PER_CPU, _WALL_S = 3.0, 3.0
DECODE_LIMIT_S = 15.0  # of CPU time, for an image


class DecoderDiedError(Exception):
    """A process died before it answered. `reason` is one of `DEATHS`, or `_ABANDONED`. Another is being started."""

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
        request = {"buffer": number, "bytes": len(file), "formats": formats, "may_take": _BASE_BYTES}
        answer = self._request(process, buffer, request, _HEADER_CPU_S, Header)
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
        cpu_s = self._cpu_s + _FRAME_CPU_S * (second - begin)
        error = self._request(process, buffer, request, cpu_s, NoneType, is_wanted)
        return error if error is not None else process.pixels(number, (2, height, width, 3), 0)

    def end(self) -> int:
        """Kill the process and return its exit status, 0 if there was none. The next use starts another."""
        launched, self._launched = self._launched, None
        self.open_video_key = None
        if launched is None:
            return 0
        try:
            return launched.result().end() or 0
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
            began_s = _cpu_s(process.pid)
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
        watch, used_s = _IdleWatch(process.pid), 0.0
        while True:
            check_s = min(_CHECK_S, max(cpu_s - used_s, _FIRST_CHECK_S))
            process.channel.settimeout(check_s)
            try:
                return process.channel.recv(MESSAGE_BYTES)
            except TimeoutError:
                used_s = _cpu_s(process.pid) - began_s
            if used_s > cpu_s:
                raise self._replaced("time")
            if not is_wanted():
                raise self._replaced(_ABANDONED)
            if watch.is_hanging(check_s) or monotonic() > ends_at:
                raise self._replaced("stuck")

    def _replaced(self, reason: str = "") -> DecoderDiedError:
        """Kill and reap the process, launch another, and return the error to raise.

        Without a `reason`, the exit status tells it.
        """
        status = self.end()
        self.launch()
        return DecoderDiedError(reason or ("killed" if status == -signal.SIGKILL else "crashed"), status)


class _IdleWatch:
    """Notices that a process hangs: that it uses no CPU time."""

    def __init__(self, pid: int) -> None:
        self._pid = pid
        self._idle_s = 0.0
        self._used_s = _cpu_s(pid)

    def is_hanging(self, waited_s: float) -> bool:
        """Whether the process hangs. It was waited for since the last call. Raises `ProcessLookupError`."""
        self._idle_s += waited_s
        if (used_s := _cpu_s(self._pid)) - self._used_s > _HANGING_CPU_S:
            self._idle_s, self._used_s = 0.0, used_s
        return self._idle_s >= _HANGING_S


def _cpu_s(pid: int) -> float:
    """Return the CPU time that a process has used, seconds. Raises `ProcessLookupError` if it is gone."""
    try:
        return time.clock_gettime(~pid << 3 | _CPU_CLOCK)
    except OSError as error:
        raise ProcessLookupError(f"process {pid} is gone") from error


def decoding_bytes(header: Header) -> int:
    """Return how much memory a process may take to decode an image."""
    return _BASE_BYTES + PILLOW_BYTES_PER_PIXEL * header.pixels


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


_RETRY_MS = 500
# Videos that are open at a time, each in a separate process. If callers read more videos in turn, processes have to
# decode them from the beginning again and again.
OPEN_VIDEOS = 2


class DecoderPool:
    """Decodes images in separate processes, one for each of up to `threads` threads, and a spare.

    They also read the headers of rare formats, one at a time. `OPEN_VIDEOS` further processes, started when first
    needed, each keep one video open.

    If a process dies, its image gets an error: `UndecodableImageError` if the image is to blame, else
    `OverloadedError`. `deaths` counts them by reason. The processes start in the background; `start` waits for them,
    and `name` then says what the kernel enforces. `cpu_s` is the CPU time that an image may take.
    """

    def __init__(
        self, threads: int = 4, *, max_image_pixels: int = 100_000_000, cpu_s: float = DECODE_LIMIT_S
    ) -> None:
        self.name = f"Pillow {PIL.__version__} in separate processes"
        self._cpu_s = cpu_s
        memory_bytes = self._memory_bytes = _BASE_BYTES + PILLOW_BYTES_PER_PIXEL * max_image_pixels
        self._stderr = StderrPipe()
        self._deaths_lock = threading.Lock()
        self._deaths = dict.fromkeys(DEATHS, 0)
        # One thread that lives as long as the pool: the kernel kills a process when the thread that started it ends.
        launcher = ThreadPoolExecutor(1, thread_name_prefix="decoder-launcher")
        self._children = [
            DecoderChild(launcher, self._stderr, memory_bytes=memory_bytes, cpu_s=cpu_s)
            for _ in range(threads + 1)
        ]
        self._header_lock = threading.Lock()
        self._video_children = [
            DecoderChild(launcher, self._stderr, memory_bytes=memory_bytes, cpu_s=cpu_s, videos=True)
            for _ in range(OPEN_VIDEOS)
        ]
        # The most recently used child is last and takes the next image, because its memory is warm. A child whose
        # process is being started is first.
        self._idle, self._idle_videos = deque(self._children), deque(self._video_children)
        self._idle_changed = threading.Condition()
        for child in self._children:
            child.launch()

    @property
    def deaths(self) -> Mapping[str, int]:
        """Processes that ended, by reason."""
        return self._deaths

    @property
    def messages(self) -> int:
        """Lines that the processes have printed to standard error; the lines are dropped."""
        self._stderr.drain()
        return self._stderr.lines

    def start(self) -> None:
        """Wait until all processes are ready. Raises `DecoderStartError` if one does not start."""
        is_confined = all(self._for_all(self._children, lambda child: child.ready().is_confined))
        if not is_confined:
            log.warning("this kernel has no seccomp: decoder processes can open files and sockets")
        confined = "confined by seccomp" if is_confined else "not confined"
        self.name = f"Pillow {PIL.__version__} in separate processes ({confined})"

    def close(self) -> None:
        """End all processes, each after its current image; a further use starts them again."""
        self._for_all(self._children, DecoderChild.end)
        self.close_videos()

    def close_videos(self) -> None:
        """See `FileDecoder`."""
        self._for_all(self._video_children, DecoderChild.end)

    def read_header(self, file: bytes, formats: Sequence[str]) -> Header | EncoderError:
        """See `FileDecoder`. A process that does not start is an `OverloadedError` of the image."""
        limits = f"{_HEADER_CPU_S:g} s of CPU time", _BASE_BYTES
        try:
            with self._header_lock:
                return self._run(
                    "reading the header of this image", limits, lambda child: child.read_header(file, formats)
                )
        except DecoderStartError as error:
            log.error("%s", error)
            return OverloadedError(
                "no decoder process starts to read the header of this image: retry", retry_after_ms=_RETRY_MS
            )

    def decode(self, source: Source) -> Pixels | EncoderError:
        """See `FileDecoder`. Raises `DecoderStartError` if no process starts."""
        limits = f"{self._cpu_s:g} s of CPU time", decoding_bytes(source.header)
        return self._run(f"decoding this {source.header.format}", limits, lambda child: child.decode(source))

    def open_video(self, key: bytes, file: VideoFile) -> VideoInfo | EncoderError:
        """See `FileDecoder`; the video then stays open for `read_frames`.

        Raises `DecoderStartError` if no process starts.
        """
        return self._run(
            "opening this video",
            self._video_limits,
            lambda child: child.open_video(key, file),
            key,
        )

    def read_frames(
        self, source: Source, first: int, second: int, is_wanted: Callable[[], bool] = lambda: True
    ) -> Pixels | EncoderError:
        """See `FileDecoder`. Raises `DecoderStartError` if no process starts.

        A process on its way to frames that are no longer wanted is killed, because they may be minutes away.
        """

        def read(child: DecoderChild) -> Pixels | EncoderError:
            if child.open_video_key != source.key:
                if source.file is None or (file := source.file()) is None:
                    return UnknownImageError(
                        "the file of this video is no longer kept: submit it, then fetch"
                    )
                opened = child.open_video(source.key, file)
                if isinstance(opened, EncoderError):
                    return opened
            return child.read_frames(source, first, second, is_wanted)

        what = f"decoding frames {first} and {second} of this video"
        return self._run(what, self._video_limits, read, source.key)

    @property
    def _video_limits(self) -> tuple[str, int]:
        return f"{self._cpu_s:g} s of CPU time, and {_FRAME_CPU_S:g} s a frame", self._memory_bytes

    @contextmanager
    def _idle_child(self, video: bytes | None = None) -> Iterator[DecoderChild]:
        """Hold a child that is idle, or wait for one. With the key of a `video`, prefer the child that has it open."""
        idle = self._idle if video is None else self._idle_videos
        with self._idle_changed:
            while (child := self._next_idle(video)) is None:
                self._idle_changed.wait()
            idle.remove(child)
        put_back = idle.append
        try:
            yield child
        except BaseException:
            put_back = idle.appendleft  # its process is being started, or should be
            raise
        finally:
            with self._idle_changed:
                put_back(child)
                self._idle_changed.notify_all()

    def _next_idle(self, video: bytes | None) -> DecoderChild | None:
        """Return the child to use next; None if none is idle, or if the child that has the video open is busy."""
        if video is None:
            return self._idle[-1] if self._idle else None
        child = next((each for each in self._video_children if each.open_video_key == video), None)
        if child is None:
            return self._idle_videos[0] if self._idle_videos else None
        return child if child in self._idle_videos else None

    def _for_all(
        self, children: Sequence[DecoderChild], use: Callable[[DecoderChild], Result]
    ) -> list[Result]:
        """Wait until all of these children are idle, then return what `use` returns for each."""
        video = None if children is self._children else b""  # no video has this key
        with ExitStack() as stack:
            return [use(child) for child in [stack.enter_context(self._idle_child(video)) for _ in children]]

    def _run(
        self,
        what: str,
        limits: tuple[str, int],
        use: Callable[[DecoderChild], Result],
        video: bytes | None = None,
    ) -> Result | EncoderError:
        """Return what `use` returns for an idle child, or the error of an image whose process died.

        `what` and `limits` (CPU time as text, bytes of memory) are for the error.
        """
        try:
            with self._idle_child(video) as child:
                return use(child)
        except DecoderDiedError as died:
            if died.reason == _ABANDONED:
                return AbandonedError("all callers of the image have left")
            log.warning("a decoder process ended (%s) while %s", died, what)
            return self._death_error(died.reason, what, *limits)
        except OSError as error:
            if not is_shortage(error):
                raise
            log.warning("short of memory or files while %s", what, exc_info=error)
            return OverloadedError(f"{what} ran short of memory or files", retry_after_ms=_RETRY_MS)

    def _death_error(self, reason: str, what: str, cpu_time: str, memory_bytes: int) -> EncoderError:
        """Count a death and return the error of its image."""
        with self._deaths_lock:
            self._deaths[reason] += 1
        if reason in ("killed", "stuck"):  # something else stopped or killed it, or it got no CPU time
            return OverloadedError(
                f"the decoder process was ended while {what}: retry", retry_after_ms=_RETRY_MS
            )
        texts = {
            "crashed": f"the decoder crashed while {what}",
            "senseless": f"the decoder gave an invalid answer while {what}",
            "time": f"{what} takes more than {cpu_time}",
            "memory": f"{what} takes more memory than {memory_bytes // 1_000_000} MB",
        }
        return UndecodableImageError(texts[reason])
