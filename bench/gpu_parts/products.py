"""Times the tower's matrix products with their epilogues, and the elementwise passes between them."""

from collections.abc import Callable
from functools import partial

import torch
from torch.nn import functional

from bench.gpu_parts.probe import Probe

EMBED, MLP, HEADS, HEAD_SIZE = 1152, 4304, 16, 72  # Qwen3-VL's tower
# Name → (inputs, outputs, patches per row).
SHAPES = {
    "qkv": (EMBED, 3 * EMBED, 1),
    "projection": (EMBED, EMBED, 1),
    "up": (EMBED, MLP, 1),
    "down": (MLP, EMBED, 1),
    "qwen2.5 down": (3420, 1280, 1),
    "qwen2.5 down, aligned": (3424, 1280, 1),
    "merger up": (4 * EMBED, 4 * EMBED, 4),
    "merger down": (4 * EMBED, 4096, 4),
}
DRY_SHAPES = {
    name: (inputs // 16, outputs // 16, merged) for name, (inputs, outputs, merged) in SHAPES.items()
}
PATCHES = (3520, 8160, 14400)

Calls = dict[str, Callable[[], object]]


@torch.inference_mode()
def run(probe: Probe) -> None:
    """Note the rate of each product and the time of each pass."""
    for size in (64,) if probe.dry else (4096, 8192):
        x, weight = (torch.randn(size, size, device=probe.device).bfloat16() for _ in range(2))
        _note(
            probe, {"product": f"square {size}"}, {"plain": partial(torch.matmul, x, weight)}, 2.0 * size**3
        )
    for patches in (64,) if probe.dry else PATCHES:
        for name, (inputs, outputs, merged) in (DRY_SHAPES if probe.dry else SHAPES).items():
            rows = patches // merged
            flop = 2.0 * rows * inputs * outputs
            _note(probe, {"product": name, "patches": patches}, _products(probe, rows, inputs, outputs), flop)
        _note(probe, {"patches": patches}, _passes(probe, patches), 0.0)


def _note(probe: Probe, label: dict[str, object], calls: Calls, flop: float) -> None:
    for how, call in calls.items():

        def measure(call: Callable[[], object] = call) -> dict[str, float]:
            spent = probe.ms(call)
            return spent | ({"tflops": flop / spent["ms"] / 1e9} if flop else {})

        probe.attempt({**label, "how": how}, measure)


def _products(probe: Probe, rows: int, inputs: int, outputs: int) -> Calls:
    x = torch.randn(rows, inputs, device=probe.device).bfloat16()
    weight = torch.randn(outputs, inputs, device=probe.device).bfloat16()
    bias = torch.randn(outputs, device=probe.device).bfloat16()
    residual = torch.randn(rows, outputs, device=probe.device).bfloat16()
    calls: Calls = {
        "bias": lambda: functional.linear(x, weight, bias),
        "bias, gelu": lambda: torch._addmm_activation(bias, x, weight.t(), use_gelu=True),
        "residual": lambda: torch.addmm(residual, x, weight.t(), out=residual),
        "bias, then residual": lambda: residual.add_(functional.linear(x, weight, bias)),
    }
    return calls


def _passes(probe: Probe, patches: int) -> Calls:
    x = torch.randn(patches, EMBED, device=probe.device).bfloat16()
    weight = torch.ones_like(x[0])
    packed = torch.randn(patches, 3, HEADS, HEAD_SIZE, device=probe.device).bfloat16()
    angles = torch.randn(patches, 1, 1, HEAD_SIZE // 2, device=probe.device)
    rotations = torch.polar(torch.ones_like(angles), angles)
    merged = torch.randn(patches // 4, 4 * EMBED, device=probe.device).bfloat16()

    def rotate() -> None:
        pairs = torch.view_as_complex(packed[:, :2].float().view(patches, 2, HEADS, HEAD_SIZE // 2, 2))
        packed[:, :2].copy_(torch.view_as_real(pairs.mul_(rotations)).flatten(-2))

    return {
        "norm": lambda: functional.layer_norm(x, (EMBED,), weight, weight),
        "rotation": rotate,
        "gelu": lambda: functional.gelu(merged),
        "residual": lambda: x.add_(x),
    }
