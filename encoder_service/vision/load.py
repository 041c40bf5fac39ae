"""Loading a tower from a checkpoint folder: read, check, fold, pack, choose kernels, warm up."""

import logging
import time
from collections.abc import Mapping
from pathlib import Path

import torch
from safetensors import safe_open
from torch import Tensor

from encoder_contract.checkpoint import (
    StoredTensor,
    model_fingerprint,
    read_spec,
    vision_tensors,
)
from encoder_contract.geometry import Geometry, Grid
from encoder_contract.processor import ProcessorSettings
from encoder_contract.tower_spec import TowerSpec
from encoder_service.image.resize import PlainResize, Resize
from encoder_service.keys import Recipe
from encoder_service.vision.attention import make_attention
from encoder_service.vision.graphs import PATCH_BUDGETS
from encoder_service.vision.layers import Linear, PatchEmbed, SelfAttention
from encoder_service.vision.pointwise import PlainPointwise, Pointwise
from encoder_service.vision.qwen import TowerModule
from encoder_service.vision.tower import CPU_TILE_PATCHES, Tower

logger = logging.getLogger(__name__)

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}

# On the CPU a few images amortise reading the weights. On a GPU, 22 images of 256×256 fill whole waves of its
# processors. Images of 1280×720 or more run alone: two would take a tenth less together, and the first would wait for
# both (`python -m bench.gpu_parts.predicted`).
BATCH_PATCHES = {"cpu": 1024, "cuda": 5632}

# On a GPU, products are slower if rows are no multiple of 16 bytes, like the 3420 columns of Qwen2.5-VL.
ALIGNED_VALUES = 8


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
) -> Tower:
    """Load the vision tower of a Hugging Face checkpoint folder. Only the vision tensors of its weights are read.

    `device` is "cpu" or "cuda[:n]"; a CUDA device becomes the current device of this thread. `dtype` is one of
    `DTYPES`. If `batch_patches` is 0, the device decides; other values also bound the images for which CUDA graphs are
    captured. `batch_invariant` runs every image alone, so that its neighbours do not change a bit of its rows; on the
    CPU they never do. `graphs` captures CUDA graphs, on CUDA only.

    Raises `ValueError` or `FileNotFoundError` naming what is unsupported, missing, unexpected or of the wrong shape.
    """
    started = time.perf_counter()
    folder = Path(folder)
    spec = read_spec(folder)
    where, kind = _device(device), dtype_of(dtype)
    if where.type == "cuda" and where.index is not None:
        torch.cuda.set_device(where)  # Triton runs kernels on the current device, wherever their tensors are
    check_geometry(spec, processor)
    attend = make_attention(attention, where, kind, spec.head_size)
    module = _load_module(folder, spec)
    pointwise = make_pointwise(spec, where, kind)
    _prepare(module, processor, where, kind)
    tower = Tower(
        module,
        attend,
        pointwise,
        device=where,
        dtype=kind,
        batch_patches=batch_patches or BATCH_PATCHES[where.type],
        graph_patches=batch_patches or PATCH_BUDGETS[-1],
        image_by_image=batch_invariant and where.type == "cuda",
        geometry=processor.geometry,
        resize=make_resize(processor.geometry, where),
        recipe=Recipe(model_fingerprint(folder), processor.fingerprint, dtype),
    )
    _warm_up(tower, graphs and attend.graphs)
    logger.info(
        "vision tower %s: %d blocks, rows of %d, %s on %s, attention %s, loaded and warmed up in %.1f s",
        *(spec.model_type, spec.depth, spec.width, dtype, where, attend.name, time.perf_counter() - started),
    )
    return tower


def _load_module(folder: Path, spec: TowerSpec) -> TowerModule:
    with torch.device("meta"):
        module = TowerModule(spec)
    names = {name: module.name_in_checkpoint(name) for name in module.state_dict()}
    tensors = vision_tensors(folder)
    _check(
        folder, tensors, {names[name]: tuple(tensor.shape) for name, tensor in module.state_dict().items()}
    )
    read = _read(tensors)
    module.load_state_dict({name: read[stored] for name, stored in names.items()}, assign=True)
    return module.eval().requires_grad_(False)


