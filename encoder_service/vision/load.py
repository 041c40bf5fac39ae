"""Loading a tower from a checkpoint folder: read, check, fold, pack, warm up."""

import logging
import time
from pathlib import Path

import torch
from torch import nn

from encoder_contract.geometry import Grid
from encoder_service.image.processor import ProcessorSettings
from encoder_service.vision.attention import Attention, make_attention
from encoder_service.vision.checkpoint import VisionTensors
from encoder_service.vision.families import family_of
from encoder_service.vision.family import Family
from encoder_service.vision.layers import PatchEmbed, SelfAttention, TowerModule, compiled_rotation, rotate
from encoder_service.vision.linear import Linear
from encoder_service.vision.spec import TowerSpec, read_config
from encoder_service.vision.tower import CPU_TILE_PATCHES, DEFAULT_BATCH_PATCHES, Tower

logger = logging.getLogger(__name__)

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}

# Heads of 72 are widened for backends whose kernels for multiples of 16 are faster; peers do so for cuDNN.
_PADDED_HEADS = {("cudnn", 72): 80}


def load_tower(
    folder: str | Path,
    *,
    device: str,
    dtype: str,
    processor: ProcessorSettings,
    attention: str = "auto",
    batch_patches: int = DEFAULT_BATCH_PATCHES,
    batch_invariant: bool = False,
    graphs: bool = True,
    head_size: int | None = None,
) -> Tower:
    """Load the vision tower of a Hugging Face checkpoint folder; of its weights only the vision tensors are read.

    `device` is "cpu" or "cuda[:n]", `dtype` one of `DTYPES`. `batch_invariant` makes an image's rows independent of
    its neighbours to the bit by running every image alone; on the CPU they always are. `graphs`
    (CUDA only) captures CUDA graphs. `head_size` widens attention heads with zeros instead of the backend's choice.
    Raises `ValueError` or `FileNotFoundError` naming what is unsupported, missing, unexpected or of the wrong shape.
    """
    started = time.perf_counter()
    folder = Path(folder)
    config = read_config(folder)
    family = family_of(config)
    spec = family.spec(config)
    where, kind = _device(device), _dtype(dtype)
    _check_geometry(spec, processor)
    attend = make_attention(attention, where, kind)
    module = _load_module(folder, family, spec)
    heads = _head_size(spec, attend, head_size)
    _prepare(module, processor, where, kind, heads)
    tower = Tower(
        module,
        attend,
        compiled_rotation() if where.type == "cuda" else rotate,
        device=where,
        dtype=kind,
        head_size=heads,
        batch_patches=batch_patches,
        image_by_image=batch_invariant and where.type == "cuda",
    )
    _warm_up(tower, graphs and attend.graphs)
    logger.info(
        "vision tower %s: %d blocks, rows of %d, %s on %s, attention %s, loaded and warmed up in %.1f s",
        *(spec.model_type, spec.depth, spec.width, dtype, where, attend.name, time.perf_counter() - started),
    )
    return tower


def _load_module(folder: Path, family: Family, spec: TowerSpec) -> TowerModule:
    with torch.device("meta"):
        module = family.build(spec)
    tensors = VisionTensors(folder)
    tensors.check({name: tuple(tensor.shape) for name, tensor in module.state_dict().items()})
    module.load_state_dict(tensors.read(tensors.names), assign=True)
    return module.eval().requires_grad_(False)


@torch.inference_mode()
def _prepare(
    module: nn.Module, processor: ProcessorSettings, device: torch.device, dtype: torch.dtype, head_size: int
) -> None:
    """Convert stored weights into the form used; every step is exact except one rounding to `dtype`."""
    for part in module.modules():
        if isinstance(part, PatchEmbed):
            part.fold(processor, dtype)
        elif isinstance(part, SelfAttention):
            part.interleave()
            part.pad_heads(head_size)
    module.to(device, dtype)
    for part in list(module.modules()):
        if isinstance(part, Linear):
            part.pack(CPU_TILE_PATCHES)


def _warm_up(tower: Tower, graphs: bool) -> None:
    """Compile, select and capture kernels now rather than in the first request."""
    side = 8 * tower.spec.merge_size
    for grid in (Grid(1, side, side), Grid(1, side, 2 * side)):  # two sizes: the second compiles for any
        tower.encode([torch.zeros(grid.patches, tower.spec.patch_values, dtype=torch.uint8)], [grid])
    if tower.device.type == "cuda" and graphs:
        tower.capture_graphs()


def _head_size(spec: TowerSpec, attention: Attention, asked: int | None) -> int:
    size = asked or _PADDED_HEADS.get((attention.name, spec.head_size), spec.head_size)
    if size < spec.head_size or size % 2:
        raise ValueError(f"head_size {size} must be even and at least the model's {spec.head_size}")
    return size


def _check_geometry(spec: TowerSpec, processor: ProcessorSettings) -> None:
    geometry = processor.geometry
    if (geometry.patch_size, geometry.merge_size) != (spec.patch_size, spec.merge_size):
        raise ValueError(
            f"the image processor cuts patches of {geometry.patch_size} and merges {geometry.merge_size},"
            f" config.json says {spec.patch_size} and {spec.merge_size}"
        )


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
