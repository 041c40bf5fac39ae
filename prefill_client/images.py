"""Images on the client: files to submit, the server's answers, requests for rows, and fetched rows."""

import asyncio
from collections.abc import Awaitable, Callable, Iterable, Iterator, Sequence
from concurrent.futures import Executor
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field, replace
from functools import partial
from os import PathLike
from pathlib import Path
from typing import TYPE_CHECKING, Self, TypeAlias, TypeVar

import numpy as np
from numpy.typing import NDArray

from encoder_contract.digest import content_digest
from encoder_contract.errors import EncoderError, StaleHandleError
from encoder_contract.geometry import Geometry, Grid
from encoder_contract.handle import Handle
from encoder_contract.header import format_of, read_header
from encoder_contract.v1 import encoder_pb2 as pb
from encoder_contract.video import Frames, VideoInfo
from prefill_client.transport.rows import OwnRows, Rows

if TYPE_CHECKING:
    import torch

Result = TypeVar("Result")
Item = TypeVar("Item")


@dataclass(frozen=True, slots=True)
class Image:
    """An image file, with its content digest and, from its header, its grid and token count.

    `data` is the file. `digest` has 32 bytes (BLAKE3). `tokens` is the number of the image's rows, which is also its
    number of prompt tokens. If only the server can compute them, `grid` is None and `tokens` is 0, and the answer to
    Submit has both. This is so for rare formats (TIFF, AVIF, ...), and for all files if `Description.geometry` is None.

    With `frames`, the file is a video, and the image consists of two of its frames (`prefill_client.Video`). With
    `is_video`, this is the video itself, which has no rows: the answer to Submit has the properties of its container.

    Without `data`, another process has submitted the image, to the server `submitted_to` (empty: not known). It is only
    for `EncoderClient.keep_known`.
    """

    data: bytes = field(repr=False)
    digest: bytes
    grid: Grid | None
    tokens: int
    frames: Frames | None = None
    is_video: bool = False
    submitted_to: str = ""

    @property
    def name(self) -> bytes:
        """Bytes that identify the image: its digest, and its frames if it has any."""
        return _name(self.digest, self.frames)

    def to_message(self, index: int) -> pb.ImageName:
        """Return the message that names the image in a Submit call."""
        return pb.ImageName(
            index=index,
            digest=self.digest,
            grid=_grid_message(self.grid),
            size_bytes=len(self.data),
            frames=self.frames.to_message() if self.frames else None,
            video=self.is_video,
        )


File: TypeAlias = bytes | str | PathLike[str] | Image
"""An image file: its bytes, its path, or an `Image` that was read from it."""


@dataclass(frozen=True, slots=True)
class Submitted:
    """The server's answer to one submitted image: its confirmed grid and token count, or its error.

    `address` names the image's rows at the server (32 bytes). `cached` means that the server already had the rows.
    `upload_s` is when the upload began and ended, in seconds of `time.monotonic`; None if the server did not need the
    file. `endpoint` is the server that answered. `video` has the container properties of a submitted video, and
    `frames` are the frames of a submitted pair.
    """

    digest: bytes
    grid: Grid | None = None
    tokens: int = 0
    address: bytes = b""
    cached: bool = False
    error: EncoderError | None = None
    upload_s: tuple[float, float] | None = None
    endpoint: str = ""
    video: VideoInfo | None = None
    frames: Frames | None = None


