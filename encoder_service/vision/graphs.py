"""CUDA graphs for a bounded set of patch budgets: one launch for a whole forward, with the segment bounds as data."""

import logging
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import partial
from typing import Protocol

import torch
from torch import Tensor

from encoder_contract.tower_spec import TowerSpec
from encoder_service.vision.layers import PackedBatch, Segments, pinned_for, running_bounds

logger = logging.getLogger(__name__)

# Runs a forward over inputs at fixed addresses and returns its rows, which the next run overwrites.
Run = Callable[[], Tensor]

# Graphs whose capture failed, kept alive. A graph whose capture CUDA invalidated must not be destroyed, because torch's
# allocator of pinned host memory still refers to it.
_failed_graphs: "list[torch.cuda.CUDAGraph]" = []


class CudaCapture:
    """Captures runs as CUDA graphs that share their memory.

    All captures use one stream, because libraries keep a workspace for every stream that they were called on.
    """

    def __init__(self, device: torch.device) -> None:
        self._pool = torch.cuda.graph_pool_handle()
        self._stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]

    def __call__(self, run: Run) -> Run:
        """Return a run of the same kernels over the same inputs in one launch. Raises the libraries' errors."""
        current = torch.cuda.current_stream(self._stream.device)
        self._stream.wait_stream(current)
        graph = torch.cuda.CUDAGraph()
        try:
            with torch.cuda.stream(self._stream):
                for _ in range(2):  # in their first calls libraries choose kernels and allocate workspaces
                    run()
                # CUDA calls of other threads (such as DALI's) then do not invalidate the capture.
                with torch.cuda.graph(
                    graph, pool=self._pool, stream=self._stream, capture_error_mode="thread_local"
                ):
                    rows = run()
        except Exception:
            _failed_graphs.append(graph)
            self._end_allocation()
            raise
        current.wait_stream(self._stream)

        def replay() -> Tensor:
            graph.replay()
            return rows

        return replay

    def _end_allocation(self) -> None:
        """Tell torch's allocator that the capture has ended; torch itself does not if CUDA invalidated the capture.

        Otherwise the allocator would refuse the next capture into the same memory. It would also keep all memory that
        crosses streams, as if a capture were running.
        """
        with suppress(RuntimeError):  # torch has told the allocator: CUDA did not invalidate the capture
            torch._C._cuda_endAllocateToPool(self._stream.device_index, self._pool)
            torch._C._cuda_releasePool(self._stream.device_index, self._pool)
        self._pool = torch.cuda.graph_pool_handle()


# Powers of two, steps halfway between them, and the patches of common photos at 16 pixels a patch (960×1280, 1280×720,
# 1920×1080, 2560×1440). A larger forward takes so long that its launches are hidden behind it.
PATCH_BUDGETS = (256, 512, 768, 1024, 1536, 2048, 3072, 3520, 4096, 4800, 6144, 8160, 14400)

# Several images have more sums than one has sizes: above 2048 patches, a budget for each number of images of 256×256.
BATCH_BUDGETS = (512, 768, 1024, 1536, *range(2048, 5633, 256))

# Padding is computed like any patch. Up to `SMALL_PATCHES` a padded forward takes the device about as long as the host
# needs to launch the kernels of an eager forward one by one (estimates: 5.1 to 6.9 ms, and 5.8 ms), and leaves the host
# to the decoder. Above, padding is only lost time.
SMALL_PATCHES = 2560
MAX_PADDING_SHARE = 0.03

# The fewest patches an image, on average, of a batch that fills a graph: its slots for segments. Empty slots cost a
# persistent attention nothing.
PATCHES_PER_IMAGE = 256
PATCHES_PER_IMAGE_PERSISTENT = 64

# The longest image in a graph for several images, if attention launches work for `segments` × `longest`.
LONGEST_OF_SEVERAL = 1024

# A window of Qwen2.5-VL has 64 patches, and fewer where an edge cuts it. These leave room for cut windows.
_PATCHES_PER_WINDOW_SLOT = 32
_SPARE_WINDOW_SLOTS = 64


class Forward(Protocol):
    """A tower's forward."""

    def __call__(
        self, packs: Sequence[Tensor], layouts: Sequence[PackedBatch], *, into: Sequence[Tensor]
    ) -> Sequence[Tensor]:
        """Return the rows of each pack, written to the tensors of `into`."""


@dataclass(frozen=True, slots=True)
class GraphShape:
    """What one graph can hold: packed patches, image segments, and patches in the longest segment."""

    patches: int
    segments: int
    longest: int

    def fits(self, lengths: Sequence[int]) -> bool:
        """Whether images of these lengths in patches may run in the graph: they fit, without too much padding."""
        padding = self.patches - sum(lengths)
        if padding < 0 or max(lengths) > self.longest:
            return False
        if self.patches > SMALL_PATCHES and padding > MAX_PADDING_SHARE * sum(lengths):
            return False
        return len(lengths) + _pieces(padding, self.longest) <= self.segments


