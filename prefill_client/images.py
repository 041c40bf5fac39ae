"""What is said about images on the client's side: before they are sent, when submitted, when their rows arrive."""

from collections.abc import Awaitable, Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from encoder_contract.digest import content_digest
from encoder_contract.errors import EncoderError
from encoder_contract.geometry import Geometry, Grid
from encoder_contract.handle import Handle
from encoder_contract.header import read_header
from prefill_client.transport.elements import tensor_view
from prefill_client.transport.inline import OwnRows
from prefill_client.transport.server_clock import ServerClock
from prefill_client.transport.transport import Rows

if TYPE_CHECKING:
    import torch


@dataclass(frozen=True, slots=True)
class Image:
    """An image file with what its bytes alone decide: its name and, from the header, grid and tokens."""

    data: bytes = field(repr=False)
    digest: bytes
    grid: Grid
    tokens: int


@dataclass(frozen=True, slots=True)
class Submitted:
    """The server's word on one submitted image: its confirmed grid, or its error.

    `upload_s` is when its bytes began to travel and when they were taken, on `time.monotonic`'s clock, if they did.
    """

    digest: bytes
    grid: Grid | None = None
    tokens: int = 0
    address: bytes = b""
    cached: bool = False
    error: EncoderError | None = None
    upload_s: tuple[float, float] | None = None


@dataclass(frozen=True, slots=True)
class RowRequest:
    """Rows [row_begin, row_end) of one image; `row_end` 0 means all.

    `chunk` is the prefill chunk they belong to, `needed_in_ms` how soon it runs; 0 means it is waiting.
    """

    digest: bytes
    row_begin: int = 0
    row_end: int = 0
    chunk: int = 0
    needed_in_ms: int = 0
    min_pixels: int = 0
    max_pixels: int = 0


@dataclass(frozen=True, slots=True)
class FetchedRows:
    """The outcome of one `RowRequest`: its rows, or its error.

    Rows are [rows, width] (uint16 bit patterns for bfloat16; `tensor()` gives the real type). Those that came by shared
    memory lie at the server, which may give their place to another image once the fetch has ended: `array` and
    `tensor()` copy them, `in_place` lends them without a copy, and all raise `StaleHandleError` rather than give
    another image's. `prefill_client.read` fetches rows again that were lost so, by `again`.

    `stage_ms` and `stage_began_s` say how long the server's stages took and when they began, on our
    `time.monotonic`; empty when nothing was encoded. `clock` is what the second is converted by.
    """

    index: int
    digest: bytes
    rows: Rows = field(repr=False, default_factory=lambda: OwnRows(np.empty((0, 0), np.uint16)))
    dtype: str = "bfloat16"
    grid: Grid | None = None
    address: bytes = b""
    source: str = ""
    transport: str = "inline"
    stage_ms: dict[str, float] = field(default_factory=dict)
    stage_began_s: dict[str, float] = field(default_factory=dict)
    endpoint: str = ""
    clock: ServerClock | None = None
    error: EncoderError | None = None
    again: "Callable[[], Awaitable[FetchedRows]] | None" = field(repr=False, default=None)

    @property
    def shape(self) -> tuple[int, ...]:
        """(rows, width)."""
        return self.rows.shape

    @property
    def lost(self) -> bool:
        """Whether the rows can no longer be read."""
        return self.rows.lost

    @property
    def handle(self) -> Handle | None:
        """What names the rows to other processes of this host, if they are shared."""
        return self.rows.handle

    @property
    def array(self) -> NDArray[np.generic]:
        """The rows, to keep: a copy where they are shared. Raises `StaleHandleError`."""
        return self.rows.copy()

    def tensor(self) -> "torch.Tensor":
        """Return `array` as a torch tensor over the same memory; raises the error if the image failed."""
        if self.error is not None:
            raise self.error
        return tensor_view(self.array, self.dtype)

    def copy(self) -> "FetchedRows":
        """Return the outcome with rows of its own, which outlive the fetch. Raises `StaleHandleError`."""
        return replace(self, rows=OwnRows(self.rows.copy()))

    @contextmanager
    def in_place(self) -> "Iterator[FetchedRows]":
        """Lend the outcome with its rows in place, read-only: what was read counts once the block is left.

        Raises `StaleHandleError` on entering and on leaving; nothing that lies in place may be kept.
        """
        with self.rows.reading() as array:
            yield replace(self, rows=OwnRows(array))


def read_images(files: Sequence[bytes], geometry: Geometry) -> list[Image | EncoderError]:
    """Hash the files and read their headers; a file that is no image gives its error.

    Takes about 0.2 ms for a 300 KB photo: callers on an event loop run it in a worker thread.
    """
    return [_read(data, geometry) for data in files]


def _read(data: bytes, geometry: Geometry) -> Image | EncoderError:
    try:
        grid = geometry.grid(*read_header(data).upright)
    except EncoderError as error:
        return error
    return Image(data, content_digest(data), grid, geometry.tokens(grid))
