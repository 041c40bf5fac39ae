"""The server's end of the parent of decoder processes: it starts it, and has it fork and reap children."""

import json
import logging
import os
import socket
import subprocess
import sys
import threading
import weakref
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

from encoder_service.image.decoder_process import MESSAGE_BYTES

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

    They write to a pipe that is read after each request, and lose what does not fit into it: nobody waits.
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
    """Starts at once, and again whenever it has died. Thread-safe; nobody waits for it before it is needed."""

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
