"""Decoding in processes of their own: a malicious file can fail only itself.

`IsolatedDecoder` gives images to the processes. A `DecoderChild` is the server's end of one: it asks for pixels, and
replaces a process that has died. `DecoderParent` is the server's end of the process that forks and reaps the children.
`PixelMemory` is shared with a child: files go in, pixels come out, and nothing is copied to be read.
"""

import fcntl
import json
import logging
import mmap
import os
import signal
import socket
import subprocess
import sys
import threading
import time
import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import asdict, dataclass
from itertools import count
from queue import LifoQueue
from time import monotonic
from typing import Any, Literal

import numpy as np
import PIL
import torch
from torch import Tensor

from encoder_contract.errors import EncoderError, InvalidImageError, OverloadedError, UndecodableImageError
from encoder_service.image.decoder import BATCHED_BYTES_PER_PIXEL, DECODE_PIXELS, MAX_BATCHED_PIXELS, Decoder
from encoder_service.image.decoder_process import MESSAGE_BYTES, MESSAGE_CHARACTERS
from encoder_service.image.pillow import PILLOW_BYTES_PER_PIXEL, Pixels, is_shortage
from encoder_service.image.source import Source

log = logging.getLogger(__name__)

# It is loaded in a second or two, on a busy machine in ten; one that does not answer for so long never will.
ANSWER_S = 60.0
_PROGRAM = "import sys; sys.path[:] = {path!r}; from {module} import main; main({descriptor}, **{settings!r})"
_MODULE = "encoder_service.image.decoder_process"
# The environment of these processes, and no more of the server's, which has passwords in it.
# glibc's settings: memory that was freed is used again, as in the server, but no more than this is kept. And numpy
# starts no threads, which a fork would lose.
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


@dataclass(eq=False, slots=True)
class _Process:
    control: socket.socket
    end: Callable[[], object]
    hello: dict[str, Any] | None = None


@dataclass(frozen=True, slots=True)
class Forked:
    """A child: its pid, our end of its socket, and which parent it is of."""

    pid: int
    channel: socket.socket
    parent: object


class DecoderParent:
    """Starts at construction, and again whenever it has died. Thread-safe; callers wait only when they need it."""

    def __init__(self, **settings: Any) -> None:
        """`settings` are the arguments of `decoder_process.main`."""
        self.printed = Printed()
        self._settings = settings
        self._lock = threading.Lock()
        self._running: _Process | None = self._launch()

    def hello(self) -> dict[str, Any]:
        """Wait until it is loaded; return what it says of itself. Raises `DecoderStartError` if it does not start."""
        with self._lock:
            try:
                return self._ready().hello or {}
            except OSError as error:
                self._end()
                raise self.start_error() from error

    def fork(self, *, batches: bool, memory_bytes: int) -> Forked:
        """Have it fork a child that may take so much memory. Raises `DecoderStartError` if it cannot."""
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        with theirs, self._lock:
            answer = self._ask({"fork": batches, "memory_bytes": memory_bytes}, [theirs.fileno()])
            return Forked(answer["pid"], ours, self._running)

    def reap(self, child: Forked) -> int | None:
        """Kill a child if it still lives; return its wait status, None if its parent died and took it along."""
        with self._lock:
            if self._running is not child.parent or self._running is None:
                return None
            try:
                return int(self._ask_once(self._running, {"reap": child.pid}, [])["status"])
            except OSError:
                self._end()  # an answer that comes late would be taken for that of the next question
                return None

    def close(self) -> None:
        """End it and its children; the next `fork` starts another."""
        with self._lock:
            self._end()

    def start_error(self) -> DecoderStartError:
        """Return the error of a process that ended before it was ready, with the last line that it printed."""
        self.printed.read()
        return DecoderStartError(f"no decoder process starts; the last one printed: {self.printed.end}")

    # Inside, with the lock held

    def _ask(self, command: dict[str, Any], descriptors: Sequence[int]) -> dict[str, Any]:
        """Ask it; if it has died, start another and ask that."""
        for _ in range(2):
            try:
                return self._ask_once(self._ready(), command, descriptors)
            except OSError as error:
                log.warning("the parent of the decoder processes has died and is started again: %s", error)
                self._end()
        raise self.start_error()

    @staticmethod
    def _ask_once(running: _Process, command: dict[str, Any], descriptors: Sequence[int]) -> dict[str, Any]:
        socket.send_fds(running.control, [json.dumps(command).encode()], descriptors)
        return _answer(running.control)

    def _ready(self) -> _Process:
        if self._running is None:
            self._running = self._launch()
        if self._running.hello is None:
            self._running.hello = _answer(self._running.control)
        return self._running

    def _launch(self) -> _Process:
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        with theirs:
            program = _PROGRAM.format(
                path=sys.path, module=_MODULE, descriptor=theirs.fileno(), settings=self._settings
            )
            process = subprocess.Popen(  # noqa: S603 - our own interpreter and module
                [sys.executable, "-c", program],
                pass_fds=[theirs.fileno()],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                stderr=self.printed.writer,
                env={**SETTINGS, **{name: os.environ[name] for name in PASSED_ON if name in os.environ}},
                start_new_session=True,  # Ctrl-C in our terminal is for us alone
            )
        ours.settimeout(ANSWER_S)
        return _Process(ours, weakref.finalize(self, _end, process, ours))

    def _end(self) -> None:
        if self._running is not None:
            self._running.end()
            self._running = None


