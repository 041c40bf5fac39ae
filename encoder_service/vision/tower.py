"""A loaded vision tower: uint8 patches of any number of images in, their rows out, within a fixed memory."""

import logging
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

import torch
from torch import Tensor, nn

from encoder_contract.geometry import Grid
from encoder_service.processor import ProcessorSettings
from encoder_service.vision.attention import Attention, Segments, make_attention
from encoder_service.vision.checkpoint import VisionTensors
from encoder_service.vision.layers import Layout, PatchEmbed, SelfAttention
from encoder_service.vision.linear import Linear
from encoder_service.vision.qwen2_5_vl import Qwen25VLTower
from encoder_service.vision.qwen3_5 import Qwen35Tower
from encoder_service.vision.qwen3_vl import Qwen3VLTower
from encoder_service.vision.spec import TowerSpec, read_config
from encoder_service.vision.tables import GridTables, TableCache, make_tables

logger = logging.getLogger(__name__)

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}

# One 2560×1440 image of Qwen3-VL has 14400 patches; this leaves room for two, some 0.6 GB of activations.
DEFAULT_BATCH_PATCHES = 32768

# On the CPU products and what follows them go through 256 patches at a time: the widest intermediate (2.2 MB in
# bfloat16) then stays in the second-level cache of the cores that share it.
CPU_TILE_PATCHES = 256

_TOWERS: dict[str, type[Qwen3VLTower | Qwen25VLTower]] = {
    "qwen3_vl": Qwen3VLTower,
    "qwen2_5_vl": Qwen25VLTower,
    "qwen3_5": Qwen35Tower,
}


