"""Intake: what must hold of an image's bytes before anything is done with them."""

import asyncio
from collections.abc import Callable, Iterable
from time import monotonic

from encoder_contract.digest import content_digest
from encoder_contract.errors import DigestMismatchError, InvalidRequestError
from encoder_contract.geometry import Geometry, Grid
from encoder_contract.header import Header, check_limits, read_header
from encoder_service.address import ImageRef

# Hashing this much takes about 75 µs; more goes to a worker thread, so that the loop's lag stays small.
HASH_ON_LOOP_BYTES = 512 << 10


class Intake:
    """Checks bytes against their name and the limits; no pixel is decoded. Used from the event loop."""

    def __init__(
        self,
        geometry: Geometry,
        *,
        max_image_bytes: int,
        max_image_pixels: int,
        on_hash: Callable[[float], None] = lambda _seconds: None,
    ) -> None:
        """`on_hash` is told how long hashing an image took, seconds."""
        self.geometry = geometry
        self._max_image_bytes = max_image_bytes
        self._max_image_pixels = max_image_pixels
        self._on_hash = on_hash

    async def check_digest(self, image: ImageRef, data: bytes) -> None:
        """Raise `DigestMismatchError` unless `data` is what the name says."""
        began = monotonic()
        digest = (
            content_digest(data)
            if len(data) <= HASH_ON_LOOP_BYTES
            else await asyncio.to_thread(content_digest, data)
        )
        self._on_hash(monotonic() - began)
        if digest != image.digest:
            raise DigestMismatchError(f"the bytes hash to {digest.hex()}, not to {image.digest.hex()}")

    def check_name(self, image: ImageRef, claimed: Grid | None) -> None:
        """Raise `ImageLimitError` for a variant, `InvalidRequestError` for a grid, that no image can have."""
        geometry = self.geometry.variant(min_pixels=image.min_pixels, max_pixels=image.max_pixels)
        if claimed is not None and not geometry.has(claimed):
            raise InvalidRequestError(f"the caller computed grid {tuple(claimed)}, which no image can have")

    def agreed(self, said: Iterable[Grid], claimed: Grid | None) -> Grid | None:
        """Return the grid that hearsay and the caller agree on, or None: then it is to be read from the bytes.

        Hearsay neither confirms a grid that no image can have nor refutes what the caller computed.
        """
        return next((grid for grid in said if self.geometry.has(grid) and claimed in (None, grid)), None)

    def read(self, image: ImageRef, data: bytes, claimed: Grid | None = None) -> tuple[Header, Grid]:
        """Return header and grid of an image.

        Raises `InvalidImageError`, `ImageLimitError`, or `InvalidRequestError` when the caller computed another grid.
        """
        header = read_header(data)
        check_limits(
            header,
            len(data),
            max_image_bytes=self._max_image_bytes,
            max_image_pixels=self._max_image_pixels,
        )
        geometry = self.geometry.variant(min_pixels=image.min_pixels, max_pixels=image.max_pixels)
        return header, confirm(geometry.grid(*header.upright), claimed)


def confirm(grid: Grid, claimed: Grid | None) -> Grid:
    """Return `grid`; `InvalidRequestError` when the caller computed another."""
    if claimed is not None and claimed != grid:
        raise InvalidRequestError(f"the caller computed grid {tuple(claimed)}, the image has {tuple(grid)}")
    return grid