def _end(process: "subprocess.Popen[bytes]", control: socket.socket) -> None:
    control.close()
    process.kill()
    process.wait()


def _answer(control: socket.socket) -> dict[str, Any]:
    answer = control.recv(MESSAGE_BYTES)
    if not answer:
        raise ConnectionError("it has ended")
    return dict(json.loads(answer))


# A child that could shrink the memory could have the server killed by SIGBUS.
_SEALS = fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL
# Where more than this was used, it is given back once the pixels are no longer in use.
_KEPT_BYTES = 64 << 20
_SMALLEST_BYTES, _ALIGNED = 1 << 20, 64


class PixelMemory:
    """A piece of memory, used for one request at a time.

    `descriptor` is open until `close_descriptor`, or until nobody has this memory any more.
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

    def put(self, sources: Sequence[Source]) -> list[tuple[int, int]]:
        """Write the files; return for each where it begins, and where its pixels are to go."""
        places = layout(sources)
        for source, (begin, _) in zip(sources, places, strict=True):
            self._bytes[begin : begin + len(source.data)] = source.data
        return places

    def lend(self, source: Source, begin: int) -> Pixels:
        """Return the pixels that begin there, uint8 [H, W, 3]: this memory's for as long as the array is used."""
        width, height = source.header.upright
        pixels = np.frombuffer(self._bytes, np.uint8, 3 * width * height, begin).reshape(height, width, 3)
        number = next(self._numbers)
        self._lent.add(number)
        weakref.finalize(pixels, self._returned, number).atexit = False
        return pixels

    def _returned(self, number: int) -> None:
        # Emptied before it counts as free: from then on another request may be in it.
        if self._lent == {number} and self.size > _KEPT_BYTES:
            self._bytes.madvise(mmap.MADV_REMOVE)
        self._lent.discard(number)


def layout(sources: Sequence[Source]) -> list[tuple[int, int]]:
    """Return for each file where it begins in a memory, and where its pixels do."""
    end, places = 0, []
    for source in sources:
        begin, out = end, _up(end + len(source.data), _ALIGNED)
        end = _up(out + 3 * source.header.pixels, _ALIGNED)
        places.append((begin, out))
    return places


def needed_bytes(sources: Sequence[Source]) -> int:
    """Return the size of a memory that has room for files and their pixels: a power of two."""
    _, out = layout(sources)[-1]
    needed = out + 3 * sources[-1].header.pixels
    return max(_SMALLEST_BYTES, 1 << (needed - 1).bit_length())