class Tower:
    """A vision tower ready to run on one device; not for use by several threads at once."""

    def __init__(
        self,
        module: Qwen3VLTower | Qwen25VLTower,
        device: torch.device,
        dtype: torch.dtype,
        attention: Attention,
        batch_patches: int,
    ) -> None:
        self.spec: TowerSpec = module.spec
        self.device = device
        self.dtype = dtype
        self.attention = attention.name
        self.batch_patches = batch_patches
        self._module = module
        self._attend = attention
        self._tables = TableCache(self._make_tables)

    def encode(self, patches: Sequence[Tensor], grids: Sequence[Grid]) -> list[Tensor]:
        """Encode images and return for each its rows [tokens, width] in `dtype` on `device`.

        `patches[i]` is uint8 [grids[i].patches, channels × patch × patch] in merge order, on any device; rows are in
        raster order of the merged grid. Activations are bounded by `batch_patches` whatever the number of images;
        an image larger than that runs alone. On the CPU every image runs alone anyway: its rows then depend on
        nothing but itself, to the bit, and the matrix unit is as fast. Raises `ValueError` for patches that do not fit
        their grid.
        """
        for image, grid in zip(patches, grids, strict=True):
            self._check(image, grid)
        rows: list[Tensor] = []
        with torch.inference_mode():
            for batch in self._batches(grids):
                rows += self._encode_batch(patches[batch], grids[batch])
        return rows

    def _encode_batch(self, patches: Sequence[Tensor], grids: Sequence[Grid]) -> list[Tensor]:
        on_device = [image.to(self.device, non_blocking=True) for image in patches]
        packed = on_device[0] if len(on_device) == 1 else torch.cat(on_device)
        rows = self._module(packed, self._layout(grids))
        return list(rows.split([grid.patches // self.spec.merge_unit for grid in grids]))

    def _batches(self, grids: Sequence[Grid]) -> Iterator[slice]:
        begin, patches = 0, 0
        limit = 0 if self.device.type == "cpu" else self.batch_patches
        for number, grid in enumerate(grids):
            if number > begin and patches + grid.patches > limit:
                yield slice(begin, number)
                begin, patches = number, 0
            patches += grid.patches
        if grids:
            yield slice(begin, len(grids))

    def _layout(self, grids: Sequence[Grid]) -> Layout:
        tables = [self._tables.get(grid) for grid in grids]
        return Layout(
            rotary=_joined([table.rotary for table in tables]),
            position=_joined_or_none([table.position for table in tables]),
            segments=Segments.of([grid.h * grid.w for grid in grids for _ in range(grid.t)], self.device),
            windows=self._windows(tables),
            order=self._offset([table.order for table in tables]),
            inverse=self._offset([table.inverse for table in tables]),
            attend=self._attend,
            tile=CPU_TILE_PATCHES if self.device.type == "cpu" else 0,
        )

    def _windows(self, tables: Sequence[GridTables]) -> Segments | None:
        if not self.spec.window:
            return None
        return Segments.of([length for table in tables for length in table.windows], self.device)

    @staticmethod
    def _offset(orders: Sequence[Tensor | None]) -> Tensor | None:
        """Join the orders of several images, each counted from the first row of its own."""
        joined, begin = [], 0
        for order in orders:
            if order is None:
                return None
            joined.append(order + begin if begin else order)
            begin += len(order)
        return _joined(joined)

    def _make_tables(self, grid: Grid) -> GridTables:
        learned = self._module.pos_embed.weight if isinstance(self._module, Qwen3VLTower) else None
        return make_tables(grid, self.spec, learned, self.device)

    def _check(self, image: Tensor, grid: Grid) -> None:
        merge = self.spec.merge_size
        if grid.t != 1 or grid.h < merge or grid.w < merge or grid.h % merge or grid.w % merge:
            raise ValueError(f"{grid} is not the grid of a still image in merged patches of {merge}×{merge}")
        if image.dtype is not torch.uint8 or image.shape != (grid.patches, self.spec.patch_values):
            expected = (grid.patches, self.spec.patch_values)
            raise ValueError(
                f"patches of {grid} must be uint8 {expected}, got {image.dtype} {tuple(image.shape)}"
            )


def load_tower(
    folder: str | Path,
    *,
    device: str,
    dtype: str,
    processor: ProcessorSettings,
    attention: str = "auto",
    batch_patches: int = DEFAULT_BATCH_PATCHES,
    batch_invariant: bool = False,
) -> Tower:
    """Load the vision tower of a Hugging Face checkpoint folder; of its weights only the vision tensors are read.

    `device` is "cpu" or "cuda[:n]", `dtype` one of `DTYPES`. Raises `ValueError` or `FileNotFoundError` naming what
    is not supported, missing, left over or of a wrong shape.
    """
    started = time.perf_counter()
    folder = Path(folder)
    spec = TowerSpec.from_config(read_config(folder))
    where, kind = _device(device), _dtype(dtype)
    attend = make_attention(attention, where, kind, batch_invariant=batch_invariant)
    module = _load_module(folder, spec)
    _prepare(module, processor, where, kind)
    logger.info(
        "vision tower: %s, %d blocks, rows of %d, %s on %s, attention %s, loaded in %.1f s",
        spec.model_type, spec.depth, spec.width, dtype, where, attend.name, time.perf_counter() - started,
    )  # fmt: skip
    return Tower(module, where, kind, attend, batch_patches)


def _load_module(folder: Path, spec: TowerSpec) -> Qwen3VLTower | Qwen25VLTower:
    with torch.device("meta"):
        module = _TOWERS[spec.architecture](spec)
    tensors = VisionTensors(folder)
    tensors.check({name: tuple(tensor.shape) for name, tensor in module.state_dict().items()})
    module.load_state_dict(tensors.read(tensors.names), assign=True)
    return module.eval().requires_grad_(False)


@torch.inference_mode()
def _prepare(
    module: nn.Module, processor: ProcessorSettings, device: torch.device, dtype: torch.dtype
) -> None:
    """Turn weights as stored into weights as used; every step is exact but the one rounding to `dtype`."""
    for part in module.modules():
        if isinstance(part, PatchEmbed):
            part.fold(processor, dtype)
        elif isinstance(part, SelfAttention):
            part.interleave()
    module.to(device, dtype)
    for part in list(module.modules()):
        if isinstance(part, Linear):
            part.pack(CPU_TILE_PATCHES)


def _device(name: str) -> torch.device:
    try:
        device = torch.device(name)
    except RuntimeError as error:
        raise ValueError(f"device {name!r} is unknown (cpu, cuda or cuda:n)") from error
    if device.type not in ("cpu", "cuda"):
        raise ValueError(f"device {name!r} is not supported (cpu, cuda or cuda:n)")
    if device.type == "cuda" and not torch.cuda.is_available():
        raise ValueError(f"device {name!r} was asked for, but torch finds no CUDA device here")
    return device


def _dtype(name: str) -> torch.dtype:
    if name not in DTYPES:
        raise ValueError(f"dtype {name!r} is not supported ({', '.join(DTYPES)})")
    return DTYPES[name]


def _joined(tensors: Sequence[Tensor]) -> Tensor:
    return tensors[0] if len(tensors) == 1 else torch.cat(list(tensors))


def _joined_or_none(tensors: Sequence[Tensor | None]) -> Tensor | None:
    present = [tensor for tensor in tensors if tensor is not None]
    return _joined(present) if present else None
