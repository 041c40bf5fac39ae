"""The operations between the products as Triton kernels for CUDA, each in one pass over the values."""

import torch
import triton
import triton.language as tl
from torch import Tensor

from encoder_contract.geometry import Grid
from encoder_contract.tower_spec import TowerSpec
from encoder_service.vision.pointwise import Norm, PlainPointwise, patch_coordinates, rotary_frequencies

# The longest side of an image, in patches: 262 144 pixels at 16 a patch.
MAX_SIDE = 16384

# Pairs to rotate, or values of a GELU, per program: four for each of its 128 threads.
BLOCK = 512

# Whether products and sums become one instruction, which rounds once. Named, because the default depends on the release
# of Triton, and the rows of one model must not.
FUSED = True


@triton.jit
def add_norm_kernel(
    residual: tl.tensor,
    delta: tl.tensor,
    weight: tl.tensor,
    bias: tl.tensor,
    out: tl.tensor,
    eps: tl.tensor,
    width: tl.constexpr,
    columns: tl.constexpr,
    add: tl.constexpr,
    rms: tl.constexpr,
) -> None:
    """For one row: store the rounded sum; compute its norm in float32 and round it once."""
    start = tl.program_id(0).to(tl.int64) * width
    column = tl.arange(0, columns)
    inside = column < width
    x = tl.load(residual + start + column, mask=inside, other=0.0)
    if add:
        x = (x.to(tl.float32) + tl.load(delta + start + column, mask=inside, other=0.0).to(tl.float32)).to(
            x.dtype
        )
        tl.store(residual + start + column, x, mask=inside)
    value = x.to(tl.float32)
    gain = tl.load(weight + column, mask=inside, other=0.0).to(tl.float32)
    if rms:
        normed = value * tl.rsqrt(tl.sum(value * value) / width + eps) * gain
    else:
        centred = tl.where(inside, value - tl.sum(value) / width, 0.0)
        normed = centred * tl.rsqrt(tl.sum(centred * centred) / width + eps) * gain
        normed += tl.load(bias + column, mask=inside, other=0.0).to(tl.float32)
    tl.store(out + start + column, normed.to(x.dtype), mask=inside)


