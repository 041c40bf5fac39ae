"""A budget of memory that parts share, in the order in which they ask."""

import asyncio
from collections import deque
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress

from encoder_contract.errors import ImageLimitError


class Memory:
    """A number of bytes. Not thread-safe: use it from one event loop."""

    def __init__(self, size: int, *, what: str) -> None:
        """`what` ends the message of the error for more bytes than there are: what they are, and their setting."""
        self._size = size
        self._what = what
        self._free = size
        self._waiting: deque[tuple[int, asyncio.Future[None]]] = deque()

    @asynccontextmanager
    async def reserved(self, size: int) -> AsyncIterator[None]:
        """Reserve `size` bytes for the block, once they are free and all earlier callers have theirs.

        Raises `ImageLimitError` for more than there are in all.
        """
        if size > self._size:
            raise ImageLimitError(f"{size} bytes exceed the {self._size} bytes of {self._what}")
        granted = asyncio.get_running_loop().create_future()
        self._waiting.append((size, granted))
        self._grant()
        try:
            await granted
            yield
        finally:
            if granted.cancelled():
                with suppress(ValueError):  # it is no longer in the queue
                    self._waiting.remove((size, granted))
            else:
                self._free += size
            self._grant()

    def _grant(self) -> None:
        while self._waiting and self._waiting[0][0] <= self._free:
            size, granted = self._waiting.popleft()
            if not granted.cancelled():
                self._free -= size
                granted.set_result(None)
