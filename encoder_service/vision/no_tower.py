"""What a server that only stores rows has for a tower: the configuration of one, which says what a row is."""

from collections.abc import Callable, Sequence
from pathlib import Path

import torch
from torch import Tensor

from encoder_contract.geometry import Grid
from encoder_service.image.processor import ProcessorSettings
from encoder_service.vision.families import read_spec
from encoder_service.vision.load import DTYPES, check_geometry
from encoder_service.vision.tower import Tower


class NoTower(Tower):
    """Has the width and element type of a tower's rows, no weights, and encodes nothing."""

    def __init__(self, folder: str | Path, *, dtype: str, processor: ProcessorSettings) -> None:
        """Read config.json of a checkpoint folder.

        Raises `ValueError` or `FileNotFoundError` naming what is unsupported or missing.
        """
        if dtype not in DTYPES:
            raise ValueError(f"dtype {dtype!r} is not supported ({', '.join(DTYPES)})")
        self.spec = read_spec(Path(folder))
        check_geometry(self.spec, processor)
        self.device = torch.device("cpu")
        self.dtype = DTYPES[dtype]
        self.batch_patches = 0

    @property
    def attention(self) -> str:
        """There is none."""
        return "none"

    @property
    def padding_patches(self) -> int:
        """Nothing is padded."""
        return 0

    def encode(
        self,
        patches: Sequence[Tensor],
        grids: Sequence[Grid],
        between: Callable[[], None] = lambda: None,
    ) -> list[Tensor]:
        """Fail: no image is ever queued on a server that only stores."""
        raise NotImplementedError("this server has no tower")
