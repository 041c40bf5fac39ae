"""The interface between the server and a family of vision models (docs/models.md).

A family is a function `load(folder, options) -> VisionModel`, which the entry point group `encoder_service.families`
names by the `model_type` in config.json. `OneByOne` is a `VisionModel` that lacks only what a family alone can say.
"""

import threading
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import torch
from cachetools import LRUCache
from torch import Tensor
from torch.utils.flop_counter import FlopCounterMode

from encoder_contract.errors import EncoderError, ImageLimitError, InvalidImageError
from encoder_contract.geometry import Grid, GridRule
from encoder_contract.tower_spec import Precision
from encoder_service.keys import Recipe

Inputs = Tensor | Mapping[str, Any]
"""What a model takes of one image, made from its pixels: a tensor, or tensors and other values by name."""

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


def tensors_of(inputs: Inputs) -> list[Tensor]:
    """Return the tensors in what a model takes of one image."""
    if isinstance(inputs, Tensor):
        return [inputs]
    return [value for value in inputs.values() if isinstance(value, Tensor)]


@dataclass(frozen=True, slots=True, kw_only=True)
class LoadOptions:
    """How to load a model; a family refuses, with `ValueError`, what it cannot do.

    `device` is "cpu" or "cuda[:n]", `dtype` a key of `DTYPES`. 0 `batch_patches` are as many as suit the device. The
    others are the settings of the server with these names (`precision`: tower_precision, `graphs`: cuda_graphs).
    """

    device: str
    dtype: str
    attention: str = "auto"
    batch_patches: int = 0
    batch_invariant: bool = False
    graphs: bool = True
    precision: Precision = "full"
    trust_remote_code: bool = False


class VisionModel(Protocol):
    """The vision part of a checkpoint, loaded: pixels in, the rows that the language model merges out.

    A row has `width` = `hidden` × (1 + `levels`) values in `dtype`: the language model's width, and as many for each
    DeepStack level. `geometry` says how many rows an image has, from its size alone. `recipe` identifies all that
    decides a row's bits: weights, configuration, image processor, and the versions of the code that is not the
    server's. `batch_patches` bounds a batch. The counters are of batches since the start, for metrics.
    """

    dtype: torch.dtype
    batch_patches: int
    graph_batches: int
    eager_batches: int
    takes_frames: bool
    """Whether `inputs` takes two frames of a video too, uint8 [2, H, W, 3]: one image with rows of its own."""

    @property
    def model_type(self) -> str: ...
    @property
    def hidden(self) -> int: ...
    @property
    def levels(self) -> int: ...
    @property
    def width(self) -> int: ...
    @property
    def geometry(self) -> GridRule: ...
    @property
    def recipe(self) -> Recipe: ...
    @property
    def attention(self) -> str: ...
    @property
    def padding_patches(self) -> int: ...

    @property
    def ahead_patches(self) -> int:
        """How many patches, as grids count them, are prepared ahead of the tower: a bound on their memory."""
        ...

    @property
    def forward_bytes(self) -> int:
        """The most bytes that a forward takes on a GPU beside the weights; for the memory plan."""
        ...

    @property
    def batch_bytes(self) -> int:
        """The most bytes of a GPU that a batch takes outside of its forward: its inputs before, its rows after."""
        ...

    @property
    def table_bytes(self) -> int:
        """The most bytes of a GPU that is kept by grid."""
        ...

    def flops(self, grid: Grid) -> int:
        """Return the floating-point operations of an image, as an estimate; for metrics."""
        ...

    def inputs(self, pixels: Sequence[Tensor], grids: Sequence[Grid]) -> Sequence[Inputs]:
        """Return what `encode` takes of each image: `pixels` are uint8 [H, W, 3]. Called on several threads.

        Raises `InvalidImageError` for an image that cannot be encoded; several are then tried one by one.
        """
        ...

    def prepare(self, grid: Grid) -> None:
        """Compute ahead, on another thread, what `encode` needs for a grid."""
        ...

    def encode(
        self, inputs: Sequence[Any], grids: Sequence[Grid], between: Callable[[], None] = lambda: None
    ) -> list[Tensor]:
        """Return each image's rows [geometry.tokens(grid), width]; called on one thread.

        On the CPU, and with the option `batch_invariant`, an image's rows have the same bits whatever its neighbours
        are. `between` may be called at any point; it may call `encode` for other images.
        """
        ...


