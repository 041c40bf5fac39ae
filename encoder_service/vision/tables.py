"""Tables that depend only on an image's grid: position embeddings, rotary angles, window order. Cached by grid."""

import threading
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from encoder_contract.geometry import Grid
from encoder_service.vision.pointwise import patch_coordinates
from encoder_service.vision.segments import moved
from encoder_service.vision.spec import TowerSpec

# A patch of Qwen3-VL costs 2.6 KB here in bfloat16 (its position embedding and its rotation): at most 170 MB on the
# CPU, eighteen different 720p grids; 1.7 GB on a GPU, where a grid that is not here costs more than its forward.
MAX_TABLE_PATCHES = {"cpu": 65536, "cuda": 655360}


@dataclass(frozen=True, slots=True)
class GridTables:
    """Tables of one grid, on the device, patches in the tower's processing order.

    `rotations` [patches, ...]: what `Pointwise.rotate` needs to know of each patch. `position`
    [patches, embed] or None: what is added to each patch's embedding. `order` [rows] or None: the merged row at
    each position in processing order, window by window; `inverse` undoes it; `windows` the patches in each.
    `made` passes on CUDA when they are there: they are made on another stream than they are used on.
    """

    grid: Grid
    rotations: Tensor
    position: Tensor | None = None
    order: Tensor | None = None
    inverse: Tensor | None = None
    windows: tuple[int, ...] = ()
    made: "torch.cuda.Event | None" = None

    def here(self) -> "GridTables":
        """Return them for the current stream's next work, which waits until they are made and keeps their memory."""
        if self.made is not None:
            stream = torch.cuda.current_stream(self.rotations.device)
            stream.wait_event(self.made)
            for table in (self.rotations, self.position, self.order, self.inverse):
                if table is not None:
                    table.record_stream(stream)
        return self


class TableCache:
    """The tables of recent grids, bounded by their patches, with least-recently-used eviction; for any thread."""

    def __init__(self, make: Callable[[Grid], GridTables], max_patches: int) -> None:
        self._lock = threading.Lock()
        self._make = make
        self._max_patches = max_patches
        self._patches = 0
        self._tables: OrderedDict[Grid, GridTables] = OrderedDict()

    def __len__(self) -> int:
        return len(self._tables)

    def get(self, grid: Grid) -> GridTables:
        """Return the tables of `grid`, computed now if they are not cached; a grid over the bound is never cached.

        Two threads that come for the same grid at once may both make its tables; those of the first are kept.
        """
        with self._lock:
            if grid in self._tables:
                self._tables.move_to_end(grid)
                return self._tables[grid]
        made = self._make(grid)
        with self._lock:
            return self._keep(grid, made)

    def _keep(self, grid: Grid, made: GridTables) -> GridTables:
        if grid.patches > self._max_patches or grid in self._tables:
            return self._tables.get(grid, made)
        self._tables[grid] = made
        self._patches += grid.patches
        while self._patches > self._max_patches:
            dropped, _ = self._tables.popitem(last=False)
            self._patches -= dropped.patches
        return made


def make_tables(
    grid: Grid, spec: TowerSpec, learned: Tensor | None, rotations: Tensor, device: torch.device
) -> GridTables:
    """Make the tables of `grid` on `device`.

    `learned` is the tower's position table, whose dtype `position` gets; `rotations` are those of
    `Pointwise.rotations`.
    """
    position = order = inverse = None
    windows: tuple[int, ...] = ()
    if learned is not None:
        position = position_table(grid, spec, learned).to(learned.dtype)
    if spec.window:
        order, windows = window_order(grid, spec)
        rotations = rotations.view(len(order), spec.merge_unit, *rotations.shape[1:])[order].flatten(0, 1)
        order, inverse = moved(order, device), moved(order.argsort(), device)
    rotations = moved(rotations, device)
    made = None
    if device.type == "cuda":
        made = torch.cuda.Event()  # type: ignore[no-untyped-call]
        made.record(torch.cuda.current_stream(device))
    return GridTables(grid, rotations, position, order, inverse, windows, made)


def position_table(grid: Grid, spec: TowerSpec, learned: Tensor) -> Tensor:
    """Resample the learned square table [side², embed] to the grid: float32 [patches, embed].

    Bilinear with aligned corners, as `get_vision_interpolation_indices_and_weights` of `transformers`.
    """
    side = spec.position_side
    taps = []
    axes = patch_coordinates(grid, spec.merge_size, learned.device)
    for axis, size in zip(axes, (grid.h, grid.w), strict=True):
        source = axis.float() * (side - 1) / max(size - 1, 1)
        low = source.floor()
        fraction = source - low
        near = low.long().clamp(0, side - 1)
        far = (low.long() + 1).clamp(0, side - 1)
        taps.append(((near, 1 - fraction), (far, fraction)))
    total = torch.zeros(grid.patches, learned.shape[1], dtype=torch.float32, device=learned.device)
    for row, row_weight in taps[0]:
        for column, column_weight in taps[1]:
            total += learned[row * side + column].float() * (row_weight * column_weight)[:, None]
    return total


def window_order(grid: Grid, spec: TowerSpec) -> tuple[Tensor, tuple[int, ...]]:
    """The merged rows [rows] window by window, and the patches in each window.

    The windows are those of Qwen2.5-VL (`window` patches square, cut at the right and lower edge). Windows do not
    attend to each other, so their order is free: windows of equal size are adjacent, for few dense batches.
    """
    step = spec.window // spec.merge_size
    rows, columns = grid.h // spec.merge_size, grid.w // spec.merge_size
    index = torch.arange(grid.t * rows * columns).view(grid.t, rows, columns)
    windows = [
        index[frame, top : top + step, left : left + step].reshape(-1)
        for frame in range(grid.t)
        for top in range(0, rows, step)
        for left in range(0, columns, step)
    ]
    windows.sort(key=len, reverse=True)
    return torch.cat(windows), tuple(len(window) * spec.merge_unit for window in windows)
