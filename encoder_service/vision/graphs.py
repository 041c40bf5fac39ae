"""CUDA graphs over a bounded set of patch budgets: one launch for a whole forward, segment bounds as data."""

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
from encoder_service.vision.layers import Layout, Segments, running_bounds

logger = logging.getLogger(__name__)

# A run over inputs that stay where they are: returns its rows, which the next run overwrites.
Run = Callable[[], Tensor]

# Graphs whose capture failed. One that CUDA broke off may not be destroyed: torch's allocator of pinned host memory
# still refers to it.
_broken_off: "list[torch.cuda.CUDAGraph]" = []


class CudaCapture:
    """Captures runs as CUDA graphs that share their memory.

    All on one stream: libraries keep a workspace for every stream that they were called on.
    """

    def __init__(self, device: torch.device) -> None:
        self._pool = torch.cuda.graph_pool_handle()
        self._stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]

    def __call__(self, run: Run) -> Run:
        """Return what runs the same kernels over the same inputs, in one launch; raises what the libraries do."""
        current = torch.cuda.current_stream(self._stream.device)
        self._stream.wait_stream(current)
        graph = torch.cuda.CUDAGraph()
        try:
            with torch.cuda.stream(self._stream):
                for _ in range(2):  # libraries choose kernels and take workspaces on their first calls
                    run()
                # What other threads (such as DALI's) do at the same time does not end the capture.
                with torch.cuda.graph(
                    graph, pool=self._pool, stream=self._stream, capture_error_mode="thread_local"
                ):
                    rows = run()
        except Exception:
            _broken_off.append(graph)
            self._end_recording()
            raise
        current.wait_stream(self._stream)

        def replay() -> Tensor:
            graph.replay()
            return rows

        return replay

    def _end_recording(self) -> None:
        """Tell torch's allocator that a capture has ended, which torch itself omits when CUDA broke it off.

        It would take the next capture into the same memory for a mistake, and keep all memory that crosses streams in
        the belief that a capture is under way.
        """
        with suppress(RuntimeError):  # it knows: CUDA did not break it off
            torch._C._cuda_endAllocateToPool(self._stream.device_index, self._pool)
            torch._C._cuda_releasePool(self._stream.device_index, self._pool)
        self._pool = torch.cuda.graph_pool_handle()


# Powers of two, half-way steps, and what common photos come to at 16-pixel patches (960×1280, 1280×720, 1920×1080,
# 2560×1440). Above the largest a forward is long enough that its launches hide behind it.
PATCH_BUDGETS = (256, 512, 768, 1024, 1536, 2048, 3072, 3520, 4096, 4800, 6144, 8160, 14400)

# Padding is computed like any patch: up to this share of a batch it costs less than launching the kernels one by
# one. Under `SMALL_PATCHES` the device waits for launches whatever it pads; above `LARGE_PATCHES` it is busy for
# longer than an eager forward takes to launch, and padding is only lost time.
MAX_PADDING_SHARE = 0.25
MAX_LARGE_PADDING_SHARE = 0.03
SMALL_PATCHES = 1024
LARGE_PATCHES = 2048

# A window of Qwen2.5-VL has 64 patches, cut ones at the edges fewer; this leaves room for the cut ones.
_PATCHES_PER_WINDOW_SLOT = 32
_SPARE_WINDOW_SLOTS = 64


class Forward(Protocol):
    """A tower's forward."""

    def __call__(
        self, packs: Sequence[Tensor], layouts: Sequence[Layout], *, into: Sequence[Tensor]
    ) -> Sequence[Tensor]:
        """Return the rows of each pack, which are written into those of `into`."""


