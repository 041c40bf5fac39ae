"""Decoding in processes of their own: a malicious file can fail only itself.

`DecoderPool` starts the processes, one more than there are threads that decode: when one dies, the spare takes its
place, and another is started in the background. A `DecoderChild` is the server's end of one: it sends a file, waits for
the pixels, and ends a process that takes too long. `PixelMemory` is shared with it: files go in, pixels come out, and
nothing is copied to be read. Of videos, some other processes each keep one open: they start with the first video.
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
from encoder_service.image.pillow import PILLOW_BYTES_PER_PIXEL, Pixels, is_shortage
from encoder_service.image.source import Source, VideoFile

log = logging.getLogger(__name__)

Result = TypeVar("Result")

# A process is ready in half a second, on a busy machine in five; one that does not answer for so long never will.
ANSWER_S = 60.0
_PROGRAM = "import sys; sys.path[:] = {path!r}; from {module} import main; main({descriptor}, **{settings!r})"
_MODULE = "encoder_service.image.decoder_process"
# The environment of these processes. They get nothing of the server's, which may hold passwords, but `PASSED_ON`.
# glibc uses freed memory again, as in the server, but keeps no more than this. Numpy starts no threads, which would
# take memory.
SETTINGS = {
    "MALLOC_ARENA_MAX": "1",
    "MALLOC_MMAP_THRESHOLD_": str(1 << 30),
    "MALLOC_TRIM_THRESHOLD_": str(64 << 20),
    "OPENBLAS_NUM_THREADS": "1",
}
# Where the interpreter and the libraries are, if the server was told.
PASSED_ON = ("LD_LIBRARY_PATH", "PYTHONHOME")
# Of what these processes print, how much is read at a time, and how much is kept for an error at start.
_PRINTED_BYTES, _LAST_BYTES = 64 << 10, 2000


class DecoderStartError(RuntimeError):
    """No decoder process starts."""


class Printed:
    """What decoder processes print to standard error: counted and thrown away, but for the end of it. Thread-safe.

    They write to a pipe that is read after each request, and lose what does not fit into it, so that no process waits.
    """

    def __init__(self) -> None:
        self.lines = 0
        self._end = b""
        self._lock = threading.Lock()
        self._reader, self.writer = os.pipe()
        for descriptor in (self._reader, self.writer):
            os.set_blocking(descriptor, False)
            weakref.finalize(self, os.close, descriptor)

    def read(self) -> None:
        """Count what was printed since the last time."""
        with self._lock, suppress(BlockingIOError):
            printed = os.read(self._reader, _PRINTED_BYTES)
            self.lines += printed.count(b"\n")
            self._end = (self._end + printed)[-_LAST_BYTES:]
            log.debug("a decoder process printed %s", self.end)

    @property
    def end(self) -> str:
        """The last line, of what may be an attacker's text."""
        lines = self._end.decode(errors="replace").splitlines() or ["nothing"]
        return "".join(letter if letter.isprintable() else "?" for letter in lines[-1])


# A child that could shrink the memory could have the server killed by SIGBUS.
_SEALS = fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL
# Where more than this was used, it is given back once the pixels are no longer in use.
_KEPT_BYTES = 64 << 20
_SMALLEST_BYTES, _ALIGNED = 1 << 20, 64
_libc = ctypes.CDLL(None, use_errno=True)