def budgets(image: int, batch: int, *, persistent: bool) -> list[GraphShape]:
    """Return the budgets to capture, smallest first, for images of up to `image` and batches of up to `batch` patches.

    `persistent` is that of the attention. If it is, empty segments and long ones cost nothing, so each budget takes
    one image or several, large ones and small ones. Otherwise attention launches work for `segments` × `longest`, most
    of it empty: there are budgets for one image and its padding, and others for several small images. A batch that
    fits no graph runs eagerly.
    """
    single = [patches for patches in PATCH_BUDGETS if patches <= image]
    several = [patches for patches in BATCH_BUDGETS if patches <= min(image, batch)]
    if persistent:
        several = sorted({*several, *(patches for patches in single if patches <= batch)})
        single = [patches for patches in single if patches > batch]
    longest = image if persistent else LONGEST_OF_SEVERAL
    fewest = PATCHES_PER_IMAGE_PERSISTENT if persistent else PATCHES_PER_IMAGE
    shapes = [GraphShape(patches, 2, patches) for patches in single]
    shapes += [GraphShape(patches, patches // fewest + 4, min(patches, longest)) for patches in several]
    return sorted(shapes, key=lambda budget: (budget.patches, budget.segments))


def padded_lengths(lengths: Sequence[int], total: int, longest: int, slots: int) -> list[int]:
    """Fill `lengths` up to `total` with padding segments of at most `longest`, then up to `slots` with empty ones.

    Padding attends only to itself and consists of zeros, so all its values stay finite.
    """
    padding = total - sum(lengths)
    pieces = [min(longest, padding - begin) for begin in range(0, padding, longest)]
    padded = [*lengths, *pieces]
    assert len(padded) <= slots
    return padded + [0] * (slots - len(padded))


class StaticBatch:
    """The inputs and rows of one graph, at fixed addresses. Batches are copied in and padded."""

    def __init__(self, budget: GraphShape, patches: Tensor, layout: PackedBatch, rows: Tensor) -> None:
        self.budget = budget
        self.patches = patches
        self.layout = layout
        self.rows = rows

    def fits(self, layout: PackedBatch) -> bool:
        """Whether a batch of this layout fits, including its windows, without too much padding."""
        static, windows = self.layout.windows, layout.windows
        fits = self.budget.fits(layout.segments.lengths)
        if not fits or static is None or windows is None:
            return fits
        needed = len(windows.lengths) + _pieces(self.budget.patches - layout.patches, static.longest)
        return needed < len(static.bounds)

    def fill_with_padding(self) -> None:
        """Fill the whole batch with padding."""
        self.patches.zero_()
        for order in (self.layout.order, self.layout.inverse):
            if order is not None:
                torch.arange(len(order), out=order)
        for static in (self.layout.segments, self.layout.windows):
            if static is not None:
                self._load_bounds(static, ())

    def load(self, patches: Sequence[Tensor], layout: PackedBatch) -> None:
        """Copy a batch in and pad the rest. No image attends to padding."""
        static, used = self.layout, layout.patches
        torch.cat(list(patches), out=self.patches[:used])
        self.patches[used:].zero_()
        static.rotations[:used].copy_(layout.rotations)
        if static.position is not None and layout.position is not None:
            static.position[:used].copy_(layout.position)
        for target, source in ((static.order, layout.order), (static.inverse, layout.inverse)):
            if target is not None and source is not None:
                target[: len(source)].copy_(source)
                torch.arange(len(source), len(target), out=target[len(source) :])
        self._load_bounds(static.segments, layout.segments.lengths)
        if static.windows is not None and layout.windows is not None:
            self._load_bounds(static.windows, layout.windows.lengths)

    def _load_bounds(self, static: Segments, lengths: Sequence[int]) -> None:
        slots = len(static.bounds) - 1
        padded = padded_lengths(lengths, self.budget.patches, static.longest, slots)
        bounds = pinned_for(running_bounds(padded), static.bounds.device)
        static.bounds.copy_(bounds, non_blocking=True)


class StaticMemory:
    """One set of inputs and rows that all graphs share. A budget uses the first patches, rows and bounds.

    Only one graph runs at a time. Each batch is copied in, and its rows are copied out before the next. The padding
    behind a batch has the rotations and positions of earlier batches.
    """

    def __init__(
        self, example: PackedBatch, spec: TowerSpec, dtype: torch.dtype, wanted: Sequence[GraphShape]
    ) -> None:
        """Allocate for the largest budget. `example` is any layout of the tower, `dtype` the type of its rows."""
        patches = max(budget.patches for budget in wanted)
        device, rows = example.rotations.device, patches // spec.merge_unit
        rotations, position = example.rotations, example.position
        self._spec = spec
        self._patches = torch.zeros(patches, spec.patch_values, dtype=torch.uint8, device=device)
        self._bounds = torch.zeros(
            1 + max(budget.segments for budget in wanted), dtype=torch.int32, device=device
        )
        self._windows = torch.zeros(1 + _window_slots(patches), dtype=torch.int32, device=device)
        self._rows = torch.zeros(rows, spec.width, dtype=dtype, device=device)
        self._layout = replace(
            example,
            rotations=rotations.new_zeros(patches, *rotations.shape[1:]),
            position=None if position is None else position.new_zeros(patches, spec.embed),
            order=None if example.order is None else torch.arange(rows, device=device),
            inverse=None if example.inverse is None else torch.arange(rows, device=device),
        )

    def of(self, budget: GraphShape) -> StaticBatch:
        """Return the inputs and rows of the graph of `budget`, filled with padding."""
        whole, rows = self._layout, budget.patches // self._spec.merge_unit
        windows = None
        if self._spec.window:
            slots = _window_slots(budget.patches)
            windows = _static(budget.patches, self._spec.window**2, self._windows[: slots + 1])
        layout = replace(
            whole,
            rotations=whole.rotations[: budget.patches],
            position=None if whole.position is None else whole.position[: budget.patches],
            segments=_static(budget.patches, budget.longest, self._bounds[: budget.segments + 1]),
            windows=windows,
            order=None if whole.order is None else whole.order[:rows],
            inverse=None if whole.inverse is None else whole.inverse[:rows],
        )
        batch = StaticBatch(budget, self._patches[: budget.patches], layout, self._rows[:rows])
        batch.fill_with_padding()
        return batch


class Graphs:
    """Captured forwards over one set of inputs and rows. Not thread-safe: use on one stream."""

    def __init__(
        self,
        forward: Forward,
        spec: TowerSpec,
        example: PackedBatch,
        dtype: torch.dtype,
        wanted: Sequence[GraphShape],
        capture: Callable[[Run], Run],
    ) -> None:
        """Capture the `wanted` budgets. A budget that cannot be captured is logged, and its batches run eagerly.

        `example` is any layout of the tower, for its dtypes; `dtype` is the type of the rows. `capture` is a
        `CudaCapture`, or any function that returns a run of the same forward over the same inputs.
        """
        started = time.perf_counter()
        self._unit = spec.merge_unit
        self.padding_patches = 0  # a counter of the patches computed only to fill a graph's shape
        self._captured: list[tuple[StaticBatch, Run]] = []
        if not wanted:
            return
        memory = StaticMemory(example, spec, dtype, wanted)
        # Largest first, so that smaller graphs reuse its memory.
        for budget in reversed(wanted):
            batch = memory.of(budget)
            try:
                replay = capture(partial(_forward, forward, batch))
            except Exception as error:  # libraries raise many types, and a forward also runs without a graph
                logger.warning(
                    "no CUDA graph of %d patches: such batches run eagerly", budget.patches, exc_info=error
                )
                continue
            self._captured.insert(0, (batch, replay))
        spent_s = time.perf_counter() - started
        logger.info("CUDA graphs: %d of %d captured in %.1f s", len(self._captured), len(wanted), spent_s)

    def run(self, patches: Sequence[Tensor], layout: PackedBatch) -> Tensor | None:
        """Replay the smallest graph that holds the batch and return its rows; None if no graph holds it.

        The rows are a copy, because the next replay of any graph overwrites the rows of this one.
        """
        if (found := self.for_batch(layout)) is None:
            return None
        batch, replay = found
        batch.load(patches, layout)
        rows = replay()
        self.padding_patches += batch.budget.patches - layout.patches
        return rows[: layout.patches // self._unit].clone()

    def for_batch(self, layout: PackedBatch) -> tuple[StaticBatch, Run] | None:
        """Return the inputs and the replay of the smallest graph that holds the batch; None if no graph holds it."""
        return next((each for each in self._captured if each[0].fits(layout)), None)


def _forward(forward: Forward, batch: StaticBatch) -> Tensor:
    [rows] = forward([batch.patches], [batch.layout], into=[batch.rows])
    return rows


def _static(patches: int, longest: int, bounds: Tensor) -> Segments:
    lengths = padded_lengths([], patches, longest, len(bounds) - 1)
    return Segments(tuple(lengths), bounds, longest)


def _window_slots(patches: int) -> int:
    return patches // _PATCHES_PER_WINDOW_SLOT + _SPARE_WINDOW_SLOTS


def _pieces(padding: int, longest: int) -> int:
    return -(-padding // longest)
