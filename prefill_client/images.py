"""What is said about images on the client's side: before they are sent, when submitted, when their rows arrive."""

import warnings
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from encoder_contract.digest import content_digest
from encoder_contract.errors import EncoderError
from encoder_contract.geometry import Geometry, Grid
from encoder_contract.handle import Handle
from encoder_contract.header import read_header
from prefill_client.clock import ServerClock

if TYPE_CHECKING:
    import torch

# bfloat16 has no numpy type: its bits travel as uint16.
_NUMPY_TYPES: "dict[str, np.dtype[Any]]" = {
    "bfloat16": np.dtype(np.uint16),
    "float16": np.dtype(np.float16),
    "float32": np.dtype(np.float32),
}


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

    `array` is [rows, width] (uint16 bit patterns for bfloat16; `tensor()` gives the real type). Rows that came by
    shared memory are a read-only view, valid until the fetch they came from is closed; `handle` names them to
    other processes of this host.

    `stage_ms` and `stage_began_s` say how long the server's stages took and when they began, on our
    `time.monotonic`; empty when nothing was encoded. `clock` is what the second is converted by.
    """

    index: int
    digest: bytes
    array: NDArray[np.generic] = field(repr=False, default_factory=lambda: np.empty((0, 0), np.uint16))
    dtype: str = "bfloat16"
    grid: Grid | None = None
    address: bytes = b""
    source: str = ""
    transport: str = "inline"
    stage_ms: dict[str, float] = field(default_factory=dict)
    stage_began_s: dict[str, float] = field(default_factory=dict)
    endpoint: str = ""
    clock: ServerClock | None = None
    handle: Handle | None = None
    error: EncoderError | None = None

    def tensor(self) -> "torch.Tensor":
        """Return the rows as a torch tensor [rows, width] that shares their memory; raises the error if it failed."""
        if self.error is not None:
            raise self.error
        return tensor_view(self.array, self.dtype)


def tensor_view(array: NDArray[np.generic], dtype: str) -> "torch.Tensor":
    """Return a torch tensor over the same memory, of type `dtype` (bfloat16 comes as uint16).

    A tensor has no read-only flag: writing to one that lies in a segment kills the process.
    """
    import torch

    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="The given NumPy array is not writable")
        tensor = torch.from_numpy(array)
    return tensor.view(getattr(torch, dtype))


def element_type(dtype: str) -> "np.dtype[Any]":
    """Return the numpy type that carries elements of `dtype`."""
    return _NUMPY_TYPES[dtype]


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