class PixelMemory:
    """A piece of memory, used for one request at a time.

    `descriptor` is open until `close_descriptor`, or until this object is garbage-collected.
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
        self._lent: set[int] = set()  # one for each array that is in use

    @property
    def is_free(self) -> bool:
        """Whether its pixels are no longer in use."""
        return not self._lent

    @property
    def is_new(self) -> bool:
        """Whether no other process has mapped it yet."""
        return self.close_descriptor.alive

    def put(self, file: bytes) -> None:
        """Write a file to the beginning."""
        self._bytes[: len(file)] = file

    def lend(self, shape: tuple[int, ...], begin: int) -> Pixels:
        """Return the pixels at `begin`, uint8 of this shape. The memory is in use for as long as the array lives."""
        pixels = np.frombuffer(self._bytes, np.uint8, math.prod(shape), begin).reshape(shape)
        number = next(self._numbers)
        self._lent.add(number)
        weakref.finalize(pixels, self._returned, number).atexit = False
        return pixels

    def _returned(self, number: int) -> None:
        # Emptied before it counts as free: from then on another request may be in it.
        if self._lent == {number} and self.size > _KEPT_BYTES:
            self._empty()
        self._lent.discard(number)

    def _empty(self) -> None:
        """Give its pages back. `mmap.madvise` would hold the interpreter meanwhile, for about 25 ms per 100 MB."""
        address = ctypes.addressof(ctypes.c_char.from_buffer(self._bytes))
        if _libc.madvise(ctypes.c_void_p(address), ctypes.c_size_t(self.size), mmap.MADV_REMOVE):
            raise OSError(ctypes.get_errno(), "a decoder's memory cannot be given back")


def pixels_at(source: Source) -> int:
    """Return where in a memory the pixels of an image begin: behind its file."""
    return -(-len(source.data) // _ALIGNED) * _ALIGNED


class _Process:
    """A process that was started; `sandbox` is what the kernel enforces once it is ready."""

    def __init__(self, printed: Printed, memory_bytes: int, *, videos: bool) -> None:
        """Start it. Raises `OSError` if there is no memory, process or descriptor for it."""
        # Two: while the pixels of one request are in use, the next can be answered. They cost nothing until they are
        # used. The process takes all its descriptors here, and no more later.
        self.memories = [PixelMemory(), PixelMemory()]
        self.sandbox: tuple[str, ...] | None = None
        self.channel, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        with theirs:
            settings = {"parent": os.getpid(), "memory_bytes": memory_bytes, "videos": videos}
            program = _PROGRAM.format(
                path=sys.path, module=_MODULE, descriptor=theirs.fileno(), settings=settings
            )
            process = subprocess.Popen(  # noqa: S603 - our own interpreter and module
                [sys.executable, "-c", program],
                pass_fds=[theirs.fileno()],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                stderr=printed.writer,
                env={**SETTINGS, **{name: os.environ[name] for name in PASSED_ON if name in os.environ}},
                start_new_session=True,  # Ctrl-C in our terminal is for us alone
            )
        self.pid = process.pid
        self.end = weakref.finalize(self, _end, process, self.channel)
        """Kill it if it still lives; return its exit status, which is negative for a signal."""

    def wait_ready(self) -> bool:
        """Wait until it is ready; return whether it is."""
        if self.sandbox is None:
            self.channel.settimeout(ANSWER_S)
            with suppress(OSError):
                if hello := self.channel.recv(MESSAGE_BYTES):
                    self.sandbox = tuple(json.loads(hello)["sandbox"])
        return self.sandbox is not None

    def room(self, needed_bytes: int) -> tuple[int, PixelMemory]:
        """Return an unused memory that has room, with its number."""
        number = next(n for n, each in enumerate(self.memories) if each.is_free)
        if self.memories[number].size < needed_bytes:
            self.memories[number] = PixelMemory(max(_SMALLEST_BYTES, 1 << (needed_bytes - 1).bit_length()))
        return number, self.memories[number]


def _end(process: "subprocess.Popen[bytes]", channel: socket.socket) -> int:
    channel.close()
    process.kill()
    return process.wait()


# Why a process was ended whose frames are no longer wanted: none of `DEATHS`.
_LEFT = "left"
# How often a process that has not answered is looked at.
_LOOK_S, _SOONEST_LOOK_S = 0.5, 0.01
# A process hangs if it uses less than this of a processor in this time: even the busiest machine gives it more.
_HANGING_CPU_S, _HANGING_S = 0.01, 5.0
_CPU_CLOCK = 2  # of <linux/posix-timers.h>: CPUCLOCK_SCHED of a process
# What a process may take beside pixels: the file, copies of it without metadata, and what its libraries keep.
_BESIDE_PIXELS_BYTES = 256 << 20
# Of a processor, for a header that Pillow reads: a sound one takes a few milliseconds.
_HEADER_CPU_S = 1.0
# Of a processor, for each frame of a video that is decoded on the way: one of 2160p takes 30 ms.
_FRAME_CPU_S = 0.1
# How long a process may take by the clock: so long for each second of a processor, which it shares with the vision
# tower, and so much longer.
_WALL_PER_CPU, _WALL_S = 3.0, 3.0


class DecoderDiedError(Exception):
    """A process died, of one of `DEATHS` or `_LEFT`, and its image has no outcome. Another is being started."""

    def __init__(self, reason: str, status: int) -> None:
        super().__init__(f"{reason}, status {status}")
        self.reason = reason


class DecoderChild:
    """A process, and the next one when it has died; used by one thread at a time.

    It may take `memory_bytes`, and for an image `cpu_s` of a processor. `launcher` is the thread that starts processes:
    they end with it. The methods that decode raise `DecoderDiedError`, and what `ready` raises. Only a child for
    `videos` opens them.
    """

    def __init__(
        self,
        launcher: ThreadPoolExecutor,
        printed: Printed,
        *,
        memory_bytes: int,
        cpu_s: float,
        videos: bool = False,
    ) -> None:
        self._launcher = launcher
        self._printed = printed
        self._memory_bytes = memory_bytes
        self._cpu_s = cpu_s
        self._videos = videos
        self._launched: Future[_Process] | None = None
        self.opened: bytes | None = None
        """The key of the video that its process has open."""
        self._decoded_frames = 0  # of that video, from the beginning

    def launch(self) -> None:
        """Have a process started, unless there is one; do not wait for it."""
        if self._launched is None:
            self._launched = self._launcher.submit(
                _Process, self._printed, self._memory_bytes, videos=self._videos
            )

    def ready(self) -> _Process:
        """Return its process, once that is ready.

        Raises `DecoderStartError` if it does not start, `OSError` if there is no memory or descriptor for it.
        """
        self.launch()
        assert self._launched is not None
        try:
            process = self._launched.result()
        except Exception:
            self._launched = None
            raise
        if not process.wait_ready():
            self.end()
            self._printed.read()
            raise DecoderStartError(f"no decoder process starts; the last one printed: {self._printed.end}")
        return process

    def read_header(self, file: bytes, formats: Sequence[str]) -> Header | EncoderError:
        """Return the header of a file in one of these formats, or its error."""
        process = self.ready()
        number, memory = process.room(len(file))
        memory.put(file)
        request = {"memory": number, "bytes": len(file), "formats": formats, "may_take": _BESIDE_PIXELS_BYTES}
        said = self._ask(process, memory, request, _HEADER_CPU_S, Header)
        if isinstance(said, Header) and said.format not in formats:
            raise self._died("senseless")
        return said

    def decode(self, source: Source) -> Pixels | EncoderError:
        """Return the pixels of an image, upright, or its error. The pixels live as long as the array."""
        process = self.ready()
        out = pixels_at(source)
        number, memory = process.room(out + 3 * source.header.pixels)
        memory.put(source.data)
        request = {
            "memory": number,
            "bytes": len(source.data),
            "header": asdict(source.header),
            "out": out,
            "may_take": may_take_bytes(source.header),
        }
        error = self._ask(process, memory, request, self._cpu_s, NoneType)
        if error is not None:
            return error
        width, height = source.header.upright
        return _lent(process, number, (height, width, 3), out)

    def open_video(self, key: bytes, file: VideoFile) -> VideoInfo | EncoderError:
        """Open a video in place of the one before, and return what its container says, or its error."""
        process = self.ready()
        self.opened = None
        request = {"memory": VIDEO, "may_take": self._memory_bytes}
        said = self._ask(process, file, request, self._cpu_s, VideoInfo)
        if isinstance(said, VideoInfo):
            self.opened, self._decoded_frames = key, 0
        return said

    def read_frames(
        self, source: Source, first: int, second: int, is_wanted: Callable[[], bool]
    ) -> Pixels | EncoderError:
        """Return two frames of the video that is open, upright, uint8 [2, H, W, 3], or their error."""
        process = self.ready()
        width, height = source.header.upright
        number, memory = process.room(2 * 3 * source.header.pixels)
        begin = self._decoded_frames if first >= self._decoded_frames else 0
        self._decoded_frames = second + 1
        request = {
            "memory": number,
            "frames": (first, second),
            "shape": (height, width),
            "may_take": self._memory_bytes,
        }
        cpu_s = self._cpu_s + _FRAME_CPU_S * (second - begin)
        error = self._ask(process, memory, request, cpu_s, NoneType, is_wanted)
        return error if error is not None else _lent(process, number, (2, height, width, 3), 0)

    def end(self) -> int:
        """End its process, if there is one; return the exit status, 0 without one. The next use starts another."""
        launched, self._launched = self._launched, None
        self.opened = None
        if launched is None:
            return 0
        try:
            return launched.result().end() or 0
        except Exception:  # noqa: BLE001 - it was never started
            return 0

    def _ask(
        self,
        process: _Process,
        memory: PixelMemory | VideoFile,
        request: dict[str, Any],
        cpu_s: float,
        kind: type[Result],
        is_wanted: Callable[[], bool] = lambda: True,
    ) -> Result | InvalidImageError:
        """Return what the process answers within `cpu_s` of a processor: a `kind`, or the error of the image."""
        message = json.dumps({**request, "size": memory.size}).encode()
        try:
            began_s = _cpu_s(process.pid)
            process.channel.settimeout(_WALL_S + _WALL_PER_CPU * cpu_s)
            is_sent = isinstance(memory, VideoFile) or memory.is_new
            socket.send_fds(process.channel, [message], [memory.descriptor] if is_sent else [])
        except (ConnectionError, ProcessLookupError):  # it died before: that is not the image's fault
            raise self._died("killed") from None
        if isinstance(memory, PixelMemory):
            memory.close_descriptor()
        try:
            reply = self._reply(process, began_s, cpu_s, is_wanted)
        except TimeoutError as late:
            raise self._died(str(late)) from None
        except (ConnectionError, ProcessLookupError):
            reply = b""
        self._printed.read()
        if not reply:
            raise self._died("")
        try:
            answer = parsed(reply)
        except (ValueError, RecursionError):  # the latter of what is nested deeply
            raise self._died("senseless") from None
        if isinstance(answer, kind):
            return answer
        if not isinstance(answer, tuple):
            raise self._died("senseless")
        text, is_shortage_of_memory = answer
        if is_shortage_of_memory:
            raise self._died("memory")
        return InvalidImageError(text)

    @staticmethod
    def _reply(process: _Process, began_s: float, cpu_s: float, is_wanted: Callable[[], bool]) -> bytes:
        """Return what the process answers, empty if it died. Raises `TimeoutError` with the reason to end it.

        It is watched from here: what runs inside it, once an attacker's, may stop any timer of its own.
        """
        ends_at = monotonic() + _WALL_S + _WALL_PER_CPU * cpu_s
        idle_s, seen_s, used_s = 0.0, 0.0, 0.0
        while True:
            look_s = min(_LOOK_S, max(cpu_s - used_s, _SOONEST_LOOK_S))
            process.channel.settimeout(look_s)
            try:
                return process.channel.recv(MESSAGE_BYTES)
            except TimeoutError:
                used_s = _cpu_s(process.pid) - began_s
            if used_s > cpu_s:
                raise TimeoutError("time")
            if not is_wanted():
                raise TimeoutError(_LEFT)
            idle_s += look_s
            if used_s - seen_s > _HANGING_CPU_S:
                idle_s, seen_s = 0.0, used_s
            if idle_s >= _HANGING_S or monotonic() > ends_at:
                raise TimeoutError("stuck")

    def _died(self, reason: str) -> DecoderDiedError:
        """Reap the process, launch another, and return what it died of: by its exit status if no reason is given."""
        status = self.end()
        self.launch()
        return DecoderDiedError(reason or ("killed" if status == -signal.SIGKILL else "crashed"), status)


def _lent(process: _Process, number: int, shape: tuple[int, ...], begin: int) -> Pixels:
    """Return pixels in a memory of a process: a copy, if its other memory is in use."""
    pixels = process.memories[number].lend(shape, begin)
    return pixels if process.memories[1 - number].is_free else pixels.copy()


def _cpu_s(pid: int) -> float:
    """Return the processor time that a process has used, seconds. Raises `ProcessLookupError` if it is gone."""
    try:
        return time.clock_gettime(~pid << 3 | _CPU_CLOCK)
    except OSError as error:
        raise ProcessLookupError(f"process {pid} is gone") from error


def may_take_bytes(header: Header) -> int:
    """Return how much memory a process may take for an image."""
    return _BESIDE_PIXELS_BYTES + PILLOW_BYTES_PER_PIXEL * header.pixels


# Of a process: None for pixels, a header, what a video says, or an error and whether memory was short.
Answer = Header | VideoInfo | tuple[str, bool] | None
_MAX_SIDE = (1 << 31) - 1


def parsed(reply: bytes) -> Answer:
    """Return what a process says of an image.

    Raises `ValueError` or `RecursionError` if it makes no sense: the process may be an attacker's by now.
    """
    said = json.loads(reply)
    match said:
        case None:
            return None
        case [str(text), bool(is_shortage_of_memory)]:
            text = "".join(letter if letter.isprintable() else "?" for letter in text)
            return text[:MESSAGE_CHARACTERS], is_shortage_of_memory
        case {"format": str(name), "width": int(width), "height": int(height), "channels": int(channels)}:
            if 1 <= width <= _MAX_SIDE and 1 <= height <= _MAX_SIDE:
                return Header(name, width, height, UPRIGHT, channels)
        case {
            "frames": int(frames),
            "readable_frames": int(readable),
            "fps": float(fps),
            "width": int(width),
            "height": int(height),
            "rotation": int(rotation),
        }:
            sizes = 1 <= width <= _MAX_SIDE and 1 <= height <= _MAX_SIDE
            if sizes and 1 <= readable <= frames <= _MAX_SIDE and 0 <= fps < math.inf and 0 <= rotation < 360:
                return VideoInfo(frames, readable, fps, width, height, rotation)
    raise ValueError("the answer is no header and no error")


_RETRY_MS = 500
# Videos that are open at a time, each in a process: callers that ask for pairs of more of them in turn make these begin
# again and again.
OPEN_VIDEOS = 2


class DecoderPool:
    """Decodes images in processes of their own, for up to `threads` threads at a time, and has one process to spare.

    Headers of rare formats are read there, too, one at a time.

    An image whose process dies has an error: `UndecodableImageError` if it is to blame, else `OverloadedError`.
    `deaths` counts them by reason. It starts in the background; `start` waits for that, and `name` then says what the
    kernel enforces. `cpu_s` is the processor time that an image may take.

    Of videos, each process keeps one open, at most `OPEN_VIDEOS` at a time; these processes are started when they are
    needed.
    """

    def __init__(self, threads: int = 4, *, max_image_pixels: int = 100_000_000, cpu_s: float = 20.0) -> None:
        self.name = f"Pillow {PIL.__version__} in processes of their own"
        self._cpu_s = cpu_s
        memory_bytes = self._memory_bytes = _BESIDE_PIXELS_BYTES + PILLOW_BYTES_PER_PIXEL * max_image_pixels
        self._printed = Printed()
        self._counting = threading.Lock()
        self._deaths = dict.fromkeys(DEATHS, 0)
        # One thread, which lasts: the kernel ends a process when the thread that started it ends.
        launcher = ThreadPoolExecutor(1, thread_name_prefix="decoder-launcher")
        self._children = [
            DecoderChild(launcher, self._printed, memory_bytes=memory_bytes, cpu_s=cpu_s)
            for _ in range(threads + 1)
        ]
        self._header_turn = threading.Lock()
        self._video_children = [
            DecoderChild(launcher, self._printed, memory_bytes=memory_bytes, cpu_s=cpu_s, videos=True)
            for _ in range(OPEN_VIDEOS)
        ]
        # The one used last is last, and the next for an image: its memory is warm. One that is being started is first.
        self._idle, self._idle_videos = deque(self._children), deque(self._video_children)
        self._has_idle = threading.Condition()
        for child in self._children:
            child.launch()

    @property
    def deaths(self) -> Mapping[str, int]:
        """Processes that ended, by reason."""
        return self._deaths

    @property
    def messages(self) -> int:
        """Lines that the processes have printed to standard error; they are thrown away."""
        self._printed.read()
        return self._printed.lines

    def start(self) -> None:
        """Wait until all processes are there. Raises `DecoderStartError` if one does not start."""
        enforced = ", ".join(self._of_all(lambda child: child.ready().sandbox)[0] or ())
        if not enforced:
            log.warning(
                "this kernel has neither Landlock nor seccomp: decoder processes can open files and sockets"
            )
        self.name = f"Pillow {PIL.__version__} in processes of their own ({enforced or 'not confined'})"

    def close(self) -> None:
        """End all processes, each once it is done with its image; a further use starts them again."""
        self._of_all(DecoderChild.end)
        self._of_all(DecoderChild.end, b"")

    def read_header(self, file: bytes, formats: Sequence[str]) -> Header | EncoderError:
        """Return the header of a file in one of some `RARE_FORMATS`, or its error, as `FileDecoder.read_header`."""
        limits = f"{_HEADER_CPU_S:g} s of a processor", _BESIDE_PIXELS_BYTES
        try:
            with self._header_turn:
                return self._asked(
                    "reading the header of this image", limits, lambda child: child.read_header(file, formats)
                )
        except DecoderStartError as error:
            log.error("%s", error)
            return OverloadedError(
                "no decoder process starts to read the header of this image: retry", retry_after_ms=_RETRY_MS
            )

    def decode(self, source: Source) -> Pixels | EncoderError:
        """Return the pixels of an image or its error, decoded in a process that has nothing else to do.

        Raises `DecoderStartError` if there is no such process.
        """
        limits = f"{self._cpu_s:g} s of a processor", may_take_bytes(source.header)
        return self._asked(
            f"decoding this {source.header.format}", limits, lambda child: child.decode(source)
        )

    def open_video(self, key: bytes, file: VideoFile) -> VideoInfo | EncoderError:
        """Return what the container of a video says, or its error; it is then open for `read_frames`.

        Raises `DecoderStartError` if there is no process for it.
        """
        return self._asked(
            "opening this video",
            self._limits,
            lambda child: child.open_video(key, file),
            key,
        )

    def read_frames(
        self, source: Source, first: int, second: int, is_wanted: Callable[[], bool] = lambda: True
    ) -> Pixels | EncoderError:
        """Return two frames of a video, upright, uint8 [2, H, W, 3], or their error, as `FileDecoder.read_frames`.

        A process that is on the way to frames that are no longer wanted is ended: they may be minutes away. Raises
        `DecoderStartError` if there is no process for it.
        """

        def read(child: DecoderChild) -> Pixels | EncoderError:
            if child.opened != source.key:
                if source.file is None or (file := source.file()) is None:
                    return UnknownImageError(
                        "the file of this video is no longer kept: submit it, then fetch"
                    )
                opened = child.open_video(source.key, file)
                if isinstance(opened, EncoderError):
                    return opened
            return child.read_frames(source, first, second, is_wanted)

        what = f"decoding frames {first} and {second} of this video"
        return self._asked(what, self._limits, read, source.key)

    @property
    def _limits(self) -> tuple[str, int]:
        """Limits of a video, for messages."""
        return f"{self._cpu_s:g} s of a processor, and {_FRAME_CPU_S:g} s a frame", self._memory_bytes

    @contextmanager
    def _taken(self, video: bytes | None = None) -> Iterator[DecoderChild]:
        """Take a child that is idle, or wait for one; with the key of a `video`, that which has it open, if one has."""
        idle = self._idle if video is None else self._idle_videos
        with self._has_idle:
            while (child := self._next(video)) is None:
                self._has_idle.wait()
            idle.remove(child)
        put_back = idle.append
        try:
            yield child
        except BaseException:
            put_back = idle.appendleft  # its process is being started, or should be
            raise
        finally:
            with self._has_idle:
                put_back(child)
                self._has_idle.notify_all()

    def _next(self, video: bytes | None) -> DecoderChild | None:
        """Return the idle child to take; None if there is none, or the one that has the video open is not idle."""
        if video is None:
            return self._idle[-1] if self._idle else None
        if (child := next((each for each in self._video_children if each.opened == video), None)) is None:
            return self._idle_videos[0] if self._idle_videos else None
        return child if child in self._idle_videos else None

    def _of_all(self, use: Callable[[DecoderChild], Result], video: bytes | None = None) -> list[Result]:
        """Return what `use` makes of each child, once it is idle; with a `video`, of each of those for videos."""
        children = self._children if video is None else self._video_children
        with ExitStack() as stack:
            return [use(child) for child in [stack.enter_context(self._taken(video)) for _ in children]]

    def _asked(
        self,
        what: str,
        limits: tuple[str, int],
        ask: Callable[[DecoderChild], Result],
        video: bytes | None = None,
    ) -> Result | EncoderError:
        """Return what `ask` makes of an idle child, as `_taken`, or the error of an image whose process died."""
        try:
            with self._taken(video) as child:
                return ask(child)
        except DecoderDiedError as died:
            if died.reason == _LEFT:
                return AbandonedError("all callers of the image have left")
            log.warning("a decoder process ended (%s) while %s", died, what)
            return self._error(died.reason, what, *limits)
        except OSError as error:
            if not is_shortage(error):
                raise
            log.warning("short of memory or files while %s", what, exc_info=error)
            return OverloadedError(f"{what} ran short of memory or files", retry_after_ms=_RETRY_MS)

    def _error(self, reason: str, what: str, time: str, memory_bytes: int) -> EncoderError:
        with self._counting:
            self._deaths[reason] += 1
        if reason in ("killed", "stuck"):  # stopped or killed by others, or starved
            return OverloadedError(
                f"the decoder process was ended while {what}: retry", retry_after_ms=_RETRY_MS
            )
        texts = {
            "crashed": f"the decoder crashed while {what}",
            "senseless": f"the decoder broke while {what}",
            "time": f"{what} takes more than {time}",
            "memory": f"{what} takes more memory than {memory_bytes // 1_000_000} MB",
        }
        return UndecodableImageError(texts[reason])
