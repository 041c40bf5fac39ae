"""Tells the index what happens here: changes of a moment go out together, the last word on an address wins."""

import asyncio
from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from enum import Enum

from encoder_contract.geometry import Grid

# Changes are collected for this long: a batch of the ViT ends within it, and nobody notices.
COLLECT_S = 0.001

Tell = Callable[[Sequence[bytes]], Awaitable[None]]
Publish = Callable[[Mapping[bytes, Grid]], Awaitable[None]]


class _Word(Enum):
    GONE = "gone"
    RELEASED = "released"


class Outbox:
    """`held`, `gone` and `released` return at once; a task of its own talks to the index. One event loop's."""

    def __init__(self, *, publish: Publish, retract: Tell, release: Tell) -> None:
        self._publish = publish
        self._retract = retract
        self._release = release
        self._words: dict[bytes, _Word | Grid] = {}  # a grid: it is held
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

    def held(self, address: bytes, grid: Grid) -> None:
        """Say that this replica holds `address`; ends its lease."""
        self._note(address, grid)

    def gone(self, address: bytes) -> None:
        """Say that it no longer holds it."""
        self._note(address, _Word.GONE)

    def released(self, address: bytes) -> None:
        """Say that it will not encode it."""
        self._note(address, _Word.RELEASED)

    def leased(self, addresses: Iterable[bytes]) -> None:
        """Take back that it will not encode `addresses`, where nobody has been told yet."""
        for address in addresses:
            if self._words.get(address) is _Word.RELEASED:
                del self._words[address]

    def _note(self, address: bytes, word: _Word | Grid) -> None:
        self._words[address] = word
        self._changed.set()

    async def _run(self) -> None:
        while True:
            await self._changed.wait()
            await asyncio.sleep(COLLECT_S)
            await self._say()

    async def _say(self) -> None:
        words, self._words = self._words, {}
        self._changed.clear()
        said = {word: [a for a, last in words.items() if last is word] for word in _Word}
        if said[_Word.GONE]:
            await self._retract(said[_Word.GONE])
        # What came and went before anyone was told still has its lease.
        if ended := said[_Word.GONE] + said[_Word.RELEASED]:
            await self._release(ended)
        if held := {address: last for address, last in words.items() if isinstance(last, Grid)}:
            await self._publish(held)
