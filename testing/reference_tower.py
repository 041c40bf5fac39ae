"""The reference tower: `transformers`' vision tower, fed in the format of its image processor."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
import transformers
from torch import Tensor

from encoder_contract.geometry import Geometry, Grid
from encoder_contract.processor import ProcessorSettings


class ReferenceTower:
    """The vision tower of `transformers`, with rows in our layout: [main | DeepStack level 0 | ...]."""

    def __init__(self, folder: str | Path, dtype: torch.dtype, device: str = "cpu") -> None:
        """Load it with "sdpa", its fastest attention without further packages."""
        transformers.utils.logging.disable_progress_bar()
        model = transformers.AutoModelForImageTextToText.from_pretrained(
            folder, dtype=dtype, attn_implementation="sdpa"
        )
        self.module = model.model.visual.eval().to(device)
        self.dtype, self.device = dtype, device
        self._processor = ProcessorSettings.from_folder(folder)

    @property
    def geometry(self) -> Geometry:
        """The geometry of its image processor."""
        return self._processor.geometry

    def pixels(self, patches: Sequence[Tensor]) -> Tensor:
        """Return patches in the format of the image processor."""
        return processed(patches, self._processor).to(self.device)

    def rows(self, pixels: Tensor, grids: Sequence[Grid]) -> Tensor:
        """Encode all images in one batch; return rows [tokens of all images, width]."""
        output = self.forward(pixels.to(self.dtype), torch.tensor(grids, device=self.device))
        levels = getattr(output, "deepstack_features", None) or []
        return torch.cat([output.pooler_output, *levels], dim=1)

    @torch.inference_mode()
    def forward(self, pixels: Tensor, grids: Tensor) -> Any:
        """Run the module without changes."""
        return self.module(pixels, grid_thw=grids)


def processed(patches: Sequence[Tensor], settings: ProcessorSettings) -> Tensor:
    """Return our patches in the format of the Hugging Face processor, [patches, 3 × 2 × p × p].

    They are rescaled, normalised and float32; a still image has its frame twice.
    """
    area = settings.geometry.patch_size**2
    joined = torch.cat(list(patches))
    values = joined.view(len(joined), 3, -1, area).float() * settings.rescale_factor
    mean, std = (torch.tensor(numbers).view(1, 3, 1, 1) for numbers in (settings.mean, settings.std))
    return ((values - mean) / std).expand(-1, 3, 2, area).flatten(1)


def random_patches(grids: Sequence[Grid], patch_values: int, seed: int = 0) -> list[Tensor]:
    """Return seeded uint8 patches for each grid."""
    generator = torch.Generator().manual_seed(seed)
    return [
        torch.randint(0, 256, (grid.patches, patch_values), dtype=torch.uint8, generator=generator)
        for grid in grids
    ]


def row_errors(rows: Tensor, truth: Tensor) -> Tensor:
    """Return the relative error of each row: the norm of the difference over the norm of the true row."""
    rows, truth = rows.double().cpu(), truth.double().cpu()
    errors: Tensor = (rows - truth).norm(dim=1) / truth.norm(dim=1)
    return errors
