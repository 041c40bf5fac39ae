"""What the simulated device computes in place of Triton's kernels, flash attention 3, and cuBLAS's epilogue."""

from functools import partial
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from encoder_contract.geometry import Geometry, Grid
from encoder_service.image.resize import HALF, PRECISION_BITS
from encoder_service.image.resize import _cut as cut
from tests.simulated_gpu.device import SimulatedGpu
from tests.simulated_gpu.tensors import DeviceTensor, kernel

attend = functional.scaled_dot_product_attention
addmm_activation = torch._addmm_activation


class TritonKernel:
    """Stands in for a compiled Triton kernel; `compute` gets its arguments, with the inner tensors."""

    def __init__(self, gpu: SimulatedGpu, name: str, compute: Any, writes: tuple[int, ...]) -> None:
        self._gpu, self._name, self._compute, self._writes = gpu, name, compute, writes

    def __getitem__(self, grid: Any) -> Any:
        """Return the launch for a number of programs."""

        def launch(*args: Any, num_warps: int = 4, **constants: Any) -> None:
            places = [place for place, each in enumerate(args) if isinstance(each, Tensor)]

            def compute(*tensors: Tensor) -> None:
                values = [*args]
                for place, tensor in zip(places, tensors, strict=True):
                    values[place] = tensor
                self._compute(grid, *values, **constants)

            writes = [places.index(place) for place in self._writes]
            kernel(self._gpu, self._name, compute, [args[place] for place in places], writes)

        return launch


# Triton's interpreter takes milliseconds for each program, so these compute what the kernels do in torch. The tests of
# the kernels themselves run them in the interpreter.


def add_norm(
    _grid: Any, residual: Tensor, delta: Tensor, weight: Tensor, bias: Tensor, out: Tensor, eps: float,
    *, width: int, columns: int, add: bool, rms: bool, enable_fp_fusion: bool,
) -> None:  # fmt: skip
    """Compute what `add_norm_kernel` does; the interpreter would take milliseconds for each row."""
    rows = residual.view(-1, width)
    if add:
        rows.add_(delta.view(-1, width))
    if rms:
        normed = functional.rms_norm(rows, (width,), weight, eps)
    else:
        normed = functional.layer_norm(rows, (width,), weight, bias, eps)
    out.view(-1, width).copy_(normed)


def rotate(
    _grid: Any, values: Tensor, bias: Tensor, coordinates: Tensor, angles: Tensor, count: int, stride: int,
    *, pairs: int, axis_pairs: int, block: int, enable_fp_fusion: bool,
) -> None:  # fmt: skip
    """Compute what `rotate_kernel` does."""
    turns = torch.view_as_complex(angles)[coordinates.long()].flatten(1)[:, None, None]
    turned = torch.view_as_complex((values.float() + bias).view(*values.shape[:-1], -1, 2)) * turns
    values.copy_(torch.view_as_real(turned).flatten(-2))


def gelu_erf(_grid: Any, values: Tensor, count: int, *, block: int, enable_fp_fusion: bool) -> None:
    """Compute what `gelu_erf_kernel` does."""
    values.copy_(functional.gelu(values))


def along_rows(
    _grid: Any, pixels: Tensor, table: Tensor, planes: Tensor, *sizes: int, **constants: int
) -> None:
    """Compute what `along_rows_kernel` does."""
    planes.zero_()
    planes[..., : table.shape[1]] = resized(pixels.permute(0, 3, 1, 2), table[0], table[1:], 3)


def along_columns(
    _grid: Any,
    planes: Tensor,
    table: Tensor,
    patches: Tensor,
    *sizes: int,
    patch: int,
    merge: int,
    **constants: int,
) -> None:
    """Compute what `along_columns_kernel` does."""
    images = resized(planes, table[0], table[1:, :, None], 2)
    geometry = Geometry(patch, merge, 1, 1 << 30)
    grid = Grid(1, images.shape[2] // patch, images.shape[3] // patch)
    patches.copy_(cut(images, grid, geometry))


def resized(images: Tensor, first: Tensor, weights: Tensor, axis: int) -> Tensor:
    """Resize images along an axis by a table of weights, in integers."""
    taps = [images.index_select(axis, first + tap) * weights[tap] for tap in range(len(weights))]
    return (torch.stack(taps).sum(0, dtype=torch.int32) + HALF >> PRECISION_BITS).clamp(0, 255).byte()


def flash3(gpu: SimulatedGpu) -> Any:
    """Return the operator of flash attention 3. It reads the bounds on the device, as the kernel does."""

    def run(longest: int, scale: float, query: Tensor, key: Tensor, value: Tensor, bounds: Tensor) -> Tensor:
        places = bounds.tolist()
        assert places[-1] <= len(query)
        mixed = torch.zeros_like(query, memory_format=torch.contiguous_format)
        for begin, end in pairwise(places):
            assert end - begin <= longest
            parts = [each[begin:end].transpose(0, 1)[None].float() for each in (query, key, value)]
            mixed[begin:end] = attend(*parts, scale=scale)[0].transpose(0, 1).to(query.dtype)
        return mixed

    def fwd(query: Any, key: Any, value: Any, *, num_splits: int, **options: Any) -> Any:
        assert num_splits == 1
        attended = partial(run, options["max_seqlen_q"], options["softmax_scale"])
        return kernel(gpu, "flash3", attended, (query, key, value, options["cu_seqlens_q"])), None, None, None

    return fwd


def attention_of_torch(gpu: SimulatedGpu) -> Any:
    """Return torch's attention, in which tensors of the device take one kernel."""

    def run(query: Any, key: Any, value: Any, *args: Any, **options: Any) -> Any:
        if not isinstance(query, DeviceTensor):
            return attend(query, key, value, *args, **options)
        return kernel(gpu, "sdpa", lambda *parts: attend(*parts, **options), (query, key, value))

    return run


def product_and_gelu(gpu: SimulatedGpu) -> Any:
    """Return cuBLAS's product with the GELU of tanh as its epilogue."""

    def run(bias: Any, x: Any, weight: Any, *, use_gelu: bool = False) -> Any:
        if not isinstance(x, DeviceTensor):
            return addmm_activation(bias, x, weight, use_gelu=use_gelu)

        def compute(bias: Tensor, x: Tensor, weight: Tensor) -> Tensor:
            return functional.gelu(torch.addmm(bias, x, weight), approximate="tanh")

        return kernel(gpu, "product and GELU", compute, (bias, x, weight))

    return run