Load = Callable[[Path, LoadOptions], VisionModel]

MAX_ROWS = 32768  # of an image; the largest published bound is half of it
MAX_REASON = 400  # characters of what another library says
MAX_SIZES = 65536  # kept, with their rows: 10 MB


class CountedRows:
    """A `GridRule` whose grids are of rows, from a function that may take milliseconds. Thread-safe.

    Grids, or why there are none, are kept for the sizes that were asked last.
    """

    def __init__(self, count: Callable[[int, int], Grid], max_rows: int = MAX_ROWS) -> None:
        """`count(width, height)` returns (1, h, w) for h × w rows.

        It may raise: the size is then refused with its message, unless memory ran out.
        """
        self._count = count
        self.max_tokens = max_rows
        self._lock = threading.Lock()
        self._known: LRUCache[tuple[int, int], Grid | str] = LRUCache(MAX_SIZES)

    def __str__(self) -> str:
        return f"rows counted by the server, at most {self.max_tokens} an image"

    def at_once(self, width: int, height: int) -> bool:
        """Whether the rows of this size are known already."""
        with self._lock:
            return (width, height) in self._known

    def grid(self, width: int, height: int) -> Grid:
        """Return the grid of rows; raises `InvalidImageError` for a size that the model does not take."""
        with self._lock:
            found = self._known.get((width, height))
        if found is None:
            found = self.counted(width, height)
            with self._lock:
                self._known[width, height] = found
        if isinstance(found, str):
            raise InvalidImageError(found)
        return found

    def tokens(self, grid: Grid) -> int:
        """Return the rows in a grid."""
        return grid.patches

    def has(self, grid: Grid) -> bool:
        """Whether an image may have this grid."""
        return grid.t == 1 and min(grid) > 0 and grid.patches <= self.max_tokens

    def variant(self, min_pixels: int = 0, max_pixels: int = 0) -> "CountedRows":
        """Return this rule; raises `ImageLimitError` for any variant, as there are none."""
        if min_pixels or max_pixels:
            raise ImageLimitError("this model has no variants: leave min_pixels and max_pixels out")
        return self

    def counted(self, width: int, height: int) -> Grid | str:
        """Count the rows of this size; return why there are none. Raises an error that may not come again."""
        try:
            grid = self._count(width, height)
        except (MemoryError, torch.OutOfMemoryError):
            raise  # it may succeed later
        except Exception as error:  # noqa: BLE001 - a family's code, on a size that anyone may send
            return refusal(width, height, error)
        if not self.has(grid):
            return (
                f"an image of {width}x{height} pixels has {grid.patches} rows; from 1 to {self.max_tokens} are"
                " served"
            )
        return grid


def refusal(width: int, height: int, error: Exception) -> str:
    """Return the message for an image of this size that the model's processor failed on."""
    why = f"{type(error).__name__}: {one_line(error)}"
    return f"the model's image processor refuses an image of {width}x{height} pixels: {why}"


def one_line(error: Exception) -> str:
    """Return what an error says, in one line."""
    return " ".join(str(error).split())[:MAX_REASON]


# Rows in a batch, whose images run one after another: a batch is what one device hands to the copy-out at a time.
BATCH_ROWS = {"cpu": 256, "cuda": 4096}
ROWS_AHEAD = 4096  # in bfloat16 about 80 MB of inputs; 154 MB of Gemma 3, whose rows are of 16 patches
# What is encoded at start: what a model says of sizes is compared with what it does.
PROBES = ((448, 448), (640, 480), (300, 900))
LARGE_PROBE = (2048, 2048)  # on a GPU, for the memory plan