def _check(
    folder: Path, tensors: Mapping[str, StoredTensor], expected: Mapping[str, tuple[int, ...]]
) -> None:
    """Raise `ValueError`, naming every tensor that is missing, unexpected or of another shape."""
    problems = [f"missing: {name}" for name in sorted(expected.keys() - tensors.keys())]
    problems += [f"left over: {name}" for name in sorted(tensors.keys() - expected.keys())]
    problems += [
        f"of shape {tensors[name].shape} instead of {expected[name]}: {name}"
        for name in sorted(expected.keys() & tensors.keys())
        if tensors[name].shape != expected[name]
    ]
    if problems:
        raise ValueError(f"the vision tensors of {folder} do not fit the tower: " + "; ".join(problems))


def _read(tensors: Mapping[str, StoredTensor]) -> dict[str, Tensor]:
    """Read tensors to the CPU in their stored dtype, file by file.

    Copies them: safetensors maps the file, and one that is overwritten later would change the tower.
    """
    read = {}
    for path in {tensor.path for tensor in tensors.values()}:
        with safe_open(path, framework="pt") as shard:
            for name, tensor in tensors.items():
                if tensor.path == path:
                    read[name] = shard.get_tensor(tensor.full_name).clone()
    return read


@torch.inference_mode()
def _prepare(
    module: TowerModule, processor: ProcessorSettings, device: torch.device, dtype: torch.dtype
) -> None:
    """Convert stored weights for inference. Every step is exact, except one rounding to `dtype`."""
    for part in module.modules():
        if isinstance(part, PatchEmbed):
            part.fold(processor, dtype)
        elif isinstance(part, SelfAttention):
            part.interleave()
    if device.type == "cuda":
        module.align(ALIGNED_VALUES)
    module.to(device, dtype)
    for part in list(module.modules()):
        if isinstance(part, SelfAttention):
            part.split_bias()
        elif isinstance(part, Linear):
            part.pack(CPU_TILE_PATCHES)


def _warm_up(tower: Tower, graphs: bool) -> None:
    """Choose and capture kernels now rather than in the first request, and wait until the device has done its work."""
    side = 8 * tower.spec.merge_size
    grid = Grid(1, side, side)
    tower.encode([torch.zeros(grid.patches, tower.spec.patch_values, dtype=torch.uint8)], [grid])
    if tower.device.type == "cuda" and graphs:
        tower.capture_graphs()
    if tower.device.type == "cuda":
        torch.cuda.synchronize(tower.device)  # the threads that use the tower have other streams


def check_geometry(spec: TowerSpec, processor: ProcessorSettings) -> None:
    """Raise `ValueError` if the image processor cuts patches that do not fit the tower."""
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
        raise ValueError(f"device {name!r} is not available: torch finds no CUDA device")
    return device


def dtype_of(name: str) -> torch.dtype:
    """Return the element type of this name. Raises `ValueError` if rows cannot have it."""
    if name not in DTYPES:
        raise ValueError(f"dtype {name!r} is not supported ({', '.join(DTYPES)})")
    return DTYPES[name]


# Triton needs a C compiler, and a folder (`TRITON_CACHE_DIR`) that it can write to and load libraries from. Without
# either the server starts all the same, with torch's operators: they are slower and equally exact.


def make_pointwise(spec: TowerSpec, device: torch.device, dtype: torch.dtype) -> Pointwise:
    """Return Triton's kernels on CUDA in a 16-bit type if they compile and equal torch's operators; else the latter."""
    if device.type != "cuda" or dtype is torch.float32:
        return PlainPointwise()
    try:
        from encoder_service.vision.pointwise_triton import TritonPointwise, difference

        differing = difference(spec, device, dtype)
        torch.cuda.synchronize(device)
        if not differing:
            logger.info("kernels between products: triton")
            return TritonPointwise(spec, device)
        reason = f"not equal to torch's: {differing}"
    except Exception as error:  # noqa: BLE001 - a missing compiler can raise many types
        reason = f"{type(error).__name__}: {error}"
    logger.warning("kernels between products: using torch's, because Triton's cannot be used: %s", reason)
    return PlainPointwise()


def make_resize(geometry: Geometry, device: torch.device) -> Resize:
    """Return Triton's kernels on CUDA if they compile and give the bits of torch's operators; else the latter."""
    if device.type != "cuda":
        return PlainResize(geometry)
    try:
        from encoder_service.image.resize_triton import TritonResize, differs

        with torch.cuda.device(device):
            if not differs(geometry, device):
                logger.info("resize to patches: triton")
                return TritonResize(geometry)
        reason = "their patches differ from torch's"
    except Exception as error:  # noqa: BLE001 - a missing compiler can raise many types
        reason = f"{type(error).__name__}: {error}"
    logger.warning("resize to patches: using torch's, because Triton's cannot be used: %s", reason)
    return PlainResize(geometry)