@triton.jit
def rotate_kernel(
    packed: tl.tensor,
    bias: tl.tensor,
    coordinates: tl.tensor,
    angles: tl.tensor,
    count: tl.tensor,
    stride: tl.tensor,
    pairs: tl.constexpr,
    axis_pairs: tl.constexpr,
    block: tl.constexpr,
) -> None:
    """Add the bias to queries and keys and rotate their pairs in place.

    A patch has `pairs` pairs, and its values begin `stride` values after those of the patch before it. The first
    `axis_pairs` pairs of a head rotate by the patch's row, the other half by its column.
    """
    # Loads whole words of memory, so that one thread has both values of a pair.
    value = 2 * block * tl.program_id(0) + tl.arange(0, 2 * block)
    of_patch = value % (2 * pairs)
    at = packed + (value // (2 * pairs)).to(tl.int64) * stride + of_patch
    x = tl.load(at, mask=value < 2 * count, other=0.0)
    first, second = tl.split(tl.reshape(x.to(tl.float32) + tl.load(bias + of_patch), (block, 2)))

    pair = block * tl.program_id(0) + tl.arange(0, block)
    of_head = pair % (2 * axis_pairs)
    by_column = of_head >= axis_pairs
    inside = pair < count
    frequency = tl.where(by_column, of_head - axis_pairs, of_head)
    place = tl.load(coordinates + 2 * (pair // pairs) + by_column.to(tl.int32), mask=inside, other=0)
    angle = angles + 2 * (place * axis_pairs + frequency)
    cosine = tl.load(angle, mask=inside, other=1.0)
    sine = tl.load(angle + 1, mask=inside, other=0.0)

    rotated = tl.join(first * cosine - second * sine, first * sine + second * cosine)
    tl.store(at, tl.reshape(rotated, (2 * block,)).to(x.dtype), mask=value < 2 * count)


@triton.jit
def gelu_erf_kernel(
    values: tl.tensor,
    count: tl.tensor,
    block: tl.constexpr,
) -> None:
    """Replace values by their erf GELU, computed in float32 and rounded once."""
    at = tl.program_id(0).to(tl.int64) * block + tl.arange(0, block)
    inside = at < count
    x = tl.load(values + at, mask=inside, other=0.0)
    value = x.to(tl.float32)
    tl.store(values + at, (value * 0.5 * (1.0 + tl.erf(value * 0.7071067811865476))).to(x.dtype), mask=inside)


class TritonPointwise:
    """See `Pointwise`. Needs a compiler at run time, so that `make_pointwise` tries it before it is used."""

    name = "triton"

    def __init__(self, spec: TowerSpec, device: torch.device) -> None:
        """Compute cosine and sine for one axis: float32 [`MAX_SIDE`, head size / 4, 2] on `device`."""
        angle = torch.arange(MAX_SIDE).float()[:, None] * rotary_frequencies(spec)
        self._angles = torch.stack((angle.cos(), angle.sin()), dim=-1).to(device)

    def rotations(self, grid: Grid, spec: TowerSpec) -> Tensor:
        """Return row and column of each patch, int32 [patches, 2]."""
        if max(grid.h, grid.w) > MAX_SIDE:
            raise ValueError(f"{grid}: no side may be longer than {MAX_SIDE} patches")
        return torch.stack(patch_coordinates(grid, spec.merge_size), dim=1).int()

    def rotate(self, values: Tensor, bias: Tensor, rotations: Tensor, out: Tensor) -> None:
        """See `Pointwise`. Works in place only."""
        assert out is values
        assert bias.shape == values.shape[1:]
        assert bias.is_contiguous()
        patches, two, heads, head_size = values.shape
        assert values.stride()[1:] == (heads * head_size, head_size, 1), values.stride()
        assert head_size == 4 * self._angles.shape[1], head_size
        pairs = two * heads * head_size // 2
        count = patches * pairs
        assert 2 * count < 2**31, "the kernel counts values in 32 bits"
        rotate_kernel[(triton.cdiv(count, BLOCK),)](
            values,
            bias,
            rotations,
            self._angles,
            count,
            values.stride(0),
            pairs=pairs,
            axis_pairs=self._angles.shape[1],
            block=BLOCK,
            enable_fp_fusion=FUSED,
        )

    def add_norm(self, residual: Tensor, delta: Tensor | None, norm: Norm) -> Tensor:
        """See `Pointwise`."""
        assert residual.is_contiguous()
        assert delta is None or delta.is_contiguous()
        width = residual.shape[-1]
        columns = triton.next_power_of_2(width)
        out = torch.empty_like(residual)
        add_norm_kernel[(residual.numel() // width,)](
            residual,
            residual if delta is None else delta,
            norm.weight,
            norm.weight if norm.bias is None else norm.bias,
            out,
            norm.eps,
            width=width,
            columns=columns,
            add=delta is not None,
            rms=norm.rms,
            enable_fp_fusion=FUSED,
            num_warps=8 if columns > 2048 else 4,
        )
        return out

    def gelu_erf(self, x: Tensor) -> Tensor:
        """See `Pointwise`."""
        assert x.is_contiguous()
        gelu_erf_kernel[(triton.cdiv(x.numel(), BLOCK),)](x, x.numel(), block=BLOCK, enable_fp_fusion=FUSED)
        return x


def difference(spec: TowerSpec, device: torch.device, dtype: torch.dtype) -> str:
    """Run every kernel and its plain form on random values of a 16-bit type; return which differ in the mean.

    The result is empty if none differs by more than a unit in the last place. Raises Triton's errors if there is no
    compiler.
    """
    ours, plain = TritonPointwise(spec, device), PlainPointwise()
    random = torch.Generator().manual_seed(0)

    def values(*shape: int) -> Tensor:
        return torch.randn(shape, generator=random).to(device, dtype)

    grid = Grid(1, 2 * spec.merge_size, 3 * spec.merge_size)
    packed = values(grid.patches, 3, spec.heads, spec.head_size)
    bias = values(2, spec.heads, spec.head_size).float()
    rotated, expected = packed.clone(), packed.clone()
    for form, tensor in ((ours, rotated), (plain, expected)):
        rotations = form.rotations(grid, spec).to(device)
        queries_and_keys = tensor[:, :2]
        form.rotate(queries_and_keys, bias, rotations, queries_and_keys)
    pairs: dict[str, tuple[Tensor, Tensor]] = {"rotation": (rotated, expected)}
    x = values(17, spec.embed)
    pairs["GELU"] = (ours.gelu_erf(x.clone()), plain.gelu_erf(x))
    for kind, rms in (("LayerNorm", False), ("RMSNorm", True)):
        norm = Norm(spec.embed, rms=rms).to(device, dtype)
        norm.weight.data = 1 + values(spec.embed) / 10
        if norm.bias is not None:
            norm.bias.data = values(spec.embed) / 10
        delta, (one, other) = values(17, spec.embed), (x.clone(), x.clone())
        pairs[kind] = (ours.add_norm(one, delta, norm), plain.add_norm(other, delta, norm))
        pairs[f"sum before {kind}"] = (one, other)
    return ", ".join(name for name, (one, other) in pairs.items() if not ulps(one, other) <= 1)


def ulps(one: Tensor, other: Tensor) -> float:
    """Return the mean difference of two tensors in units of the last place of their type, those of 2⁻⁶ at least."""
    places = torch.finfo(other.dtype).eps * other.float().abs().clamp_min(2**-6).log2().floor().exp2()
    return float(((one.float() - other.float()).abs() / places).mean())
