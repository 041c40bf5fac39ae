"""Tables that depend only on an image's grid: position embeddings, rotary angles, window order. Cached by grid."""

from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from encoder_contract.geometry import Grid
from encoder_service.vision.spec import TowerSpec

# A patch of Qwen3-VL costs 2.6 KB here in bfloat16 (its position embedding and its rotation): 170 MB in all, eighteen
# different 720p grids.
MAX_TABLE_PATCHES = 65536


@dataclass(frozen=True, slots=True)
class GridTables:
    """Tables of one grid, on the device, patches in the tower's processing order.

    `rotary` [patches, 1, 1, head size / 2] complex64: the rotation of each pair of a head's values. `position`
    [patches, embed] or None: what is added to each patch's embedding. `order` [rows] or None: the merged row at
    each position in processing order, window by window; `inverse` undoes it; `windows` the patches in each.
    """

    grid: Grid
    rotary: Tensor
    position: Tensor | None = None
    order: Tensor | None = None
    inverse: Tensor | None = None
    windows: tuple[int, ...] = ()


class TableCache:
    """The tables of recent grids, bounded by their patches, with least-recently-used eviction."""

    def __init__(self, make: Callable[[Grid], GridTables], max_patches: int = MAX_TABLE_PATCHES) -> None:
        self._make = make
        self._max_patches = max_patches
        self._patches = 0
        self._tables: OrderedDict[Grid, GridTables] = OrderedDict()

    def __len__(self) -> int:
        return len(self._tables)

    def get(self, grid: Grid) -> GridTables:
        """Return the tables of `grid`, computed now if they are not cached; a grid over the bound is never cached."""
        tables = self._tables.get(grid)
        if tables is not None:
            self._tables.move_to_end(grid)
            return tables
        tables = self._make(grid)
        if grid.patches <= self._max_patches:
            self._tables[grid] = tables
            self._patches += grid.patches
        while self._patches > self._max_patches:
            dropped, _ = self._tables.popitem(last=False)
            self._patches -= dropped.patches
        return tables


def make_tables(
    grid: Grid, spec: TowerSpec, learned: Tensor | None, device: torch.device, head_size: int
) -> GridTables:
    """Make the tables of `grid` on `device`.

    `learned` is the tower's position table, whose dtype `position` gets; `head_size` may be larger than the model's
    own: the values added to a head are zeros and are rotated by nothing.
    """
    rotary = rotary_table(grid, spec)
    unmoved = rotary.new_ones(grid.patches, (head_size - spec.head_size) // 2)
    rotary = torch.cat([rotary, unmoved], dim=1)
    position = None
    if learned is not None:
        position = position_table(grid, spec, learned).to(learned.dtype)
    if not spec.window:
        return GridTables(grid, rotary[:, None, None].to(device), position)
    order, windows = window_order(grid, spec)
    rotary = rotary.view(len(order), spec.merge_unit, -1)[order].view(grid.patches, 1, 1, -1)
    return GridTables(
        grid, rotary.to(device), position, order.to(device), order.argsort().to(device), windows
    )


def patch_coordinates(grid: Grid, merge_size: int) -> tuple[Tensor, Tensor]:
    """Row and column of each patch [patches] in merge order: the patches of one merged row are neighbours."""
    shape = (grid.h // merge_size, merge_size, grid.w // merge_size, merge_size)
    rows = torch.arange(grid.h).view(shape[0], shape[1], 1, 1).expand(shape)
    columns = torch.arange(grid.w).view(1, 1, shape[2], shape[3]).expand(shape)
    flat = [axis.transpose(1, 2).reshape(-1).repeat(grid.t) for axis in (rows, columns)]
    return flat[0], flat[1]


def rotary_table(grid: Grid, spec: TowerSpec) -> Tensor:
    """Rotations [patches, head size / 2] complex64: first the row's frequencies, then the column's.

    As the axial rotary embedding of `transformers`: θ^(−2i/(head size/2)), cosine and sine in float32.
    """
    half = spec.head_size // 2
    frequencies = 1.0 / (spec.rope_theta ** (torch.arange(0, half, 2, dtype=torch.float32) / half))
    angles = [axis.float()[:, None] * frequencies for axis in patch_coordinates(grid, spec.merge_size)]
    angle = torch.cat(angles, dim=1)
    return torch.complex(angle.cos(), angle.sin())


def position_table(grid: Grid, spec: TowerSpec, learned: Tensor) -> Tensor:
    """Resample the learned square table [side², embed] to the grid: float32 [patches, embed].

    Bilinear with aligned corners, as `get_vision_interpolation_indices_and_weights` of `transformers`.
    """
    side = spec.position_side
    taps = []
    for axis, size in zip(patch_coordinates(grid, spec.merge_size), (grid.h, grid.w), strict=True):
        source = axis.float() * (side - 1) / max(size - 1, 1)
        low = source.floor()
        fraction = source - low
        near = low.long().clamp(0, side - 1)
        far = (low.long() + 1).clamp(0, side - 1)
        taps.append(((near, 1 - fraction), (far, fraction)))
    total = torch.zeros(grid.patches, learned.shape[1], dtype=torch.float32, device=learned.device)
    for row, row_weight in taps[0]:
        for column, column_weight in taps[1]:
            index = (row * side + column).to(learned.device)
            weight = (row_weight * column_weight).to(learned.device)
            total += learned[index].float() * weight[:, None]
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