def _up(size: int, step: int) -> int:
    return -(-size // step) * step


# How often a child that has not answered is looked at. One that has used less than so much of a processor in so many
# seconds of waiting for it hangs: the busiest machine gives it more.
_LOOK_S, _SOONEST_LOOK_S = 0.5, 0.01
_HANGING_CPU_S, _HANGING_S = 0.01, 5.0
_CPU_CLOCK = 2  # of <linux/posix-timers.h>: CPUCLOCK_SCHED of a process


class DecoderDiedError(Exception):
    """A child died, for one of `DEATHS`, and its files have no outcome. There is another child already."""

    def __init__(self, reason: str) -> None:
        super().__init__(reason)
        self.reason = reason


class DecoderChild:
    """One child; used by one thread at a time.

    `batches`: it decodes JPEGs with DALI, else any file with Pillow. It may take `memory_bytes`, and for
    a request `cpu_s` of a processor and `wall_s`. `on_death` is called with the reason.
    """

    def __init__(
        self,
        parent: DecoderParent,
        on_death: Callable[[str], None],
        *,
        batches: bool,
        memory_bytes: int,
        cpu_s: float,
        wall_s: float,
    ) -> None:
        self._parent = parent
        self._on_death = on_death
        self._batches = batches
        self._memory_bytes = memory_bytes
        self._cpu_s = cpu_s
        self._wall_s = wall_s
        self._forked: Forked | None = None
        self._memories: list[PixelMemory] = []
        self.sandbox: tuple[str, ...] = ()

    def start(self) -> Forked:
        """Fork it, unless there is one. Raises `DecoderStartError` if that fails, `OSError` if there is no memory."""
        if self._forked is None:
            # Two: while the pixels of one request are in use, the next can be answered. They cost nothing until they
            # are used, and all descriptors that a child takes are taken here: a long day takes no more.
            memories = [PixelMemory(), PixelMemory()]
            forked = self._parent.fork(batches=self._batches, memory_bytes=self._memory_bytes)
            forked.channel.settimeout(ANSWER_S)
            try:
                hello = forked.channel.recv(MESSAGE_BYTES)
            except OSError:
                hello = b""
            if not hello:
                forked.channel.close()
                self._parent.reap(forked)
                raise self._parent.start_error()
            self.sandbox = tuple(json.loads(hello)["sandbox"])
            self._forked, self._memories = forked, memories
        return self._forked

    def decode(self, sources: Sequence[Source]) -> list[Pixels | EncoderError | None]:
        """Return the pixels of each file, upright, or its error; None for a file that DALI refuses.

        Raises `DecoderDiedError`, and `OSError` if there is no memory or descriptor for it. The pixels live as long as
        the arrays.
        """
        forked = self.start()
        number, memory = self._room(sources)
        places = memory.put(sources)
        files = [
            {"header": asdict(source.header), "begin": begin, "size": len(source.data), "out": out}
            for source, (begin, out) in zip(sources, places, strict=True)
        ]
        request = json.dumps({"memory": number, "size": memory.size, "files": files}).encode()
        try:
            began_s = _cpu_s(forked.pid)
            forked.channel.settimeout(self._wall_s)
            socket.send_fds(forked.channel, [request], [memory.descriptor] if memory.is_new else [])
            memory.close_descriptor()
            reply = self._reply(forked, began_s)
        except TimeoutError as late:
            raise self._died(str(late), sources) from None
        except (ConnectionError, ProcessLookupError):
            reply = b""
        self._parent.printed.read()
        if not reply:
            raise self._died("", sources)
        said = _parsed(reply, len(sources))
        if said is None or (None in said and not self._batches):  # Pillow refuses nothing
            raise self._died("senseless", sources)
        if any(isinstance(each, tuple) and each[1] for each in said):
            raise self._died("memory", sources)
        outcomes: list[Pixels | EncoderError | None] = [
            InvalidImageError(each[0])
            if isinstance(each, tuple)
            else memory.lend(source, out)
            if each
            else None
            for each, source, (_, out) in zip(said, sources, places, strict=True)
        ]
        if self._memories[1 - number].is_free:
            return outcomes
        return [each.copy() if isinstance(each, np.ndarray) else each for each in outcomes]

    def end(self) -> None:
        """End it; the next use forks another."""
        if self._forked is not None:
            self._forked.channel.close()
            self._parent.reap(self._forked)
            self._forked = None

    def _reply(self, forked: Forked, began_s: float) -> bytes:
        """Return what the child answers, empty if it died. Raises `TimeoutError` with the reason to end it.

        It is watched from here: what runs inside it, once an attacker's, may stop any timer of its own.
        """
        ends_at = monotonic() + self._wall_s
        idle_s, seen_s, used_s = 0.0, 0.0, 0.0
        while True:
            look_s = min(_LOOK_S, max(self._cpu_s - used_s, _SOONEST_LOOK_S))
            forked.channel.settimeout(look_s)
            try:
                return forked.channel.recv(MESSAGE_BYTES)
            except TimeoutError:
                used_s = _cpu_s(forked.pid) - began_s
            if used_s > self._cpu_s:
                raise TimeoutError("time")
            idle_s += look_s
            if used_s - seen_s > _HANGING_CPU_S:
                idle_s, seen_s = 0.0, used_s
            if idle_s >= _HANGING_S or monotonic() > ends_at:
                raise TimeoutError("stuck")

    def _room(self, sources: Sequence[Source]) -> tuple[int, PixelMemory]:
        """Return an unused memory that has room, with its number."""
        number = next(n for n, each in enumerate(self._memories) if each.is_free)
        if self._memories[number].size < (needed := needed_bytes(sources)):
            self._memories[number] = PixelMemory(needed)
        return number, self._memories[number]

    def _died(self, reason: str, sources: Sequence[Source]) -> DecoderDiedError:
        """Reap it, fork another, and return what it died of: what its end says unless a reason is given."""
        assert self._forked is not None
        status = self._parent.reap(self._forked)
        self._forked.channel.close()
        self._forked = None
        reason = reason or _reason(status)
        log.warning(
            "a decoder process ended (%s, status %s) over %s",
            reason,
            status,
            [each.header for each in sources],
        )
        self._on_death(reason)
        self.start()
        return DecoderDiedError(reason)


def _cpu_s(pid: int) -> float:
    """Return the processor time that a process has used, seconds. Raises `ProcessLookupError` if it is gone."""
    try:
        return time.clock_gettime(~pid << 3 | _CPU_CLOCK)
    except OSError as error:
        raise ProcessLookupError(f"process {pid} is gone") from error


def _reason(status: int | None) -> str:
    """Return what a child died of by itself, by its wait status; None if its parent's end was its end."""
    number = os.WTERMSIG(status) if status is not None else signal.SIGKILL
    return "killed" if number == signal.SIGKILL else "crashed"


def _parsed(reply: bytes, count: int) -> list[bool | tuple[str, bool] | None] | None:
    """Return what a child says of each of `count` files, None if it makes no sense: it may be an attacker's by now."""
    try:
        said = json.loads(reply)
    except ValueError:
        return None
    if not isinstance(said, list) or len(said) != count:
        return None
    found: list[bool | tuple[str, bool] | None] = []
    for each in said:
        if each is None or each is True:
            found.append(each)
        elif isinstance(each, list) and [type(part) for part in each] == [str, bool]:
            text = "".join(letter if letter.isprintable() else "?" for letter in each[0])
            found.append((text[:MESSAGE_CHARACTERS], each[1]))
        else:
            return None
    return found


# What a child may take beside pixels: the file, copies of it without metadata, and what its libraries keep.
_BESIDE_PIXELS_BYTES = 256 << 20
# Of the clock, for each second of a processor: it shares those with the vision tower.
_WALL_PER_CPU, _WALL_S = 3.0, 3.0
_RETRY_MS = 500
_BATCH = 32  # images in a request

_TEXTS = {
    "crashed": "the decoder crashed on this {format}",
    "senseless": "the decoder broke on this {format}",
    "time": "decoding this {format} takes more than {cpu_s:g} s of a processor",
    "memory": "decoding this {format} takes more memory than {megabytes} MB",
}


class IsolatedDecoder(Decoder):
    """A `Decoder` that decodes on the CPU, in one child for batches (DALI) and `threads` for single images (Pillow).

    `device` is where the pixels go then. A child that dies is replaced at once. An image that was alone in it has an
    error: `UndecodableImageError` if it is to blame, else `OverloadedError`; the images of a batch are left to
    `decode_one`. `deaths` counts them by reason.

    It starts in the background; `start` waits for that. `cpu_s` is the processor time that a request may take.
    """

    def __init__(
        self,
        device: str = "cpu",
        *,
        threads: int = 4,
        backend: Literal["auto", "dali", "pillow"] = "auto",
        max_image_pixels: int = 100_000_000,
        decode_pixels: int = DECODE_PIXELS,
        cpu_s: float = 20.0,
    ) -> None:
        super().__init__(device, threads=threads, backend="pillow", max_image_pixels=max_image_pixels)
        self._counting = threading.Lock()
        self._backend = backend
        self._dali = ""  # its version, known once it is loaded
        self._max_batched_pixels = MAX_BATCHED_PIXELS
        self._cpu_s = cpu_s
        self._memory_bytes = _BESIDE_PIXELS_BYTES + PILLOW_BYTES_PER_PIXEL * max_image_pixels
        in_batch = _BESIDE_PIXELS_BYTES + BATCHED_BYTES_PER_PIXEL * max(decode_pixels, MAX_BATCHED_PIXELS)
        self._parent = DecoderParent(dali=backend == "dali", threads=threads)
        # A thread that takes a child out of its queue has it alone. The last one used is the next: its memory is warm.
        self._batch_child = self._queue_of(1, batches=True, memory_bytes=in_batch)
        self._single_children = self._queue_of(threads, batches=False, memory_bytes=self._memory_bytes)

    @property
    def _has_dali(self) -> bool:
        return bool(self._dali)

    @property
    def messages(self) -> int:
        """Lines that the processes have printed to standard error; they are thrown away."""
        self._parent.printed.read()
        return self._parent.printed.lines

    def start(self) -> None:
        """Wait until it is there; `name` then says what decodes, and what the kernel enforces.

        Raises `ValueError` if DALI was asked for and is not installed, `DecoderStartError` if no process starts.
        """
        dali = self._parent.hello()["dali"]
        if self._backend == "dali" and not dali:
            raise ValueError("the DALI decoder is not installed")
        self._dali = dali
        with ExitStack() as stack:
            # All of them now: no image waits for a fork, and what they take does not grow as the day goes on.
            for child in self._children(stack, self._single_children, *([self._batch_child] if dali else [])):
                child.start()
            enforced = ", ".join(child.sandbox)
        if not enforced:
            log.warning(
                "this kernel has neither Landlock nor seccomp: decoder processes can open files and sockets"
            )
        names = [f"DALI {dali} (cpu)"] if dali else []
        self.name = ", ".join([*names, f"Pillow {PIL.__version__}"])
        self.name += f" in processes of their own ({enforced or 'not confined'})"

    def decode_one(self, source: Source) -> Tensor | EncoderError:
        """Return the pixels of an image or its error, decoded by Pillow in a process that has nothing else to do.

        Raises `RuntimeError` if there is no such process, or the device does not take the pixels.
        """
        try:
            with _taken(self._single_children) as child:
                (found,) = child.decode([source])
        except DecoderDiedError as died:
            return self._error(died.reason, source)
        except OSError as error:
            if not is_shortage(error):
                raise
            log.warning("short of memory or files while decoding %s", source.header, exc_info=error)
            return OverloadedError("decoding ran short of memory or files", retry_after_ms=_RETRY_MS)
        assert found is not None, "the child vouches for it"
        return found if isinstance(found, EncoderError) else self._tensor(found)

    def close(self) -> None:
        """End all processes, each once it is done with its request; a further use starts them again."""
        with ExitStack() as stack:
            for child in self._children(stack, self._single_children, self._batch_child):
                child.end()
            self._parent.close()

    @staticmethod
    def _children(stack: ExitStack, *queues: "LifoQueue[DecoderChild]") -> list[DecoderChild]:
        """Take all of some queues, for as long as the stack is open; each is waited for."""
        return [stack.enter_context(_taken(queue)) for queue in queues for _ in range(queue.maxsize)]

    def _queue_of(self, count: int, *, batches: bool, memory_bytes: int) -> "LifoQueue[DecoderChild]":
        children: LifoQueue[DecoderChild] = LifoQueue(count)
        wall_s = _WALL_S + _WALL_PER_CPU * self._cpu_s
        for _ in range(count):
            children.put(
                DecoderChild(
                    self._parent,
                    self._died,
                    batches=batches,
                    memory_bytes=memory_bytes,
                    cpu_s=self._cpu_s,
                    wall_s=wall_s,
                )
            )
        return children

    def _try(self, sources: Sequence[Source]) -> Sequence[Tensor | None]:
        found: list[Tensor | None] = []
        for first in range(0, len(sources), _BATCH):
            batch = sources[first : first + _BATCH]
            try:
                with _taken(self._batch_child) as child:
                    decoded = child.decode(batch)
            except (DecoderDiedError, OSError):  # whichever it was, it is told of each by itself
                decoded = [None] * len(batch)
            found += [self._tensor(each) if isinstance(each, np.ndarray) else None for each in decoded]
        return found

    def _tensor(self, pixels: Pixels) -> Tensor:
        return torch.from_numpy(pixels).to(self._torch_device)

    def _died(self, reason: str) -> None:
        with self._counting:
            self.deaths[reason] += 1

    def _error(self, reason: str, source: Source) -> EncoderError:
        text = _TEXTS.get(reason)
        if text is None:  # stopped or killed by others, or starved
            return OverloadedError(
                "the decoder process was ended while it decoded the image: retry", retry_after_ms=_RETRY_MS
            )
        return UndecodableImageError(
            text.format(
                format=source.header.format, cpu_s=self._cpu_s, megabytes=self._memory_bytes // 1_000_000
            )
        )


@contextmanager
def _taken(children: "LifoQueue[DecoderChild]") -> Iterator[DecoderChild]:
    child = children.get()
    try:
        yield child
    finally:
        children.put(child)
