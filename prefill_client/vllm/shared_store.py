"""The store that engines share, asked and told on a thread with an event loop of its own: the scheduler never waits."""

import asyncio
import logging
import os
import threading
from collections import deque
from collections.abc import Coroutine, Iterator
from dataclasses import dataclass
from typing import Any

from encoder_contract.errors import EncoderError, InternalError
from prefill_client.blocking import LoopThread
from prefill_client.images import PutAnswer
from prefill_client.vllm.host_memory import RECORD, Extent, HostMemory
from prefill_client.vllm.store_session import Asked, Found, StoreSession

_log = logging.getLogger("vllm.encoder_service")
# Records read at a time; a read never gives a part of one, since they are written whole.
_RECORDS = 256


@dataclass(frozen=True, slots=True)
class Sent:
    """The rows of the save with this number have been put, or not."""

    number: int
    error: EncoderError | None = None


class SharedStore:
    """For one thread. Every `ask` ends in one `Found`, every `expect` in one `Sent`."""

    def __init__(self, session: StoreSession, outgoing: HostMemory) -> None:
        """Join the store, if it is there. Raises `ValueError` for one that cannot take this engine's rows."""
        self._session = session
        self._outgoing = outgoing
        self._tasks: set[asyncio.Task[None]] = set()  # of the loop's thread
        self._expected: dict[int, tuple[PutAnswer, tuple[Extent, ...]]] = {}
        self._found: deque[Found] = deque()
        self._sent: deque[Sent] = deque()
        self._any_found = threading.Event()
        self._saved, self._pipe = os.pipe2(os.O_CLOEXEC | os.O_NONBLOCK)
        self.pipe = f"/proc/{os.getpid()}/fd/{self._pipe}"
        """Where a worker says that the rows of a save are in the outgoing memory."""
        self._loop = LoopThread("shared-store")
        try:
            self._loop.run(self._open())
        except BaseException:  # Ctrl-C too: nobody else would end the thread
            self._stop()
            raise

    @property
    def alone(self) -> bool:
        """Whether the store is gone, as far as is known: then nothing is asked of it."""
        return self._session.alone

    def ask(self, asked: Asked) -> None:
        """Begin to find out who makes an image's rows. Its extents are in use until that is found."""
        self._loop.call(self._begin, self._find(asked))

    def give_up(self, asked: Asked) -> None:
        """Nobody waits for it any more; what is found still comes."""
        self._loop.call(asked.give_up)

    def give_back(self, lease: PutAnswer) -> None:
        """No rows will come for it: somebody else may make them."""
        self._loop.call(self._begin, self._session.abandon(lease))

    def expect(self, number: int, lease: PutAnswer, extents: tuple[Extent, ...]) -> None:
        """Put the rows of a save as soon as the pipe says that they are in `extents` of the outgoing memory."""
        self._expected[number] = lease, extents

    def found(self) -> Iterator[Found]:
        """Yield what was found since the last time."""
        self._any_found.clear()
        while self._found:
            yield self._found.popleft()

    def sent(self) -> Iterator[Sent]:
        """Yield what was put since the last time."""
        while self._sent:
            yield self._sent.popleft()

    def wait(self, timeout_s: float) -> None:
        """Return when something was found that `found` has not told, or after so long."""
        self._any_found.wait(timeout_s)

    def close(self) -> None:
        """End everything, and with it every lease."""
        self._stop(self._close())

    async def _open(self) -> None:
        await self._session.start()
        asyncio.get_running_loop().add_reader(self._saved, self._read_saved)

    def _begin(self, work: Coroutine[Any, Any, None]) -> None:
        task = asyncio.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _find(self, asked: Asked) -> None:
        self._found.append(await self._session.find(asked))
        self._any_found.set()

    def _read_saved(self) -> None:
        for number, copied in RECORD.iter_unpack(os.read(self._saved, _RECORDS * RECORD.size)):
            self._begin(self._put(number, copied=copied))

    async def _put(self, number: int, *, copied: bool) -> None:
        lease, extents = self._expected.pop(number)
        error: EncoderError | None = InternalError("the worker could not copy the rows")
        try:
            if copied:
                error = await self._session.put(lease, self._outgoing.read(extents))
            else:
                await self._session.abandon(lease)
        except Exception as raised:  # noqa: BLE001 - whatever it is, its extents are free
            _log.exception("the rows of an image cannot be put")
            error = InternalError(f"{type(raised).__name__}: {raised}")
            self._begin(self._session.abandon(lease))
        self._sent.append(Sent(number, error))

    async def _close(self) -> None:
        asyncio.get_running_loop().remove_reader(self._saved)
        tasks = list(self._tasks)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        await self._session.close()

    def _stop(self, last: Coroutine[Any, Any, None] | None = None) -> None:
        self._loop.stop(last)
        os.close(self._saved)
        os.close(self._pipe)
