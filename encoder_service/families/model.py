"""The interface between the server and a family of vision models (docs/models.md).

A family is a function `load(folder, options) -> VisionModel`. Plug-ins register it in the entry point group
`encoder_service.families`, under the `model_type` of config.json. `OneByOne` implements all of a `VisionModel` but the
parts that are specific to a family.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import Tensor
from torch.utils.flop_counter import FlopCounterMode

from encoder_contract.errors import EncoderError, InvalidImageError
from encoder_contract.geometry import Grid, GridRule
from encoder_service.families.counted_rows import CountedRows, refusal
from encoder_service.keys import Recipe
from encoder_service.vision.load import DTYPES

Inputs = Tensor | Mapping[str, Any]
"""The inputs of a model for one image, made from its pixels: a tensor, or tensors and other values by name."""


def tensors_of(inputs: Inputs) -> list[Tensor]:
    """Return the tensors in the inputs of one image."""
    if isinstance(inputs, Tensor):
        return [inputs]
    return [value for value in inputs.values() if isinstance(value, Tensor)]


@dataclass(frozen=True, slots=True, kw_only=True)
class LoadOptions:
    """How to load a model. A family raises `ValueError` for options that it does not support.

    `device` is "cpu" or "cuda[:n]", `dtype` a key of `DTYPES`. If `batch_patches` is 0, the device decides. The others
    are the server's settings of these names (`graphs`: cuda_graphs).
    """

    device: str
    dtype: str
    attention: str = "auto"
    batch_patches: int = 0
    batch_invariant: bool = False
    graphs: bool = True
    trust_remote_code: bool = False


class VisionModel(Protocol):
    """The loaded vision part of a checkpoint: pixels in, the rows that the language model merges out.

    A row has `width` = `hidden` × (1 + `levels`) values in `dtype`: the language model's width, and as many for each
    DeepStack level. `geometry` tells from an image's size alone how many rows it has. `recipe` identifies everything
    that decides a row's bits: weights, configuration, image processor, and the versions of code that is not the
    server's. `batch_patches` bounds a batch. `graph_batches` and `eager_batches` count batches since the start, for
    metrics.
    """

    dtype: torch.dtype
    batch_patches: int
    graph_batches: int
    eager_batches: int
    takes_frames: bool
    """Whether `inputs` also takes two frames of a video, uint8 [2, H, W, 3], as one image."""

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
        """How many patches, as grids count them, may be prepared ahead of the tower. This bounds their memory."""
        ...

    @property
    def forward_bytes(self) -> int:
        """The most bytes that a forward takes on a GPU beside the weights, for the memory plan."""
        ...

    @property
    def batch_bytes(self) -> int:
        """The most bytes that a batch takes on a GPU outside of its forward: its inputs before it, its rows after."""
        ...

    @property
    def table_bytes(self) -> int:
        """The most bytes of tables by grid that the model keeps on a GPU."""
        ...

    def flops(self, grid: Grid) -> int:
        """Return an estimate of the floating-point operations of an image, for metrics."""
        ...

    def inputs(self, pixels: Sequence[Tensor], grids: Sequence[Grid]) -> Sequence[Inputs]:
        """Return the inputs of `encode` for each image; `pixels` are uint8 [H, W, 3]. Called on several threads.

        Raises `InvalidImageError` if an image cannot be encoded. The caller then tries several images one by one.
        """
        ...

    def prepare(self, grid: Grid) -> None:
        """Compute ahead what `encode` needs for a grid; called on another thread."""
        ...

    def encode(
        self, inputs: Sequence[Any], grids: Sequence[Grid], between: Callable[[], None] = lambda: None
    ) -> list[Tensor]:
        """Return each image's rows [geometry.tokens(grid), width]; called on one thread.

        On the CPU, and with the option `batch_invariant`, the bits of an image's rows do not depend on the other
        images. The model may call `between` at any point; `between` may call `encode` for other images.
        """
        ...


Load = Callable[[Path, LoadOptions], VisionModel]

# Rows in a batch. Its images run one after another; then the device hands the batch to the copy-out.
BATCH_ROWS = {"cpu": 256, "cuda": 4096}
ROWS_AHEAD = 4096  # in bfloat16 about 80 MB of inputs; 154 MB for Gemma 3, whose rows have 16 patches
# Image sizes that are encoded at start, to compare the model's row counts with its rows.
PROBES = ((448, 448), (640, 480), (300, 900))
LARGE_PROBE = (2048, 2048)  # on a GPU, for the memory plan


class OneByOne(ABC):
    """A `VisionModel` that encodes one image a call, so that its rows never depend on other images.

    A family defines `rows`, `prepare_image` and `encode_image`. The server's threads call `rows` and `prepare_image`
    at the same time as the other methods.
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
        if options.attention != "auto":
            raise ValueError(
                f"the server has no tower of its own for model_type {model_type!r}: leave out --attention"
            )
        self.model_type, self.hidden, self.levels, self.recipe = model_type, hidden, levels, recipe
        self.device, self.dtype = torch.device(options.device), DTYPES[options.dtype]
        self.batch_patches = options.batch_patches or BATCH_ROWS[self.device.type]
        self.ahead_patches = 2 * max(self.batch_patches, ROWS_AHEAD)
        self.geometry: GridRule = CountedRows(self._counted)
        self._flops_per_row = 0.0

    @abstractmethod
    def rows(self, width: int, height: int) -> int:
        """Return the number of rows of an image of this size. Any exception refuses the size."""

    def grid(self, width: int, height: int) -> Grid:
        """Return (1, rows, 1); or (1, h, w) if the rows are h lines of w, which some engines need to know."""
        return Grid(1, self.rows(width, height), 1)

    def _counted(self, width: int, height: int) -> Grid:
        try:
            return self.grid(width, height)
        except torch.OutOfMemoryError as error:
            raise MemoryError(str(error)) from error  # a retry may succeed

    @abstractmethod
    def prepare_image(self, pixels: Tensor) -> Inputs:
        """Return the inputs of `encode_image` for pixels uint8 [H, W, 3]. Any exception fails only this image."""

    @abstractmethod
    def encode_image(self, inputs: Any) -> Tensor:
        """Return the rows [rows, width] of an image in `dtype` on `device`. Runs in inference mode."""

    @property
    def width(self) -> int:
        """The number of values in a row."""
        return self.hidden * (1 + self.levels)

    @property
    def batch_bytes(self) -> int:
        """The rows of a batch on the device; its inputs wait on the host."""
        return self.batch_patches * self.width * self.dtype.itemsize

    def flops(self, grid: Grid) -> int:
        """Estimate the operations of an image by its rows, from those that `warm_up` counted."""
        return round(self._flops_per_row * grid.patches)

    def inputs(self, pixels: Sequence[Tensor], grids: Sequence[Grid]) -> list[Inputs]:  # noqa: ARG002
        """See `VisionModel`."""
        return [self._prepared(image) for image in pixels]

    def prepare(self, grid: Grid) -> None:  # noqa: B027 - the default of a family without tables
        """Do nothing: this model has no tables by grid."""

    def encode(
        self, inputs: Sequence[Any], grids: Sequence[Grid], between: Callable[[], None] = lambda: None
    ) -> list[Tensor]:
        """See `VisionModel`. Raises `ValueError` if an image has other rows than its size promised."""
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
        """Encode images of a few sizes and measure operations and memory.

        Raises `ValueError` if an image has other rows than its size promised.
        """
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
