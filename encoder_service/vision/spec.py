"""The dimensions of a vision tower, read from a checkpoint's config.json; and its floating-point operations."""

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from encoder_contract.geometry import Grid


@dataclass(frozen=True, slots=True)
class TowerSpec:
    """The numbers of a vision tower.

    `hidden` is the width of one row part (the language model's), `levels` the number of DeepStack levels beside the
    main part, so a row has `width` = hidden × (1 + levels) values. `embed` is the width inside the tower.
    `deepstack` and `full_attention` are block numbers; `window` is in patches per side, 0 without windows;
    `position_side` is the side of the learned position table, 0 without one.
    """

    model_type: str
    architecture: str
    depth: int
    embed: int
    intermediate: int
    heads: int
    hidden: int
    patch_size: int
    merge_size: int
    temporal_patch_size: int
    channels: int
    activation: str
    rope_theta: float
    position_side: int
    deepstack: tuple[int, ...]
    window: int
    full_attention: tuple[int, ...]

    @property
    def levels(self) -> int:
        """DeepStack levels in a row beside its main part."""
        return len(self.deepstack)

    @property
    def width(self) -> int:
        """Values in a row: [main | level 0 | level 1 | ...]."""
        return self.hidden * (1 + self.levels)

    @property
    def head_size(self) -> int:
        """Values in one attention head."""
        return self.embed // self.heads

    @property
    def patch_values(self) -> int:
        """Values in one uint8 patch: channels × patch × patch, one temporal slot."""
        return self.channels * self.patch_size**2

    @property
    def merge_unit(self) -> int:
        """Patches in one row."""
        return self.merge_size**2

    @property
    def mlp_products(self) -> int:
        """Products in one MLP: a SiLU is half of a gated pair in every family, so it comes with a third."""
        return 3 if self.activation == "silu" else 2


def read_config(folder: Path) -> dict[str, Any]:
    """Read config.json of a checkpoint folder; `FileNotFoundError` or `ValueError` names the file."""
    path = folder / "config.json"
    if not path.is_file():
        raise FileNotFoundError(f"{path} is missing: {folder} is not a Hugging Face checkpoint folder")
    try:
        config = json.loads(path.read_bytes())
    except ValueError as error:
        raise ValueError(f"{path} is not JSON: {error}") from error
    if not isinstance(config, dict):
        raise ValueError(f"{path} does not hold a JSON object")
    return config


def flops(spec: TowerSpec, grid: Grid) -> int:
    """Multiplications and additions (2 per pair) of the products and the attention of one image.

    Counted as the model needs them: the patch convolution once (a still image, summed over time), attention inside
    windows where the model has windows, no padding, and nothing for the pointwise remainder.
    """
    patches, rows = grid.patches, grid.patches // spec.merge_unit
    embed = 2 * patches * spec.patch_values * spec.embed
    products = 2 * patches * spec.embed * (4 * spec.embed + spec.mlp_products * spec.intermediate)
    merged = spec.embed * spec.merge_unit
    mergers = 2 * rows * merged * (merged + spec.hidden) * (1 + spec.levels)
    return embed + spec.depth * products + mergers + _attention(spec, grid)


def _attention(spec: TowerSpec, grid: Grid) -> int:
    """Two products (scores, mixing) of each pair of patches that see each other, over all heads and blocks."""
    per_pair = 2 * 2 * spec.embed
    frame = grid.h * grid.w
    whole = per_pair * grid.t * frame**2
    if not spec.window:
        return spec.depth * whole
    blocks = len([number for number in spec.full_attention if number < spec.depth])
    windowed = per_pair * grid.t * _square_sum(grid.h, spec.window) * _square_sum(grid.w, spec.window)
    return blocks * whole + (spec.depth - blocks) * windowed


def _square_sum(length: int, window: int) -> int:
    """The sum of squares of the pieces into which `length` is cut."""
    return (length // window) * window**2 + (length % window) ** 2
