"""The server's end of a decoder process: it asks for pixels, and replaces a process that has died."""

import json
import logging
import os
import signal
import socket
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict
from time import monotonic

import numpy as np

from encoder_contract.errors import EncoderError, InvalidImageError
from encoder_service.image.decoder_parent import ANSWER_S, DecoderParent, Forked
from encoder_service.image.decoder_process import MESSAGE_BYTES, MESSAGE_CHARACTERS
from encoder_service.image.pillow import Pixels
from encoder_service.image.pixel_memory import PixelMemory, needed_bytes
from encoder_service.image.source import Source

log = logging.getLogger(__name__)


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
        """Return a memory that nobody uses and that has room, with its number."""
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