@dataclass(frozen=True, slots=True)
class Budget:
    """What one graph can hold: packed patches, image segments, and patches in the longest segment.

    With a single segment it holds one image of exactly so many patches.
    """

    patches: int
    segments: int
    longest: int

    def fits(self, layout: Layout) -> bool:
        """Whether a batch of this layout may run in the graph: it fits, and not too much of the graph is padding."""
        padding = self.patches - layout.patches
        if padding < 0 or layout.segments.longest > self.longest:
            return False
        if self.patches > SMALL_PATCHES and padding > self._largest_share() * layout.patches:
            return False
        return len(layout.segments.lengths) + _pieces(padding, self.longest) <= self.segments

    def _largest_share(self) -> float:
        return MAX_PADDING_SHARE if self.patches <= LARGE_PATCHES else MAX_LARGE_PADDING_SHARE


def budgets(image: int, batch: int) -> list[Budget]:
    """The budgets to capture for images and batches of at most so many patches, smallest first.

    For each number of patches one for a single image, and one for several up to the size of a batch; where an image is
    worth attention of its own, one for a single image without padding. Attention launches work for `segments` ×
    `longest`, most of it empty, so a graph for many images takes small ones only; a batch that fits none runs eagerly.
    """
    sizes = [patches for patches in PATCH_BUDGETS if patches <= image]
    exact = [Budget(patches, 1, patches) for patches in sizes if patches > LARGE_PATCHES]
    single = [Budget(patches, 2, patches) for patches in sizes]
    several = [
        Budget(patches, patches // 256 + 4, min(patches, 1024))
        for patches in sizes
        if 512 <= patches <= batch
    ]
    return sorted(exact + single + several, key=lambda budget: (budget.patches, budget.segments))


def padded_lengths(lengths: Sequence[int], total: int, longest: int, slots: int) -> list[int]:
    """Lengths filled up to `total` by padding segments of at most `longest`, then by empty ones up to `slots`.

    Padding attends only to itself and consists of zeros, so all its values stay finite.
    """
    padding = total - sum(lengths)
    pieces = [min(longest, padding - begin) for begin in range(0, padding, longest)]
    filled = [*lengths, *pieces]
    assert len(filled) <= slots
    return filled + [0] * (slots - len(filled))


class StaticBatch:
    """The inputs and rows of one graph, of fixed address and size; batches are copied in and padded."""

    def __init__(self, budget: Budget, patches: Tensor, layout: Layout, rows: Tensor) -> None:
        self.budget = budget
        self.patches = patches
        self.layout = layout
        self.rows = rows

    def fits(self, layout: Layout) -> bool:
        """Whether a batch of this layout fits, its windows included, without too much padding."""
        static, windows = self.layout.windows, layout.windows
        if not self.budget.fits(layout) or static is None or windows is None:
            return self.budget.fits(layout)
        needed = len(windows.lengths) + _pieces(self.budget.patches - layout.patches, static.longest)
        return needed < len(static.bounds)

    def fill_with_padding(self) -> None:
        """Make all of it padding."""
        self.patches.zero_()
        for order in (self.layout.order, self.layout.inverse):
            if order is not None:
                torch.arange(len(order), out=order)
        for static in (self.layout.segments, self.layout.windows):
            if static is not None:
                self._load_bounds(static, ())

    def load(self, patches: Sequence[Tensor], layout: Layout) -> None:
        """Copy a batch in; the rest is padding, which no image attends to."""
        static, used = self.layout, layout.patches
        torch.cat(list(patches), out=self.patches[:used])
        self.patches[used:].zero_()
        static.rotations[:used].copy_(layout.rotations)
        if static.position is not None and layout.position is not None:
            static.position[:used].copy_(layout.position)
        for kept, given in ((static.order, layout.order), (static.inverse, layout.inverse)):
            if kept is not None and given is not None:
                kept[: len(given)].copy_(given)
                torch.arange(len(given), len(kept), out=kept[len(given) :])
        self._load_bounds(static.segments, layout.segments.lengths)
        if static.windows is not None and layout.windows is not None:
            self._load_bounds(static.windows, layout.windows.lengths)

    def _load_bounds(self, static: Segments, lengths: Sequence[int]) -> None:
        slots = len(static.bounds) - 1
        padded = padded_lengths(lengths, self.budget.patches, static.longest, slots)
        static.bounds.copy_(running_bounds(padded, static.bounds.device))


class StaticMemory:
    """One set of inputs and of rows for all graphs: those of a budget are its first patches, rows and bounds.

    Only one graph runs at a time, every batch is copied in anew, and its rows are copied out before the next. What lies
    behind a batch is padding with the rotations and positions of earlier ones.
    """

    def __init__(
        self, example: Layout, spec: TowerSpec, dtype: torch.dtype, chosen: Sequence[Budget]
    ) -> None:
        """Make them for the largest of `chosen`; `example` is any layout of the tower's, `dtype` that of its rows."""
        patches = max(budget.patches for budget in chosen)
        device, rows = example.rotations.device, patches // spec.merge_unit
        rotations, position = example.rotations, example.position
        self._spec = spec
        self._patches = torch.zeros(patches, spec.patch_values, dtype=torch.uint8, device=device)
        self._bounds = torch.zeros(
            1 + max(budget.segments for budget in chosen), dtype=torch.int32, device=device
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

    def of(self, budget: Budget) -> StaticBatch:
        """Return the inputs of the graph of `budget`, filled with padding, and its rows."""
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
    """Captured forwards over one set of inputs and rows; used by one thread on one stream."""

    def __init__(
        self,
        forward: Forward,
        spec: TowerSpec,
        example: Layout,
        dtype: torch.dtype,
        chosen: Sequence[Budget],
        capture: Callable[[Run], Run],
    ) -> None:
        """Capture the budgets that are `chosen`; what cannot be captured is logged and runs eagerly.

        `example` is any layout of the tower's, for its dtypes, and `dtype` that of its rows; `capture` is a
        `CudaCapture`, or whatever returns a run of the same over the same inputs.
        """
        started = time.perf_counter()
        self._unit = spec.merge_unit
        self.padding_patches = 0  # computed so far for a graph's shape only
        self._captured: list[tuple[StaticBatch, Run]] = []
        if not chosen:
            return
        memory = StaticMemory(example, spec, dtype, chosen)
        # Largest first: the smaller ones then reuse its memory.
        for budget in reversed(chosen):
            batch = memory.of(budget)
            try:
                replay = capture(partial(_forward, forward, batch))
            except Exception as error:  # whatever a library raises, a forward still runs without a graph
                logger.warning(
                    "no CUDA graph of %d patches: such batches run eagerly", budget.patches, exc_info=error
                )
                continue
            self._captured.insert(0, (batch, replay))
        spent_s = time.perf_counter() - started
        logger.info("CUDA graphs: %d of %d captured in %.1f s", len(self._captured), len(chosen), spent_s)

    def run(self, patches: Sequence[Tensor], layout: Layout) -> Tensor | None:
        """Replay the smallest graph that holds the batch and return its rows; None if there is none.

        The rows are a copy: the next replay of any graph overwrites what this one wrote.
        """
        if (found := self.for_batch(layout)) is None:
            return None
        batch, replay = found
        batch.load(patches, layout)
        rows = replay()
        self.padding_patches += batch.budget.patches - layout.patches
        return rows[: layout.patches // self._unit].clone()

    def for_batch(self, layout: Layout) -> tuple[StaticBatch, Run] | None:
        """Return the inputs and the replay of the smallest graph that holds the batch; None if there is none."""
        return next((each for each in self._captured if each[0].fits(layout)), None)


def _forward(forward: Forward, batch: StaticBatch) -> Tensor:
    [rows] = forward([batch.patches], [batch.layout], into=[batch.rows])
    return rows


def _static(patches: int, longest: int, bounds: Tensor) -> Segments:
    lengths = padded_lengths([], patches, longest, len(bounds) - 1)
    return Segments(tuple(lengths), bounds, longest, fixed=len(lengths) == 1)


def _window_slots(patches: int) -> int:
    return patches // _PATCHES_PER_WINDOW_SLOT + _SPARE_WINDOW_SLOTS


def _pieces(padding: int, longest: int) -> int:
    return -(-padding // longest)
