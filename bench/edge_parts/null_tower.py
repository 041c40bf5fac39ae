"""A plug-in of the server: a tower and a JPEG decoder that cost nothing, or sleep at the pace of a device.

`installed` copies this module into a folder that an interpreter finds, as a third party's plug-in would lie there.
"""

import os
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
from torch import Tensor

PATCHES_PER_S = 0.0
"""The pace of the tower; 0: it takes no time."""
# The server refuses more CPU devices than cores. These devices use none.
SITE = "import os\nos.sched_getaffinity = lambda _process: set(range(64))\n"


class NullJpegs:
    """Stands for DALI: takes every JPEG in batches, and returns pixels without memory of their own."""

    name = "null"

    def start(self, *_: object) -> None:
        """Do nothing."""

    def decode(self, sources: Sequence[Any]) -> list[Tensor]:
        """Return blank pixels of the right size."""
        return [
            torch.empty(1, dtype=torch.uint8).expand(height, width, 3)
            for width, height in (source.header.upright for source in sources)
        ]


def load(folder: Path, options: Any) -> Any:
    """Load the checkpoint's own tower, and replace what it computes."""
    from encoder_contract.processor import ProcessorSettings
    from encoder_service.image.device_decoder import Decoder
    from encoder_service.vision import load_tower
    from encoder_service.vision.load import BATCH_PATCHES

    tower = load_tower(
        folder,
        device=options.device,
        dtype=options.dtype,
        processor=ProcessorSettings.from_folder(folder),
        batch_patches=options.batch_patches or BATCH_PATCHES["cuda"],
    )
    blank = torch.zeros(1, dtype=torch.uint8)
    rows: dict[int, Tensor] = {}

    def encode(
        _patches: Sequence[Tensor], grids: Sequence[Any], _between: Callable[[], None] = lambda: None
    ) -> list[Tensor]:
        if PATCHES_PER_S:
            time.sleep(sum(grid.patches for grid in grids) / PATCHES_PER_S)
        tokens = [tower.geometry.tokens(grid) for grid in grids]
        for count in {*tokens} - rows.keys():
            rows[count] = torch.zeros(count, tower.width, dtype=tower.dtype)
        return [rows[count] for count in tokens]

    nothing: dict[str, Any] = {
        "encode": encode,
        "inputs": lambda _pixels, grids: [blank] * len(grids),
        "prepare": lambda _grid: None,
    }
    for name, function in nothing.items():
        setattr(tower, name, function)
    start = Decoder.start

    def start_without_cost(decoder: Decoder) -> None:
        decoder._jpegs = NullJpegs()  # type: ignore[assignment]
        start(decoder)

    Decoder.start = start_without_cost  # type: ignore[method-assign,assignment]
    return tower


@contextmanager
def installed(model_type: str, patches_per_s: float) -> Iterator[None]:
    """Install the plug-in for `model_type`, for processes that this one starts during the block."""
    before = os.environ.get("PYTHONPATH")
    with TemporaryDirectory() as folder:
        text = (
            Path(__file__).read_text().replace("PATCHES_PER_S = 0.0", f"PATCHES_PER_S = {patches_per_s}", 1)
        )
        Path(folder, "edge_null_tower.py").write_text(text)
        Path(folder, "sitecustomize.py").write_text(SITE)
        information = Path(folder, "edge_null_tower-1.dist-info")
        information.mkdir()
        information.joinpath("METADATA").write_text(
            "Metadata-Version: 2.1\nName: edge_null_tower\nVersion: 1\n"
        )
        information.joinpath("entry_points.txt").write_text(
            f"[encoder_service.families]\n{model_type} = edge_null_tower:load\n"
        )
        os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, (folder, before)))
        try:
            yield
        finally:
            if before is None:
                del os.environ["PYTHONPATH"]
            else:
                os.environ["PYTHONPATH"] = before


if __name__ == "__main__":
    sys.exit("run python -m bench.edge")