@dataclass(frozen=True, slots=True)
class RowRequest:
    """A request for rows [row_begin, row_end) of one image; `row_end` 0 means all rows.

    `digest` names a submitted image. `chunk` is the prefill chunk that needs the rows, and `needed_in_ms` is how soon
    it runs; 0 means that it is waiting. `frames` selects two frames of the video with this digest. `submitted_to` is
    the server to which another process submitted the image.
    """

    digest: bytes = b""
    row_begin: int = 0
    row_end: int = 0
    chunk: int = 0
    needed_in_ms: int = 0
    min_pixels: int = 0
    max_pixels: int = 0
    submitted_to: str = ""
    frames: Frames | None = None

    @classmethod
    def of(cls, image: Image) -> Self:
        """Return a request for all rows of a submitted image."""
        return cls(image.digest, frames=image.frames)

    @property
    def name(self) -> bytes:
        """Bytes that identify the image, equal to its `Image.name`."""
        return _name(self.digest, self.frames)

    def to_message(self, index: int) -> pb.FetchImage:
        """Return the message that requests these rows in a Fetch call."""
        return pb.FetchImage(
            index=index,
            digest=self.digest,
            variant=pb.Variant(min_pixels=self.min_pixels, max_pixels=self.max_pixels),
            row_begin=self.row_begin,
            row_end=self.row_end,
            chunk=self.chunk,
            needed_in_ms=self.needed_in_ms,
            frames=self.frames.to_message() if self.frames else None,
            grid=_grid_message(self.frames.grid if self.frames else None),
        )


def _name(digest: bytes, frames: Frames | None) -> bytes:
    return digest if frames is None else digest + repr(tuple(frames)).encode()


def _grid_message(grid: Grid | None) -> pb.Grid | None:
    return pb.Grid(t=grid.t, h=grid.h, w=grid.w) if grid else None


@dataclass(frozen=True, slots=True)
class ServerClock:
    """The offset of a server's monotonic clock to `time.monotonic` of this process, exact to `error_s` seconds.

    The error bound also holds if the request and the answer took different times.
    """

    offset_s: float
    error_s: float
    estimated_at_s: float

    @classmethod
    def estimate(cls, sent_s: float, server_s: float, received_s: float) -> Self:
        """Estimate the offset from one call.

        It was sent at `sent_s` and answered at `received_s`, in seconds of `time.monotonic`. The server read `server_s`
        from its own clock in between.
        """
        return cls(server_s - (sent_s + received_s) / 2, (received_s - sent_s) / 2, received_s)

    def to_local(self, server_s: float) -> float:
        """Convert seconds of the server's clock to seconds of `time.monotonic`."""
        return server_s - self.offset_s


