"""Validation: the checks on an image's bytes and grid before anything else is done with them."""

import asyncio
from collections import OrderedDict, deque
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from functools import partial
from time import monotonic
from typing import TypeVar

from encoder_contract.digest import content_digest
from encoder_contract.errors import DigestMismatchError, InvalidRequestError
from encoder_contract.geometry import Geometry, Grid
from encoder_contract.header import FORMATS, check_limits, read_header
from encoder_service.address import ImageKey
from encoder_service.image.source import Source

# Hashing this much and reading its header cost less than a hand-off to a thread; only a compressed text chunk costs
# more, and that under a millisecond. Larger files go to a worker thread.
ON_LOOP_BYTES = 4 << 10
# Two: hashing releases the GIL and reading a header does not, so more threads would only take turns. A pool of its
# own, so that no other blocking work delays validation.
THREADS = 2


T = TypeVar("T")


class ThreadTurns:
    """A few threads for short work; callers take turns, however much each of them asks for.

    Belongs to one event loop. A caller waits for the work that has a thread, and for one piece of each other caller.
    """

    def __init__(self, threads: int, name: str) -> None:
        self._free = threads
        self._threads = ThreadPoolExecutor(threads, thread_name_prefix=name)
        self._waiting: OrderedDict[str, deque[asyncio.Future[None]]] = OrderedDict()

    async def run(self, caller: str, work: Callable[[], T]) -> T:
        """Return what `work` does on a thread. Work that has begun goes on when the call is cancelled."""
        loop = asyncio.get_running_loop()
        if not self._free:
            turn: asyncio.Future[None] = loop.create_future()
            self._waiting.setdefault(caller, deque()).append(turn)
            try:
                await turn
            except asyncio.CancelledError:
                if turn.done() and not turn.cancelled():  # its thread is free again
                    self._give_back()
                raise
        else:
            self._free -= 1
        running = self._threads.submit(work)
        running.add_done_callback(partial(self._ended, loop))
        return await asyncio.wrap_future(running)

    def _ended(self, loop: asyncio.AbstractEventLoop, _work: "Future[T]") -> None:
        with suppress(RuntimeError):  # the loop was closed
            loop.call_soon_threadsafe(self._give_back)

    def _give_back(self) -> None:
        """Give a thread to the caller whose turn it is."""
        while self._waiting:
            caller, turns = self._waiting.popitem(last=False)
            turn = turns.popleft()
            if turns:
                self._waiting[caller] = turns  # behind the others
            if not turn.done():  # else it was cancelled
                turn.set_result(None)
                return
        self._free += 1


class Validator:
    """Checks bytes against their digest and the limits without decoding pixels. Used from the event loop."""

    def __init__(
        self,
        geometry: Geometry,
        *,
        max_image_bytes: int,
        max_image_pixels: int,
        formats: Sequence[str] = FORMATS,
        on_hash: Callable[[float], None] = lambda _seconds: None,
    ) -> None:
        """`on_hash` is called with the seconds that hashing an image took."""
        self.geometry = geometry
        self._max_image_bytes = max_image_bytes
        self._max_image_pixels = max_image_pixels
        self._formats = formats
        self._on_hash = on_hash
        self._threads = ThreadTurns(THREADS, "validation")

    async def take(self, key: ImageKey, data: bytes, caller: str) -> Source:
        """Return `data` as a source if it has the digest of `key` and is within the limits.

        `caller` is who sent it: callers take turns. Raises `DigestMismatchError`, `InvalidImageError` or
        `ImageLimitError`.
        """
        if len(data) <= ON_LOOP_BYTES:
            return self._take(key, data)
        return await self._threads.run(caller, partial(self._take, key, data))

    def _take(self, key: ImageKey, data: bytes) -> Source:
        began = monotonic()
        digest = content_digest(data)
        self._on_hash(monotonic() - began)
        if digest != key.digest:
            raise DigestMismatchError(f"the bytes hash to {digest.hex()}, not to {key.digest.hex()}")
        header = read_header(data, self._formats)
        check_limits(
            header,
            len(data),
            max_image_bytes=self._max_image_bytes,
            max_image_pixels=self._max_image_pixels,
        )
        return Source(key.source_key, data, header)

    def check_name(self, key: ImageKey, claimed: Grid | None) -> None:
        """Raise `ImageLimitError` for a variant, `InvalidRequestError` for a grid, that no image can have."""
        geometry = self.geometry.variant(min_pixels=key.min_pixels, max_pixels=key.max_pixels)
        if claimed is not None and not geometry.has(claimed):
            raise InvalidRequestError(f"the caller computed grid {tuple(claimed)}, which no image can have")

    def agreed(self, said: Iterable[Grid], claimed: Grid | None) -> Grid | None:
        """Return the first grid in `said` (by the index) that agrees with the caller; None: read it from the bytes.

        `said` neither confirms a grid that no image can have nor refutes what the caller computed.
        """
        return next((grid for grid in said if self.geometry.has(grid) and claimed in (None, grid)), None)

    def grid(self, key: ImageKey, source: Source, claimed: Grid | None = None) -> Grid:
        """Return the grid of an image with this source, in the variant of its key.

        Raises `ImageLimitError`, or `InvalidRequestError` if the caller computed another grid.
        """
        geometry = self.geometry.variant(min_pixels=key.min_pixels, max_pixels=key.max_pixels)
        return confirm(geometry.grid(*source.header.upright), claimed)


def confirm(grid: Grid, claimed: Grid | None) -> Grid:
    """Return `grid`; raises `InvalidRequestError` if the caller computed another."""
    if claimed is not None and claimed != grid:
        raise InvalidRequestError(f"the caller computed grid {tuple(claimed)}, the image has {tuple(grid)}")
    return grid
