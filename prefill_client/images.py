"""Images on the client: files to submit, the server's answers, and rows that arrive and are read."""

import asyncio
from collections.abc import Awaitable, Callable, Iterable, Iterator, Sequence
from concurrent.futures import Executor
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field, replace
from functools import partial
from os import PathLike
from pathlib import Path
from typing import TYPE_CHECKING, Literal, Self, TypeAlias, TypeVar

import numpy as np
from numpy.typing import NDArray

from encoder_contract.digest import content_digest
from encoder_contract.errors import EncoderError, StaleHandleError
from encoder_contract.geometry import Geometry, Grid
from encoder_contract.handle import Handle
from encoder_contract.header import format_of, read_header
from encoder_contract.producer import EngineKey
from encoder_contract.v1 import encoder_pb2 as pb
from encoder_contract.video import Frames, VideoInfo
from prefill_client.transport.rows import OwnRows, Rows

if TYPE_CHECKING:
    import torch

Result = TypeVar("Result")


@dataclass(frozen=True, slots=True)
class Image:
    """An image file with what its bytes say: the content digest, and from the header the grid and token count.

    `data` is the file. `digest` has 32 bytes (BLAKE3). `tokens` is the number of its rows and of its prompt tokens.
    Only the server reads the header of a file in a rare format (TIFF, AVIF, ...), and for some models only the server
    counts rows (`Description.geometry`): `grid` is None and `tokens` 0, and the answer to its Submit has both.

    With `frames`, the file is a video, and the image is two of its frames (`prefill_client.Video`). With `is_video` it
    is the video itself, which has no rows: the answer says what its container does.
    """

    data: bytes = field(repr=False)
    digest: bytes
    grid: Grid | None
    tokens: int
    frames: Frames | None = None
    is_video: bool = False

    @property
    def name(self) -> bytes:
        """What tells it from other images: its digest, and its frames."""
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
"""An image file: its bytes, its path, or what was read of it already."""


@dataclass(frozen=True, slots=True)
class Submitted:
    """The server's answer to one submitted image: its confirmed grid, or its error.

    `address` names its rows at the server (32 bytes). `cached`: the server had the rows already. `upload_s` is when the
    upload began and ended, in seconds of `time.monotonic`; None if the server did not need the file. `endpoint` is the
    server that answered. Of a video itself, `video` is what its container says; `frames` are those of a pair.
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

    `chunk` is the prefill chunk that needs them and `needed_in_ms` how soon it runs; 0 means that it waits for them.
    `digest` names an image that was submitted, `engine_key` rows that a producer put under its own key.
    `submitted_to` is the server that the image was submitted to, if another process did that. `frames` are those of a
    video, whose file has this digest.
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
    frames: Frames | None = None

    @classmethod
    def of(cls, image: Image) -> Self:
        """Return the request for all rows of an image that was submitted."""
        return cls(image.digest, frames=image.frames)

    @property
    def name(self) -> bytes:
        """What tells its image from others, as `Image.name`."""
        return _name(self.digest, self.frames)

    @property
    def routed_by(self) -> bytes:
        """The name by which the image is routed to a server."""
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
            frames=self.frames.to_message() if self.frames else None,
            grid=_grid_message(self.frames.grid if self.frames else None),
        )


def _name(digest: bytes, frames: Frames | None) -> bytes:
    return digest if frames is None else digest + repr(tuple(frames)).encode()


def _grid_message(grid: Grid | None) -> pb.Grid | None:
    return pb.Grid(t=grid.t, h=grid.h, w=grid.w) if grid else None


@dataclass(frozen=True, slots=True)
class PutImage:
    """An image whose rows the caller computes, named by its content digest or by an engine's key."""

    grid: Grid
    digest: bytes = b""
    engine_key: EngineKey | None = None
    min_pixels: int = 0
    max_pixels: int = 0

    @property
    def routed_by(self) -> bytes:
        """The name by which the image is routed to a server: the same as of the `RowRequest` that fetches it."""
        return self.digest if self.engine_key is None else self.engine_key.key

    def to_message(self, index: int, width: int, dtype: str) -> pb.PutName:
        """Return the message that names the image. Its rows have `width` elements of type `dtype`."""
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

    `held`: the server has the rows. `yours`: the caller holds a lease and has `lease_s` seconds to send the rows.
    `wait`: another caller holds the lease, for `lease_s` seconds at most. `failed`: see `error`. `endpoint`, `call` and
    `index` identify the image in its call.
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
    """The offset of a server's monotonic clock: `offset_s` is theirs minus ours, exact to `error_s` seconds.

    The bound holds even if the request took longer than the answer, or the reverse.
    """

    offset_s: float
    error_s: float
    estimated_at_s: float

    @classmethod
    def estimate(cls, asked_s: float, their_s: float, heard_s: float) -> Self:
        """Return the estimate from one call that began at `asked_s` and ended at `heard_s` on our clock."""
        return cls(their_s - (asked_s + heard_s) / 2, (heard_s - asked_s) / 2, heard_s)

    def ours(self, their_s: float) -> float:
        """Convert seconds of the server's clock to seconds of `time.monotonic`."""
        return their_s - self.offset_s