@dataclass(frozen=True, slots=True)
class FetchedRows:
    """The outcome of one `RowRequest`: its rows, or its error.

    Rows have the shape [rows, width]. numpy has no bfloat16, so `array` holds the bit patterns of bfloat16 rows as
    uint16; `dtype` is the real element type. `float32()` returns the numbers, `tensor()` a tensor of the real type.

    Rows in shared memory belong to the server, which may reuse the memory once the fetch has ended. `array` and
    `tensor()` copy such rows; `in_place()` lends them without a copy. All three raise `StaleHandleError` if the rows
    are gone, and never return rows of another image. `prefill_client.read` uses `again` to fetch lost rows again.

    `source` says where the server found the rows: device, host, peer or encoded. `stage_ms` is how long each stage took
    at the server, and `stage_began_s` when it began, in seconds of `time.monotonic`. Both are empty if the rows were
    not encoded for this fetch. `clock` converts the server's times.
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
        """Whether the rows are gone: reading them raises `StaleHandleError`."""
        return self.rows.lost

    @property
    def handle(self) -> Handle | None:
        """The handle with which other processes of this host can read the rows; None if they are not shared."""
        return self.rows.handle

    @property
    def array(self) -> NDArray[np.generic]:
        """The rows in host memory, [rows, width]; a copy if they are shared. They stay valid after the fetch.

        Raises `error` if the image failed, and `StaleHandleError` if its rows are gone.
        """
        if self.error is not None:
            raise self.error
        return self.rows.copy()

    def float32(self) -> NDArray[np.float32]:
        """Return a copy of the rows converted to float32, [rows, width]. The conversion is exact.

        Raises `error` if the image failed, and `StaleHandleError` if its rows are gone.
        """
        if self.dtype == "bfloat16":  # the upper half of a float32
            return (self.array.astype(np.uint32) << 16).view(np.float32)
        return self.array.astype(np.float32)

    def tensor(self) -> "torch.Tensor":
        """Return the rows as a torch tensor, [rows, width] of type `dtype`. It stays valid after the fetch.

        The tensor shares the memory of `array`, or is on the GPU from which the rows come. Raises `error` if the image
        failed, and `StaleHandleError` if its rows are gone.
        """
        if self.error is not None:
            raise self.error
        return self.rows.tensor(self.dtype)

    def copy(self) -> "FetchedRows":
        """Return the outcome with a copy of its rows, which stays valid after the fetch. Raises `StaleHandleError`."""
        return replace(self, rows=self.rows.own())

    @contextmanager
    def in_place(self) -> "Iterator[FetchedRows]":
        """Lend the outcome with its rows in place, read-only.

        Use results only after the block has ended without an error, and keep no view of the rows. Raises
        `StaleHandleError` on entry if the rows are gone, or on exit if they were replaced during the block.
        """
        with self.rows.lent() as rows:
            yield replace(self, rows=rows)


def read_images(files: Sequence[File], geometry: Geometry | None) -> list[Image | EncoderError]:
    """Hash the files and read their headers. Return an `Image` for each file, or an error if it is not an image.

    `geometry` is `Description.geometry`. An `Image` among the files is returned unchanged. A 300 KB photo takes about
    0.2 ms: on an event loop, call this in a worker thread. Raises `OSError` for a path that cannot be read.
    """
    return [file if isinstance(file, Image) else _read(_bytes_of(file), geometry) for file in files]


def _bytes_of(file: bytes | str | PathLike[str]) -> bytes:
    return Path(file).read_bytes() if isinstance(file, str | PathLike) else file


def _read(data: bytes, geometry: Geometry | None) -> Image | EncoderError:
    try:
        size = read_header(data).upright if format_of(data) is not None else None
        if geometry is None or size is None:
            return Image(data, content_digest(data), None, 0)
        grid = geometry.grid(*size)
    except EncoderError as error:
        return error
    return Image(data, content_digest(data), grid, geometry.tokens(grid))


def raise_first(errors: Iterable[EncoderError | None], names: Sequence[str] = ()) -> None:
    """Raise the first error that is not None, with the name of its image, or its number if there are no `names`."""
    for index, error in enumerate(errors):
        if error is not None:
            raise error.about(names[index] if names else f"image {index}", index) from error


def without_errors(items: Sequence[Item | EncoderError], names: Sequence[str] = ()) -> list[Item]:
    """Return the items if no error is among them, else raise the first error as `raise_first` does."""
    raise_first([each if isinstance(each, EncoderError) else None for each in items], names)
    return [each for each in items if not isinstance(each, EncoderError)]


# A function that reads rows in place. It may be called again after lost rows were fetched again, and must not return
# anything that refers to the rows' memory.
Use = Callable[[Sequence[FetchedRows]], Result]


async def read(rows: Sequence[FetchedRows], use: Use[Result], executor: Executor | None = None) -> Result:
    """Call `use` in a worker thread with the rows in place, and return its result.

    If rows are lost while `use` reads them, this discards its result, fetches the lost rows again and calls `use` once
    more. `use` must not return anything that refers to the rows' memory. `executor` runs `use`; None is the event
    loop's default executor. Raises the error of a failed outcome, or of a failed second fetch.
    """
    loop = asyncio.get_running_loop()
    while True:
        try:
            return await loop.run_in_executor(executor, partial(use_in_place, rows, use))
        except StaleHandleError as error:
            rows = await asyncio.gather(*refetch_lost(rows, error))


def use_in_place(rows: Sequence[FetchedRows], use: Use[Result]) -> Result:
    """Call `use` with the rows in place and return its result. Raises `StaleHandleError` if rows were lost."""
    for each in rows:
        if each.error is not None:
            raise each.error
    with ExitStack() as borrowed:
        return use([borrowed.enter_context(each.in_place()) for each in rows])


def refetch_lost(rows: Sequence[FetchedRows], error: StaleHandleError) -> list[Awaitable[FetchedRows]]:
    """Return an awaitable for each of `rows`: a new fetch if they are lost. Raises `error` if none can be fetched."""
    if not any(each.lost and each.again for each in rows):
        raise error
    return [each.again() if each.lost and each.again else _unchanged(each) for each in rows]


async def _unchanged(rows: FetchedRows) -> FetchedRows:
    return rows
