"""Simulated towers: an image's name decides its rows, so that whoever reads them can tell whether they are right."""

import zlib

import numpy as np
from numpy.typing import NDArray

from prefill_client import EngineKey, Grid, Producer, PutImage, RowRequest

PRODUCER = Producer(b"bench", b"bench", b"bench", "bfloat16", "bench.shared_store")
GRID = Grid(1, 16, 24)
TOKENS = 96


def image_of(number: int) -> PutImage:
    """Return the image with this number."""
    return PutImage(GRID, engine_key=EngineKey("bench", number.to_bytes(8, "big")))


def request_of(number: int) -> RowRequest:
    """Return the request of all its rows."""
    return RowRequest(engine_key=image_of(number).engine_key)


def rows_of(number: int, width: int) -> NDArray[np.uint16]:
    """Return its rows [tokens, width], bfloat16 as its bits: of no two images alike in any row."""
    first = zlib.crc32(number.to_bytes(8, "big")) & 0xFFFF
    row = np.arange(width, dtype=np.uint16) + np.uint16(first)
    return row[None, :] ^ np.arange(TOKENS, dtype=np.uint16)[:, None] ^ np.uint16(number & 0xFFFF)
