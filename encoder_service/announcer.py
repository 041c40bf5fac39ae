"""Tells the index what this replica holds: changes of a moment go out together, the last word on an address wins."""

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from contextlib import suppress

# Changes are collected for this long: a batch of the ViT ends within it, and nobody notices.
COLLECT_S = 0.001

Tell = Callable[[Sequence[bytes]], Awaitable[None]]


class Announcer:
    """`held` and `gone` return at once; a task of its own talks to the index. Belongs to the event loop."""

    def __init__(self, publish: Tell, retract: Tell) -> None:
        self._publish = publish
        self._retract = retract
        self._changes: dict[bytes, bool] = {}
        self._changed = asyncio.Event()
        self._task: asyncio.Task[None] | None = None

    def start(self) -> None:
        """Begin to talk."""
        self._task = asyncio.create_task(self._run(), name="announcer")

    async def stop(self) -> None:
        """Say what is left, and stop."""
        if self._task is not None:
            self._task.cancel()
            with suppress(asyncio.CancelledError):
                await self._task
        await self._say()

    def held(self, address: bytes) -> None:
        """Say that this replica holds `address` now."""
        self._changes[address] = True
        self._changed.set()

    def gone(self, address: bytes) -> None:
        """Say that it no longer does."""
        self._changes[address] = False
        self._changed.set()

    async def _run(self) -> None:
        while True:
            await self._changed.wait()
            await asyncio.sleep(COLLECT_S)
            await self._say()

    async def _say(self) -> None:
        changes, self._changes = self._changes, {}
        self._changed.clear()
        held = [address for address, is_held in changes.items() if is_held]
        gone = [address for address, is_held in changes.items() if not is_held]
        if gone:
            await self._retract(gone)
        if held:
            await self._publish(held)
