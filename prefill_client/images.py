"""Images on the client's side: before they are sent, once they are submitted, and when their rows arrive."""

import asyncio
from collections.abc import Awaitable, Callable, Iterator, Sequence
from concurrent.futures import Executor
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field, replace
from functools import partial
from typing import TYPE_CHECKING, Literal, Self, TypeVar

import numpy as np
from numpy.typing import NDArray

from encoder_contract.digest import content_digest
from encoder_contract.errors import EncoderError, StaleHandleError
from encoder_contract.geometry import Geometry, Grid
from encoder_contract.handle import Handle
from encoder_contract.header import read_header
from encoder_contract.producer import EngineKey
from encoder_contract.v1 import encoder_pb2 as pb
from prefill_client.transport.rows import OwnRows, Rows

if TYPE_CHECKING:
    import torch

Result = TypeVar("Result")


@dataclass(frozen=True, slots=True)
class Image:
    """An image file and what follows from its bytes alone: its digest and, from the header, its grid and tokens."""

    data: bytes = field(repr=False)
    digest: bytes
    grid: Grid
    tokens: int

    def to_message(self, index: int) -> pb.ImageName:
        """Return the message that names the image in a Submit call."""
        grid = pb.Grid(t=self.grid.t, h=self.grid.h, w=self.grid.w)
        return pb.ImageName(index=index, digest=self.digest, grid=grid, size_bytes=len(self.data))


@dataclass(frozen=True, slots=True)
class Submitted:
    """The server's answer to one submitted image: its confirmed grid, or its error.

    `upload_s` is when its upload began and ended, on `time.monotonic`'s clock; None if its bytes were not needed.
    `endpoint` is the server that answered.
    """

    digest: bytes
    grid: Grid | None = None
    tokens: int = 0
    address: bytes = b""
    cached: bool = False
    error: EncoderError | None = None
    upload_s: tuple[float, float] | None = None
    endpoint: str = ""


@dataclass(frozen=True, slots=True)
class RowRequest:
    """Rows [row_begin, row_end) of one image; `row_end` 0 means all.

    `chunk` is the prefill chunk they belong to, `needed_in_ms` how soon it runs; 0 means it is waiting. Rows that a
    producer put under a key of its own are named by that `engine_key` instead of a digest. `submitted_to` is the server
    that has the image, if somebody else submitted it and said so.
    """

    digest: bytes = b""
    row_begin: int = 0
    row_end: int = 0
    chunk: int = 0
    needed_in_ms: int = 0
    min_pixels: int = 0
    max_pixels: int = 0
    engine_key: EngineKey | None = None
    submitted_to: str = ""

    @property
    def routed_by(self) -> bytes:
        """What decides which server the image prefers."""
        return self.digest if self.engine_key is None else self.engine_key.key

    def to_message(self, index: int) -> pb.FetchImage:
        """Return the message that asks for these rows."""
        return pb.FetchImage(
            index=index,
            digest=self.digest,
            variant=pb.Variant(min_pixels=self.min_pixels, max_pixels=self.max_pixels),
            row_begin=self.row_begin,
            row_end=self.row_end,
            chunk=self.chunk,
            needed_in_ms=self.needed_in_ms,
            engine_key=self.engine_key.to_message() if self.engine_key else None,
        )


@dataclass(frozen=True, slots=True)
class PutImage:
    """An image whose rows the caller computes: its grid, and its content digest or an engine's key."""

    grid: Grid
    digest: bytes = b""
    engine_key: EngineKey | None = None
    min_pixels: int = 0
    max_pixels: int = 0

    @property
    def routed_by(self) -> bytes:
        """What decides which server the image prefers: as of the `RowRequest` that fetches it."""
        return self.digest if self.engine_key is None else self.engine_key.key

    def to_message(self, index: int, width: int, dtype: str) -> pb.PutName:
        """Return the message that names the image, its rows being `width` elements of `dtype`."""
        return pb.PutName(
            index=index,
            digest=self.digest,
            engine_key=self.engine_key.to_message() if self.engine_key else None,
            variant=pb.Variant(min_pixels=self.min_pixels, max_pixels=self.max_pixels),
            grid=pb.Grid(t=self.grid.t, h=self.grid.h, w=self.grid.w),
            width=width,
            dtype=dtype,
        )


@dataclass(frozen=True, slots=True)
class PutAnswer:
    """The server's answer to an image that was named in a Put, or to its rows.

    If the image is `yours`, `lease_s` is how long the caller has to send its rows; if the caller is to `wait`, it is
    how long the caller that computes it may take. `endpoint`, `call` and `index` say which image of which call it is.
    """

    image: PutImage
    state: Literal["held", "yours", "wait", "failed"]
    address: bytes = b""
    lease_s: float = 0.0
    error: EncoderError | None = None
    endpoint: str = ""
    call: int = -1
    index: int = -1


