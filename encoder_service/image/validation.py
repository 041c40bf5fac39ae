"""Validation: the checks on an image's bytes and grid before anything else is done with them."""

import asyncio
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from time import monotonic

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
        self._threads = ThreadPoolExecutor(THREADS, thread_name_prefix="validation")

    async def take(self, key: ImageKey, data: bytes) -> Source:
        """Return `data` as a source if it has the digest of `key` and is within the limits.

        Raises `DigestMismatchError`, `InvalidImageError` or `ImageLimitError`.
        """
        if len(data) <= ON_LOOP_BYTES:
            return self._take(key, data)
        return await asyncio.get_running_loop().run_in_executor(self._threads, self._take, key, data)

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
