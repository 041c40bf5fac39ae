"""Loading a tower from a checkpoint folder: read, check, fold, pack, warm up."""

import logging
import time
from pathlib import Path

import torch

from encoder_contract.geometry import Grid
from encoder_service.image.processor import ProcessorSettings
from encoder_service.vision.attention import make_attention
from encoder_service.vision.checkpoint import VisionTensors
from encoder_service.vision.families import family_of
from encoder_service.vision.family import Family
from encoder_service.vision.fp8 import FP8_MULTIPLE, Precision, multiplies_fp8, quantise_blocks
from encoder_service.vision.layers import PatchEmbed, SelfAttention, TowerModule
from encoder_service.vision.linear import Linear
from encoder_service.vision.pointwise import Pointwise
from encoder_service.vision.pointwise_choice import make_pointwise
from encoder_service.vision.spec import TowerSpec, read_config
from encoder_service.vision.tower import CPU_TILE_PATCHES, Tower

logger = logging.getLogger(__name__)

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}

# On the CPU a few images make up for reading the weights; more would only make every one of them wait for all. On a
# GPU one 2560×1440 image of Qwen3-VL, 14400 patches, fits with some small ones: about 0.5 GB of activations.
BATCH_PATCHES = {"cpu": 1024, "cuda": 16384}


def load_tower(
    folder: str | Path,
    *,
    device: str,
    dtype: str,
    processor: ProcessorSettings,
    attention: str = "auto",
    batch_patches: int = 0,
    batch_invariant: bool = False,
    graphs: bool = True,
    head_size: int = 0,
    precision: Precision = "full",
) -> Tower:
    """Load the vision tower of a Hugging Face checkpoint folder; of its weights only the vision tensors are read.

    `device` is "cpu" or "cuda[:n]", `dtype` one of `DTYPES`; 0 `batch_patches` are as many as suit the device.
    On CUDA the device becomes this thread's current one.
    `batch_invariant` makes an image's rows independent of its neighbours to the bit by running every image alone; on
    the CPU they always are. `graphs` (CUDA only) captures CUDA graphs. `head_size` widens attention heads with zeros;
    0 leaves them as they are. `precision` "fp8" quantises the products of most blocks: on CUDA it is faster, on the CPU
    it is the same arithmetic, for comparison.
    Raises `ValueError` or `FileNotFoundError` naming what is unsupported, missing, unexpected or of the wrong shape.
    """
    started = time.perf_counter()
    folder = Path(folder)
    config = read_config(folder)
    family = family_of(config)
    spec = family.spec(config)
    where, kind = _device(device), _dtype(dtype)
    _make_current(where)
    check_geometry(spec, processor)
    heads = _head_size(spec, head_size)
    attend = make_attention(attention, where, kind, heads)
    module = _load_module(folder, family, spec)
    pointwise = make_pointwise(spec, where, kind)
    _prepare(module, processor, pointwise, where, kind, heads, precision)
    tower = Tower(
        module,
        attend,
        pointwise,
        device=where,
        dtype=kind,
        head_size=heads,
        batch_patches=batch_patches or BATCH_PATCHES[where.type],
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
    module: TowerModule,
    processor: ProcessorSettings,
    pointwise: Pointwise,
    device: torch.device,
    dtype: torch.dtype,
    head_size: int,
    precision: Precision,
) -> None:
    """Convert stored weights into the form used; every step is exact, except for one rounding to `dtype`, and fp8."""
    for part in module.modules():
        if isinstance(part, PatchEmbed):
            part.fold(processor, dtype)
        elif isinstance(part, SelfAttention):
            part.interleave()
            part.pad_heads(head_size)
    if device.type == "cuda":
        # A GPU's products of rows that are no multiple of 16 bytes (the 3420 columns of Qwen2.5-VL) are slower.
        module.align(FP8_MULTIPLE)
    module.to(device, dtype)
    if precision == "fp8":
        _quantise(module, pointwise, device, dtype)
    for part in list(module.modules()):
        if isinstance(part, Linear):
            part.pack(CPU_TILE_PATCHES)


def _quantise(module: TowerModule, pointwise: Pointwise, device: torch.device, dtype: torch.dtype) -> None:
    """Quantise blocks; `ValueError` where that cannot be computed."""
    if dtype is not torch.bfloat16:
        raise ValueError(f"precision fp8 is for bfloat16, the dtype is {dtype}")
    if device.type == "cuda" and not multiplies_fp8(device):
        raise ValueError(
            "precision fp8 needs a device that multiplies 8-bit floating point (Ada, Hopper or later)"
        )
    module.align(FP8_MULTIPLE)
    quantise_blocks(module.blocks, pointwise)


def _warm_up(tower: Tower, graphs: bool) -> None:
    """Select and capture kernels now rather than in the first request; wait for all that was loaded."""
    side = 8 * tower.spec.merge_size
    grid = Grid(1, side, side)
    tower.encode([torch.zeros(grid.patches, tower.spec.patch_values, dtype=torch.uint8)], [grid])
    if tower.device.type == "cuda" and graphs:
        tower.capture_graphs()
    if tower.device.type == "cuda":
        torch.cuda.synchronize(tower.device)  # the threads that use it do so on streams of their own


def _head_size(spec: TowerSpec, asked: int) -> int:
    size = asked or spec.head_size
    if size < spec.head_size or size % 2:
        raise ValueError(f"head_size {size} must be even and at least the model's {spec.head_size}")
    return size


def check_geometry(spec: TowerSpec, processor: ProcessorSettings) -> None:
    """Raise `ValueError` if the image processor cuts other patches than the tower takes."""
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


def _make_current(device: torch.device) -> None:
    """Make a GPU the one that this thread works on: Triton runs its kernels there, wherever their tensors lie."""
    if device.type == "cuda" and device.index is not None:
        torch.cuda.set_device(device)


def _dtype(name: str) -> torch.dtype:
    if name not in DTYPES:
        raise ValueError(f"dtype {name!r} is not supported ({', '.join(DTYPES)})")
    return DTYPES[name]