@dataclass(frozen=True, slots=True)
class ServerClock:
    """`offset_s` is theirs minus ours, within `error_s`, however unequal the times of request and answer were."""

    offset_s: float
    error_s: float
    estimated_at_s: float

    @classmethod
    def estimate(cls, asked_s: float, their_s: float, heard_s: float) -> Self:
        """Return the estimate from one call: its start and end on our clock, between which theirs was read."""
        return cls(their_s - (asked_s + heard_s) / 2, (heard_s - asked_s) / 2, heard_s)

    def ours(self, their_s: float) -> float:
        """Convert a time of their clock to ours, `time.monotonic`."""
        return their_s - self.offset_s


@dataclass(frozen=True, slots=True)
class FetchedRows:
    """The outcome of one `RowRequest`: its rows, or its error.

    Rows are [rows, width] (uint16 bit patterns for bfloat16; `tensor()` gives the real type). Rows in shared
    memory belong to the server, which may reuse their place once the fetch has ended: `array` and `tensor()` copy them,
    `in_place` lends them without a copy, and all raise `StaleHandleError` rather than return those of another image.
    `prefill_client.read` fetches such rows again, by `again`.

    `stage_ms` and `stage_began_s` say how long the server's stages took and when they began, on our
    `time.monotonic`; empty when nothing was encoded. `clock` converts the server's time to ours.
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
        """The rows, to keep, on the host: a copy where they are shared. Raises `StaleHandleError`."""
        return self.rows.copy()

    def tensor(self) -> "torch.Tensor":
        """Return the rows, to keep, as a torch tensor: over the memory of `array`, or a copy on the GPU they come from.

        Raises the error if the image failed, and `StaleHandleError`.
        """
        if self.error is not None:
            raise self.error
        return self.rows.tensor(self.dtype)

    def copy(self) -> "FetchedRows":
        """Return the outcome with rows of its own, which outlive the fetch. Raises `StaleHandleError`."""
        return replace(self, rows=self.rows.own())

    @contextmanager
    def in_place(self) -> "Iterator[FetchedRows]":
        """Lend the outcome with its rows in place, read-only: what was read counts once the block is left.

        Raises `StaleHandleError` on entering and on leaving; nothing that lies in place may be kept.
        """
        with self.rows.lent() as rows:
            yield replace(self, rows=rows)


def read_images(files: Sequence[bytes | Image], geometry: Geometry) -> list[Image | EncoderError]:
    """Hash the files and read their headers; a file that is not an image gives its error, one that was read itself.

    Takes about 0.2 ms for a 300 KB photo: callers on an event loop run it in a worker thread.
    """
    return [file if isinstance(file, Image) else _read(file, geometry) for file in files]


def _read(data: bytes, geometry: Geometry) -> Image | EncoderError:
    try:
        grid = geometry.grid(*read_header(data).upright)
    except EncoderError as error:
        return error
    return Image(data, content_digest(data), grid, geometry.tokens(grid))


# What reads rows: it is given them in place, may be called again with the same rows fetched anew, and returns nothing
# that still lies where they do.
Use = Callable[[Sequence[FetchedRows]], Result]


async def read(rows: Sequence[FetchedRows], use: Use[Result], executor: Executor | None = None) -> Result:
    """Return `use(rows)`, called in a worker thread with the rows in place.

    What it returns counts only if the rows are found to be the same afterwards; else they are fetched again and it is
    called once more. Raises the error of rows that failed, now or when fetched again.
    """
    loop = asyncio.get_running_loop()
    while True:
        try:
            return await loop.run_in_executor(executor, partial(use_in_place, rows, use))
        except StaleHandleError as error:
            rows = await asyncio.gather(*again(rows, error))


def use_in_place(rows: Sequence[FetchedRows], use: Use[Result]) -> Result:
    """Return `use(rows)`, called with the rows in place; raise `StaleHandleError` when they were lost meanwhile."""
    for each in rows:
        if each.error is not None:
            raise each.error
    with ExitStack() as held:
        return use([held.enter_context(each.in_place()) for each in rows])


def again(rows: Sequence[FetchedRows], error: StaleHandleError) -> list[Awaitable[FetchedRows]]:
    """Return what fetches the lost ones of `rows` again, and the others as they are; raise `error` if none can be."""
    if not any(each.lost and each.again for each in rows):
        raise error
    return [each.again() if each.lost and each.again else _as_it_is(each) for each in rows]


async def _as_it_is(rows: FetchedRows) -> FetchedRows:
    return rows
