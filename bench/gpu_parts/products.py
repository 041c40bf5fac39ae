"""Times the tower's matrix products with their epilogues, which bound the time of a forward."""

from collections.abc import Callable
from functools import partial

import torch
from torch.nn import functional

from bench.gpu_parts.probe import Probe

# Of Qwen3-VL's tower, and one of Qwen2.5-VL's. Name → (inputs, outputs, patches per row).
SHAPES = {
    "qkv": (1152, 3456, 1),
    "projection": (1152, 1152, 1),
    "up": (1152, 4304, 1),
    "down": (4304, 1152, 1),
    "qwen2.5 down": (3420, 1280, 1),
    "qwen2.5 down, aligned": (3424, 1280, 1),
    "merger up": (4608, 4608, 4),
    "merger down": (4608, 4096, 4),
}
PATCHES = (1200, 3520, 8160, 14400)


@torch.inference_mode()
def run(probe: Probe) -> None:
    """Note the rate of each product."""
    for size in (64,) if probe.dry else (4096, 8192):
        _note(probe, f"square {size}", (size, size, size), ("plain",))
    for patches in (64,) if probe.dry else PATCHES:
        for name, (inputs, outputs, merged) in SHAPES.items():
            shrunk = 16 if probe.dry else 1
            shape = (patches // merged, inputs // shrunk, outputs // shrunk)
            _note(probe, f"{name}, {patches} patches", shape, ("bias", "gelu", "residual"))


def _note(probe: Probe, product: str, shape: tuple[int, int, int], hows: tuple[str, ...]) -> None:
    rows, inputs, outputs = shape
    x, weight, bias, residual = (
        torch.randn(size, device=probe.device).bfloat16()
        for size in ((rows, inputs), (outputs, inputs), (outputs,), (rows, outputs))
    )
    calls: dict[str, Callable[[], object]] = {
        "plain": lambda: torch.matmul(x, weight),
        "bias": lambda: functional.linear(x, weight, bias),
        "gelu": lambda: torch._addmm_activation(bias, x, weight.t(), use_gelu=True),
        "residual": lambda: torch.addmm(residual, x, weight.t(), out=residual),
    }

    def measure(how: str) -> dict[str, float]:
        spent = probe.ms(calls[how])
        return spent | {"tflops": 2.0 * rows * inputs * outputs / spent["ms"] / 1e9}

    for how in hows:
        probe.attempt(f"{product}, {how}", partial(measure, how))
