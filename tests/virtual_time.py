"""An event loop whose clock jumps to the next timer as soon as nothing is left to do: waits take no time."""

import asyncio
import selectors
from collections.abc import Callable
from concurrent.futures import Executor
from typing import Any

POLL_S = 0.001
PASS_S = 1e-6
"""What a pass of the loop takes: without it, a timer that is set again for now would stop the clock."""


class _JumpingSelector(selectors.DefaultSelector):
    """Polls the sockets, and moves the clock where another selector would wait."""

    now_s = 0.0
    threads = 0

    def select(self, timeout: float | None = None) -> list[tuple[selectors.SelectorKey, int]]:
        self.now_s += PASS_S
        if (events := super().select(0)) or timeout == 0:
            return events
        if timeout is None or self.threads:  # only another thread can go on
            return super().select(POLL_S)
        self.now_s += timeout
        return []


class VirtualTimeLoop(asyncio.SelectorEventLoop):
    """Use with `asyncio.Runner(loop_factory=VirtualTimeLoop)`. Time stands while a thread of `to_thread` works."""

    def __init__(self) -> None:
        self._jumping = _JumpingSelector()
        super().__init__(self._jumping)

    def time(self) -> float:
        """Return the virtual time, seconds."""
        return self._jumping.now_s

    def run_in_executor(
        self, executor: Executor | None, func: Callable[..., Any], *args: Any
    ) -> "asyncio.Future[Any]":
        """Run a function on a thread."""
        self._jumping.threads += 1
        future = super().run_in_executor(executor, func, *args)
        future.add_done_callback(self._joined)
        return future

    def _joined(self, _: object) -> None:
        self._jumping.threads -= 1
