"""CUDA graphs over a bounded set of patch budgets: one launch for a whole forward, segment bounds as data."""

import logging
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from encoder_service.vision.attention import Segments, running_bounds
from encoder_service.vision.layers import Layout
from encoder_service.vision.spec import TowerSpec

logger = logging.getLogger(__name__)

# Powers of two, half-way steps, and what common photos come to at 16-pixel patches (960×1280, 1280×720, 1920×1080,
# 2560×1440). Above the largest a forward is long enough that its launches hide behind it.
PATCH_BUDGETS = (256, 512, 768, 1024, 1536, 2048, 3072, 3520, 4096, 4800, 6144, 8160, 14400)

# Padding is computed like any patch: up to this share of a batch it costs less than launching the kernels one by
# one; under `SMALL_PATCHES` the device waits for launches anyway.
MAX_PADDING_SHARE = 0.25
SMALL_PATCHES = 1024

# A window of Qwen2.5-VL has 64 patches, cut ones at the edges fewer; this leaves room for the cut ones.
_PATCHES_PER_WINDOW_SLOT = 32
_SPARE_WINDOW_SLOTS = 64


# A tower's forward: (packs, their layouts) → the rows of each.
Forward = Callable[[Sequence[Tensor], Sequence[Layout]], list[Tensor]]


@dataclass(frozen=True, slots=True)
class Budget:
    """What one graph can hold: packed patches, image segments, and patches in the longest segment."""

    patches: int
    segments: int
    longest: int

    def fits(self, layout: Layout) -> bool:
        """Whether a batch of this layout may run in the graph: it fits, and not too much of the graph is padding."""
        padding = self.patches - layout.patches
        if padding < 0 or layout.segments.longest > self.longest:
            return False
        if padding > MAX_PADDING_SHARE * layout.patches and self.patches > SMALL_PATCHES:
            return False
        return len(layout.segments.lengths) + _pieces(padding, self.longest) <= self.segments


def budgets(largest: int) -> list[Budget]:
    """The budgets to capture, smallest first: for each number of patches one for a single image, one for several.

    Attention launches work for `segments` × `longest`, most of it empty, so a graph for many images takes small ones
    only; a batch that fits neither runs eagerly.
    """
    sizes = [patches for patches in PATCH_BUDGETS if patches <= largest]
    single = [Budget(patches, 2, patches) for patches in sizes]
    several = [Budget(patches, patches // 256 + 4, min(patches, 1024)) for patches in sizes if patches >= 512]
    return sorted(single + several, key=lambda budget: (budget.patches, budget.segments))


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
    """The inputs of one graph, of fixed address and size; batches are copied in and padded."""

    def __init__(self, example: Layout, budget: Budget, spec: TowerSpec) -> None:
        """Make them, filled with padding: black patches without rotation or position, rows in their own order."""
        device, rows = example.rotary.device, budget.patches // spec.merge_unit
        rotary, position = example.rotary, example.position
        windows = None
        if spec.window:
            slots = budget.patches // _PATCHES_PER_WINDOW_SLOT + _SPARE_WINDOW_SLOTS
            windows = _static_segments(budget.patches, spec.window**2, slots, device)
        self.budget = budget
        self.patches = torch.zeros(budget.patches, spec.patch_values, dtype=torch.uint8, device=device)
        self.layout = replace(
            example,
            rotary=rotary.new_ones(budget.patches, *rotary.shape[1:]),
            position=None if position is None else position.new_zeros(budget.patches, spec.embed),
            segments=_static_segments(budget.patches, budget.longest, budget.segments, device),
            windows=windows,
            order=None if example.order is None else torch.arange(rows, device=device),
            inverse=None if example.inverse is None else torch.arange(rows, device=device),
        )

    def fits(self, layout: Layout) -> bool:
        """Whether a batch of this layout fits, its windows included, without too much padding."""
        static, windows = self.layout.windows, layout.windows
        if not self.budget.fits(layout) or static is None or windows is None:
            return self.budget.fits(layout)
        needed = len(windows.lengths) + _pieces(self.budget.patches - layout.patches, static.longest)
        return needed < len(static.bounds)

    def load(self, patches: Sequence[Tensor], layout: Layout) -> None:
        """Copy a batch in; the rest is padding, which no image attends to."""
        static, used = self.layout, layout.patches
        torch.cat(list(patches), out=self.patches[:used])
        self.patches[used:].zero_()
        static.rotary[:used].copy_(layout.rotary)
        if static.position is not None and layout.position is not None:
            static.position[:used].copy_(layout.position)
        for kept, given in ((static.order, layout.order), (static.inverse, layout.inverse)):
            if kept is not None and given is not None:
                kept[: len(given)].copy_(given)
                torch.arange(len(given), len(kept), out=kept[len(given) :])
        self._load_bounds(static.segments, layout.segments)
        if static.windows is not None and layout.windows is not None:
            self._load_bounds(static.windows, layout.windows)

    def _load_bounds(self, static: Segments, segments: Segments) -> None:
        slots = len(static.bounds) - 1
        lengths = padded_lengths(segments.lengths, self.budget.patches, static.longest, slots)
        static.bounds.copy_(running_bounds(lengths, static.bounds.device))


class Graphs:
    """Captured forwards and the memory pool they share; used by one thread on one stream."""

    def __init__(self, forward: Forward, spec: TowerSpec, example: Layout, largest: int) -> None:
        """Capture every budget up to `largest` patches; `example` is any layout of the tower's, for its dtypes."""
        started = time.perf_counter()
        self._unit = spec.merge_unit
        self.padding_patches = 0  # computed so far for a graph's shape only
        pool = torch.cuda.graph_pool_handle()
        # Largest first: the smaller ones then reuse its memory from the pool.
        batches = [StaticBatch(example, budget, spec) for budget in reversed(budgets(largest))]
        captured = [(batch, *_capture(forward, batch, pool)) for batch in batches]
        self._captured = captured[::-1]
        logger.info("CUDA graphs: %d captured in %.1f s", len(captured), time.perf_counter() - started)

    def run(self, patches: Sequence[Tensor], layout: Layout) -> Tensor | None:
        """Replay the smallest graph that holds the batch and return its rows; None if there is none.

        The rows are a copy: the next replay of any graph overwrites what this one wrote.
        """
        for batch, graph, rows in self._captured:
            if batch.fits(layout):
                batch.load(patches, layout)
                graph.replay()
                self.padding_patches += batch.budget.patches - layout.patches
                return rows[: layout.patches // self._unit].clone()
        return None


def _capture(forward: Forward, batch: StaticBatch, pool: Any) -> tuple[torch.cuda.CUDAGraph, Tensor]:
    """Capture one forward over static inputs: (graph, the rows it writes)."""
    device = batch.patches.device
    stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
    stream.wait_stream(torch.cuda.current_stream(device))
    with torch.cuda.stream(stream):
        for _ in range(2):  # libraries choose kernels and take workspaces on their first calls
            forward([batch.patches], [batch.layout])
    torch.cuda.current_stream(device).wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, pool=pool):
        [rows] = forward([batch.patches], [batch.layout])
    return graph, rows


def _static_segments(patches: int, longest: int, slots: int, device: torch.device) -> Segments:
    lengths = padded_lengths([], patches, longest, slots)
    return Segments(tuple(lengths), running_bounds(lengths, device), longest)


def _pieces(padding: int, longest: int) -> int:
    return -(-padding // longest)
