"""Image geometry: compute an image's grid of patches and its number of tokens from its size alone.

Client and server compute the same, so a prompt can be laid out before any image is decoded. The arithmetic is
`smart_resize` of the Qwen2-VL image processor in Hugging Face `transformers` (5.x), which Qwen2.5-VL, Qwen3-VL and
Qwen3.5 share. The order of its divisions is kept, because floating-point rounding decides some sizes.
"""

import math
from dataclasses import dataclass, replace
from typing import NamedTuple, Protocol, Self

from encoder_contract.errors import ImageLimitError, InvalidImageError

# The models' limit, not ours: the Hugging Face processor refuses longer strips.
MAX_ASPECT_RATIO = 200


class Grid(NamedTuple):
    """Patches along time, height and width; `t` is 1 for a still image."""

    t: int
    h: int
    w: int

    @property
    def patches(self) -> int:
        """Number of patches that the vision tower gets."""
        return self.t * self.h * self.w


class GridRule(Protocol):
    """How a grid and its rows follow from an image's size: a `Geometry`, or a rule that only the server can compute.

    With such a rule, grids count rows: (1, h, w) for h lines of w rows, else (1, rows, 1).
    """

    @property
    def max_tokens(self) -> int:
        """The most rows that an image of any variant can have."""
        ...

    def grid(self, width: int, height: int) -> Grid:
        """Return the grid of an upright image, size in pixels. Raises `InvalidImageError` or `ImageLimitError`."""
        ...

    def at_once(self, width: int, height: int) -> bool:
        """Whether `grid` takes only microseconds for this size. If not, call it on a worker thread."""
        ...

    def tokens(self, grid: Grid) -> int:
        """Return the rows of an image with this grid."""
        ...

    def has(self, grid: Grid) -> bool:
        """Whether an image of some size and variant may have this grid."""
        ...

    def variant(self, min_pixels: int = 0, max_pixels: int = 0) -> "GridRule":
        """Return the rule of a variant; 0 means the model's own bound. Raises `ImageLimitError` for an invalid one."""
        ...


@dataclass(frozen=True, slots=True)
class Geometry:
    """The settings of a model's image processor that decide grids and token counts.

    `patch_size` is the side of a patch in pixels, `merge_size` the patches merged into one token per side;
    `min_pixels` and `max_pixels` bound height × width after resizing.
    """

    patch_size: int
    merge_size: int
    min_pixels: int
    max_pixels: int

    def __post_init__(self) -> None:
        if self.patch_size < 1 or self.merge_size < 1:
            raise ValueError(
                f"patch_size {self.patch_size} and merge_size {self.merge_size} must be at least 1"
            )
        if not 1 <= self.min_pixels <= self.max_pixels:
            raise ValueError(
                f"need 1 <= min_pixels <= max_pixels, got {self.min_pixels} and {self.max_pixels}"
            )

    def __str__(self) -> str:
        return (
            f"patch {self.patch_size}, merge {self.merge_size}, {self.min_pixels} to {self.max_pixels} pixels"
        )

    @property
    def factor(self) -> int:
        """The side of one merged token in pixels. Both sides of a resized image are multiples of it."""
        return self.patch_size * self.merge_size

    def resized(self, width: int, height: int) -> tuple[int, int]:
        """Return the (width, height) in pixels that an upright image of this size is resized to.

        Raises `InvalidImageError` for a side of zero and `ImageLimitError` for an aspect ratio over 200.
        """
        if width < 1 or height < 1:
            raise InvalidImageError(f"an image of {width}x{height} pixels has no content")
        ratio = max(height, width) / min(height, width)
        if ratio > MAX_ASPECT_RATIO:
            raise ImageLimitError(f"aspect ratio {ratio:.1f} of {width}x{height} exceeds {MAX_ASPECT_RATIO}")
        factor = self.factor
        new_height, new_width = round(height / factor) * factor, round(width / factor) * factor
        if new_height * new_width > self.max_pixels:
            shrink = math.sqrt((height * width) / self.max_pixels)
            new_height = max(factor, math.floor(height / shrink / factor) * factor)
            new_width = max(factor, math.floor(width / shrink / factor) * factor)
        elif new_height * new_width < self.min_pixels:
            grow = math.sqrt(self.min_pixels / (height * width))
            new_height = math.ceil(height * grow / factor) * factor
            new_width = math.ceil(width * grow / factor) * factor
        return new_width, new_height

    def grid(self, width: int, height: int) -> Grid:
        """Return the grid of an upright image of `width` × `height` pixels; raises what `resized` raises."""
        new_width, new_height = self.resized(width, height)
        return Grid(1, new_height // self.patch_size, new_width // self.patch_size)

    def at_once(self, width: int, height: int) -> bool:  # noqa: ARG002 - see `GridRule`
        """Always true: `grid` takes microseconds."""
        return True

    def tokens(self, grid: Grid) -> int:
        """Return the number of rows of an image's embedding, which is its number of tokens in the prompt."""
        return grid.patches // self.merge_size**2

    @property
    def max_tokens(self) -> int:
        """The most tokens that an image of any variant can have.

        That may be more than fit into `max_pixels`: enlarging an image to `min_pixels` rounds both sides up, and the
        short side of a strip is at least one token. With `area` tokens in `max_pixels` and sides a x b = area, the
        number is less than (a + 1) x (b + 1), and a + b is largest for the longest strip.
        """
        area = self.max_pixels / self.factor**2
        long = math.sqrt(area * MAX_ASPECT_RATIO)
        return math.ceil(area + long + area / long) + 1

    def has(self, grid: Grid) -> bool:
        """Whether an image of some size and variant may have this grid."""
        t, h, w = grid
        whole = h % self.merge_size == 0 and w % self.merge_size == 0
        return t == 1 and h > 0 and w > 0 and whole and self.tokens(grid) <= self.max_tokens

    def variant(self, min_pixels: int = 0, max_pixels: int = 0) -> Self:
        """Return this geometry with other bounds on the pixels of one image; 0 means the model's own bound.

        A variant may not raise `max_pixels`, because the server sized its memory for the model's own. Raises
        `ImageLimitError`, which names the violated bound.
        """
        new_min, new_max = min_pixels or self.min_pixels, max_pixels or self.max_pixels
        if new_max > self.max_pixels:
            raise ImageLimitError(
                f"variant max_pixels {new_max} exceeds the model's max_pixels {self.max_pixels}"
            )
        if not 1 <= new_min <= new_max:
            raise ImageLimitError(f"variant min_pixels {new_min} must lie between 1 and max_pixels {new_max}")
        return replace(self, min_pixels=new_min, max_pixels=new_max)


def rows_of_grid(grid: Grid, geometry: Geometry | None) -> int:
    """Return how many rows a grid has. `geometry` is None if grids count rows: see `GridRule`."""
    return geometry.tokens(grid) if geometry else grid.patches
