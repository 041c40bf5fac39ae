"""An event loop in a thread of its own, to which other threads hand work."""

import asyncio
import threading
from collections.abc import Callable, Coroutine
from concurrent.futures import CancelledError
from typing import Any, TypeVar, TypeVarTuple

from encoder_contract.errors import UnavailableError

Result = TypeVar("Result")
Arguments = TypeVarTuple("Arguments")


class LoopThread:
    """Runs from construction until `stop`; a daemon: it does not keep the process alive."""

    def __init__(self, name: str) -> None:
        self._loop = asyncio.new_event_loop()
        self._lock = threading.Lock()
        self._stopped = False
        self._thread = threading.Thread(target=self._loop.run_forever, name=name, daemon=True)
        self._thread.start()

    def run(self, work: Coroutine[Any, Any, Result]) -> Result:
        """Run `work` on the loop and return its result; a caller that is interrupted cancels it.

        Raises `UnavailableError` once the loop was told to stop.
        """
        with self._lock:  # no work may be handed to a loop that has stopped
            if self._stopped:
                work.close()
                raise UnavailableError("the client is closed")
            future = asyncio.run_coroutine_threadsafe(work, self._loop)
        try:
            return future.result()
        except CancelledError:
            raise UnavailableError("the client was closed") from None
        except BaseException:  # Ctrl-C in this thread; after an error of the work itself, this does nothing
            future.cancel()
            raise

    def call(self, call: Callable[[*Arguments], object], *arguments: *Arguments) -> None:
        """Make a call on the loop, and do not wait for it."""
        self._loop.call_soon_threadsafe(call, *arguments)

    def stop(self, last: Coroutine[Any, Any, None] | None = None) -> None:
        """Do `last`, cancel what runs, and end the thread; a second time does nothing."""
        with self._lock:
            if self._stopped:
                if last is not None:
                    last.close()
                return
            self._stopped = True
            ended = asyncio.run_coroutine_threadsafe(_end(last), self._loop)
        try:
            ended.result()
        finally:
            self._loop.call_soon_threadsafe(self._loop.stop)
            self._thread.join()
            self._loop.close()


async def _end(last: Coroutine[Any, Any, None] | None) -> None:
    """Do `last`, then, even if that failed, cancel every other task of the loop: threads wait for them."""
    try:
        if last is not None:
            await last
    finally:
        others = asyncio.all_tasks() - {asyncio.current_task()}
        for task in others:
            task.cancel()
        await asyncio.gather(*others, return_exceptions=True)
        loop = asyncio.get_running_loop()
        await loop.shutdown_asyncgens()
        await loop.shutdown_default_executor()