class OneByOne(ABC):
    """A `VisionModel` that encodes one image a call, so that its bits never depend on others.

    A family defines `rows`, `prepare_image` and `encode_image`. On the server's threads `rows` and `prepare_image` run
    at the same time as the others.
    """

    graph_batches = 0
    eager_batches = 0
    takes_frames = False
    padding_patches = 0
    attention = "the family's"
    forward_bytes = 0
    table_bytes = 0

    def __init__(
        self, options: LoadOptions, *, model_type: str, hidden: int, levels: int = 0, recipe: Recipe
    ) -> None:
        """Raise `ValueError` for options that only the server's own towers have."""
        if options.precision != "full" or options.attention != "auto":
            raise ValueError(
                f"model_type {model_type!r} has no tower of the server's own:"
                " leave out --tower-precision and --attention"
            )
        self.model_type, self.hidden, self.levels, self.recipe = model_type, hidden, levels, recipe
        self.device, self.dtype = torch.device(options.device), DTYPES[options.dtype]
        self.batch_patches = options.batch_patches or BATCH_ROWS[self.device.type]
        self.ahead_patches = 2 * max(self.batch_patches, ROWS_AHEAD)
        self.geometry: GridRule = CountedRows(self.grid)
        self._flops_per_row = 0.0

    @abstractmethod
    def rows(self, width: int, height: int) -> int:
        """Return how many rows an image of this size has; any exception refuses the size."""

    def grid(self, width: int, height: int) -> Grid:
        """Return (1, rows, 1), or (1, h, w) for rows that are h lines of w, as some engines must know."""
        return Grid(1, self.rows(width, height), 1)

    @abstractmethod
    def prepare_image(self, pixels: Tensor) -> Inputs:
        """Return what `encode_image` takes of pixels, uint8 [H, W, 3]; any exception fails this image alone."""

    @abstractmethod
    def encode_image(self, inputs: Any) -> Tensor:
        """Return the rows [rows, width] of an image in `dtype` on `device`. Runs in inference mode."""

    @property
    def width(self) -> int:
        """Values in a row."""
        return self.hidden * (1 + self.levels)

    @property
    def batch_bytes(self) -> int:
        """Rows of a batch on the device; inputs wait on the host."""
        return self.batch_patches * self.width * self.dtype.itemsize

    def flops(self, grid: Grid) -> int:
        """Estimate an image's operations by its rows, from what `warm_up` counted."""
        return round(self._flops_per_row * grid.patches)

    def inputs(self, pixels: Sequence[Tensor], grids: Sequence[Grid]) -> list[Inputs]:  # noqa: ARG002
        """See `VisionModel`."""
        return [self._prepared(image) for image in pixels]

    def prepare(self, grid: Grid) -> None:  # noqa: B027 - the default of a family without tables
        """Do nothing: there are no tables by grid."""

    def encode(
        self, inputs: Sequence[Any], grids: Sequence[Grid], between: Callable[[], None] = lambda: None
    ) -> list[Tensor]:
        """See `VisionModel`. Raises `ValueError` for rows that are not as many as the image's size promised."""
        encoded = []
        for image, grid in zip(inputs, grids, strict=True):
            between()
            with torch.inference_mode():
                rows = self.encode_image(image)
            if rows.shape != (grid.patches, self.width) or rows.dtype is not self.dtype:
                raise ValueError(
                    f"model_type {self.model_type!r} made {tuple(rows.shape)} {rows.dtype} of an image whose size"
                    f" promised {(grid.patches, self.width)} {self.dtype}"
                )
            self.eager_batches += 1
            encoded.append(rows)
        return encoded

    def warm_up(self) -> None:
        """Encode images of a few sizes, and count operations and memory; raises `ValueError` if a promise is broken."""
        if self.device.type == "cuda":
            torch.cuda.reset_peak_memory_stats(self.device)
            before = torch.cuda.memory_allocated(self.device)
        for width, height in PROBES if self.device.type == "cpu" else (*PROBES, LARGE_PROBE):
            try:
                grid = self.geometry.grid(width, height)
                prepared = self._prepared(torch.zeros(height, width, 3, dtype=torch.uint8))
            except EncoderError as error:
                raise ValueError(f"at start: {error}") from error
            with FlopCounterMode(display=False) as counter:
                self.encode([prepared], [grid])
            self._flops_per_row = counter.get_total_flops() / grid.patches
        if self.device.type == "cuda":
            self.forward_bytes = torch.cuda.max_memory_allocated(self.device) - before
        self.eager_batches = 0

    def _prepared(self, image: Tensor) -> Inputs:
        try:
            return self.prepare_image(image)
        except (EncoderError, MemoryError, torch.OutOfMemoryError):
            raise
        except Exception as error:
            if self.device.type == "cuda":
                torch.cuda.current_stream(self.device).synchronize()  # raises if the device is lost
            raise InvalidImageError(refusal(image.shape[1], image.shape[0], error)) from error