@dataclass(frozen=True, slots=True)
class FetchedRows:
    """The outcome of one `RowRequest`: its rows, or its error.

    Rows have the shape [rows, width]. numpy has no bfloat16: `array` carries it as uint16 bit patterns, which `dtype`
    tells. `float32()` returns the numbers, `tensor()` a tensor of the real type.

    Rows in shared memory belong to the server, which may reuse the memory once the fetch has ended. `array` and
    `tensor()` copy such rows, `in_place` lends them without a copy. All three raise `StaleHandleError` when the rows
    are gone; they never return rows of another image. `prefill_client.read` fetches lost rows again through `again`.

    `stage_ms` says how long each stage of the server took and `stage_began_s` when it began, in seconds of
    `time.monotonic`; both are empty if the rows were not encoded for this fetch. `clock` converts the server's times.
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
        """The handle by which other processes of this host read the rows; None if they are not shared."""
        return self.rows.handle

    @property
    def array(self) -> NDArray[np.generic]:
        """The rows on the host, [rows, width], valid after the fetch: a copy if they are shared.

        Raises `error` if the image failed, and `StaleHandleError` if its rows are gone.
        """
        if self.error is not None:
            raise self.error
        return self.rows.copy()

    def float32(self) -> NDArray[np.float32]:
        """Return the rows as numbers of numpy's float32, [rows, width], in memory of their own. It is exact.

        Raises `error` if the image failed, and `StaleHandleError` if its rows are gone.
        """
        if self.dtype == "bfloat16":  # the upper half of a float32
            return (self.array.astype(np.uint32) << 16).view(np.float32)
        return self.array.astype(np.float32)

    def tensor(self) -> "torch.Tensor":
        """Return the rows as a torch tensor, [rows, width] of type `dtype`, valid after the fetch.

        It lies over the memory of `array`, or on the GPU that the rows come from. Raises `error` if the image failed,
        and `StaleHandleError` if its rows are gone.
        """
        if self.error is not None:
            raise self.error
        return self.rows.tensor(self.dtype)

    def copy(self) -> "FetchedRows":
        """Return the outcome with a copy of the rows, valid after the fetch. Raises `StaleHandleError`."""
        return replace(self, rows=self.rows.own())

    @contextmanager
    def in_place(self) -> "Iterator[FetchedRows]":
        """Lend the outcome with its rows in place, read-only.

        Use what you read only after the block has ended without an error, and keep no view of the rows. Raises
        `StaleHandleError` on entry, or on exit if the rows were replaced during the block.
        """
        with self.rows.lent() as rows:
            yield replace(self, rows=rows)


def read_images(files: Sequence[File], geometry: Geometry | None) -> list[Image | EncoderError]:
    """Hash the files and read their headers. Return an `Image` for each, or the error of a file that is no image.

    `geometry` is `Description.geometry`. An `Image` is returned as it is. A 300 KB photo takes about 0.2 ms: on an
    event loop, call this in a worker thread. Raises `OSError` for a path that cannot be read.
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


def raise_first(outcomes: Iterable[EncoderError | None], names: Sequence[str] = ()) -> None:
    """Raise the first error, with the name of its image, or with its number if there are no `names`."""
    for index, outcome in enumerate(outcomes):
        if outcome is not None:
            raise outcome.about(names[index] if names else f"image {index}") from outcome


# A function that reads rows in place. It may be called again with the same rows, fetched again, and must return nothing
# that refers to their memory.
Use = Callable[[Sequence[FetchedRows]], Result]


async def read(rows: Sequence[FetchedRows], use: Use[Result], executor: Executor | None = None) -> Result:
    """Call `use` in a worker thread with the rows in place, and return its result.

    If rows were lost while `use` read them, its result is discarded, the lost rows are fetched again, and `use` is
    called once more. `use` must return nothing that refers to the rows' memory. Raises the error of rows that failed,
    at first or when fetched again. `executor` is where `use` runs; None is the event loop's default.
    """
    loop = asyncio.get_running_loop()
    while True:
        try:
            return await loop.run_in_executor(executor, partial(use_in_place, rows, use))
        except StaleHandleError as error:
            rows = await asyncio.gather(*again(rows, error))


def use_in_place(rows: Sequence[FetchedRows], use: Use[Result]) -> Result:
    """Call `use` with the rows in place and return its result. Raises `StaleHandleError` if rows were lost."""
    for each in rows:
        if each.error is not None:
            raise each.error
    with ExitStack() as held:
        return use([held.enter_context(each.in_place()) for each in rows])


def again(rows: Sequence[FetchedRows], error: StaleHandleError) -> list[Awaitable[FetchedRows]]:
    """Return an awaitable for each of `rows`, a new fetch for lost ones. Raises `error` if no fetch can help."""
    if not any(each.lost and each.again for each in rows):
        raise error
    return [each.again() if each.lost and each.again else _as_it_is(each) for each in rows]


async def _as_it_is(rows: FetchedRows) -> FetchedRows:
    return rows
