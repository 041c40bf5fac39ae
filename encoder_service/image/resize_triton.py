"""Resizing to patches with two Triton kernels, for CUDA: along rows, then along columns and into the patches."""

import torch
import triton
import triton.language as tl
from torch import Tensor

from encoder_contract.geometry import Geometry, Grid
from encoder_service.image.resize import HALF, PRECISION_BITS, exact_patches, filter_table

# Rows and columns of bytes that one program computes.
BLOCK = (4, 128)
# Along rows a thread gathers four bytes, one by one; along columns a thread loads a whole word.
ALONG_ROWS_WARPS, ALONG_COLUMNS_WARPS = 4, 1
WORD = 16


@triton.jit(do_not_specialize=["lines", "height", "width", "target", "taps"])
def along_rows_kernel(
    pixels: tl.tensor,
    table: tl.tensor,
    planes: tl.tensor,
    lines: tl.tensor,
    height: tl.tensor,
    width: tl.tensor,
    target: tl.tensor,
    stride: tl.tensor,
    taps: tl.tensor,
    half: tl.constexpr,
    bits: tl.constexpr,
    rows: tl.constexpr,
    columns: tl.constexpr,
) -> None:
    """Resize one channel of pixels [images × height = lines, width, 3] into planes [images, 3, height, stride]."""
    line = tl.program_id(0) * rows + tl.arange(0, rows)[:, None]
    channel = tl.program_id(2)
    x = tl.program_id(1) * columns + tl.arange(0, columns)[None, :]
    # Rows are padded with zeros to whole words.
    inside = (line < lines) & (x < stride)
    start = tl.load(table + x, mask=x < target, other=0)
    at = pixels + (line.to(tl.int64) * width + start) * 3 + channel
    total = tl.full((rows, columns), half, tl.int32)
    for tap in range(taps):
        weight = tl.load(table + (1 + tap) * target + x, mask=x < target, other=0)
        total += weight * tl.load(at + 3 * tap, mask=inside, other=0).to(tl.int32)
    byte = tl.minimum(tl.maximum(total >> bits, 0), 255).to(tl.uint8)
    row_of_planes = (line // height * 3 + channel) * height + line % height
    tl.store(planes + row_of_planes.to(tl.int64) * stride + x, byte, mask=inside)


@triton.jit(do_not_specialize=["lines", "height", "tokens", "target", "taps"])
def along_columns_kernel(
    planes: tl.tensor,
    table: tl.tensor,
    patches: tl.tensor,
    lines: tl.tensor,
    height: tl.tensor,
    tokens: tl.tensor,
    target: tl.tensor,
    stride: tl.tensor,
    taps: tl.tensor,
    half: tl.constexpr,
    bits: tl.constexpr,
    patch: tl.constexpr,
    merge: tl.constexpr,
    rows: tl.constexpr,
    columns: tl.constexpr,
) -> None:
    """Resize planes [images, 3, height, stride] to `lines` = images × 3 × target, and write patches, `tokens` a row."""
    line = tl.program_id(0) * rows + tl.arange(0, rows)[:, None]
    x = tl.program_id(1) * columns + tl.arange(0, columns)[None, :]
    plane, y = line // target, line % target
    start = tl.load(table + y)
    at = planes + (plane.to(tl.int64) * height + start) * stride + x
    inside = (line < lines) & (x < stride)
    total = tl.full((rows, columns), half, tl.int32)
    for tap in range(taps):
        weight = tl.load(table + (1 + tap) * target + y)
        total += weight * tl.load(at + tap * stride, mask=inside, other=0).to(tl.int32)
    byte = tl.minimum(tl.maximum(total >> bits, 0), 255).to(tl.uint8)
    # Patches in merge order: [token row, token column, row in token, column in token].
    token = patch * merge
    first_of_row = (y // token * tokens * merge + y // patch % merge) * merge
    place = first_of_row + x // token * merge * merge + x // patch % merge
    width = tokens * token
    image, channel = plane // 3, plane % 3
    value = (place * 3 + channel) * patch * patch + y % patch * patch + x % patch
    inside = (line < lines) & (x < width)
    tl.store(patches + image.to(tl.int64) * 3 * target * width + value, byte, mask=inside)


class TritonResize:
    """See `Resize`. Needs a compiler at run time, so that `make_resize` tries it before it is used."""

    name = "triton"

    def __init__(self, geometry: Geometry) -> None:
        self._geometry = geometry

    def to_patches(self, images: Tensor, grid: Grid) -> Tensor:
        """See `Resize`."""
        planes = _along_rows(images, grid.w * self._geometry.patch_size)
        return _along_columns(planes, grid, self._geometry)


def _along_rows(images: Tensor, target: int) -> Tensor:
    """Resize the rows of images [N, H, W, 3]; return planes [N, 3, H, target] whose rows are aligned to words."""
    assert images.is_contiguous()
    count, height, width, _ = images.shape
    stride = triton.cdiv(target, WORD) * WORD
    planes = torch.empty((count, 3, height, stride), dtype=torch.uint8, device=images.device)
    table = filter_table(width, target, images.device)
    lines, (rows, columns) = count * height, BLOCK
    along_rows_kernel[(triton.cdiv(lines, rows), triton.cdiv(stride, columns), 3)](
        *(images, table, planes, lines, height, width, target, stride, len(table) - 1),
        half=HALF,
        bits=PRECISION_BITS,
        rows=rows,
        columns=columns,
        num_warps=ALONG_ROWS_WARPS,
    )
    return planes[..., :target]


def _along_columns(planes: Tensor, grid: Grid, geometry: Geometry) -> Tensor:
    """Resize the columns of planes [N, 3, H, width of the grid]; return the grid's patches."""
    patch = geometry.patch_size
    count, _, height, width = planes.shape
    target, tokens = grid.h * patch, grid.w // geometry.merge_size
    patches = torch.empty((count, grid.patches, 3 * patch * patch), dtype=torch.uint8, device=planes.device)
    table = filter_table(height, target, planes.device)
    lines, (rows, columns) = count * 3 * target, BLOCK
    along_columns_kernel[(triton.cdiv(lines, rows), triton.cdiv(width, columns))](
        *(planes, table, patches, lines, height, tokens, target, planes.stride(2), len(table) - 1),
        half=HALF,
        bits=PRECISION_BITS,
        patch=patch,
        merge=geometry.merge_size,
        rows=rows,
        columns=columns,
        num_warps=ALONG_COLUMNS_WARPS,
    )
    return patches


def differs(geometry: Geometry, device: torch.device) -> bool:
    """Whether the kernels' patches of random pixels, shrunk and enlarged, differ in any bit from `exact_patches`.

    Raises Triton's errors if there is no compiler.
    """
    random = torch.Generator().manual_seed(0)
    images = torch.randint(0, 256, (2, 37, 53, 3), dtype=torch.uint8, generator=random).to(device)
    for tokens in (1, 3):
        grid = Grid(1, tokens * geometry.merge_size, (tokens + 1) * geometry.merge_size)
        plain = exact_patches(images, grid, geometry)
        if not torch.equal(TritonResize(geometry).to_patches(images, grid), plain):
            return True
    return False
