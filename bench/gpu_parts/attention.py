"""The attention backends of the server: the trial, error and speed of each."""

from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from bench.gpu_parts.probe import Probe
from encoder_service.vision.attention import BACKENDS, FIXED, build, why_not
from encoder_service.vision.layers import Attention, Segments

HEADS, HEAD_SIZES = 16, (72, 80)  # of the towers of Qwen3-VL and Qwen2.5-VL
# Patches of a small photo, 1280×720, 960×1280, 1920×1080 and 2560×1440; then of eight small photos packed together.
CASES = ((1024,), (3520,), (4800,), (8160,), (14400,), (1024,) * 8)
DRY_CASES = ((64,), (32, 16))


@torch.inference_mode()
def run(probe: Probe) -> None:
    """Note the trial of every backend, then its error and time in every case."""
    for name in BACKENDS:
        for head_size in HEAD_SIZES[: 1 if probe.dry else None]:
            label = {"backend": name, "head_size": head_size}
            reason = why_not(name, probe.device, torch.bfloat16, head_size, fixed=name == FIXED)
            probe.note(**label, trial=reason or "passed")
            if reason:
                continue
            attend = build(name)
            for lengths in DRY_CASES if probe.dry else CASES:
                if name == FIXED and len(lengths) > 1:
                    continue
                case = {**label, "case": f"{len(lengths)}x{lengths[0]}"}
                probe.attempt(case, partial(_case, probe, attend, head_size, lengths))


def _case(probe: Probe, attend: Attention, head_size: int, lengths: tuple[int, ...]) -> dict[str, Any]:
    rows, scale = sum(lengths), head_size**-0.5
    packed = torch.randn(rows, 3, HEADS, head_size, device=probe.device).bfloat16()
    query, key, value = packed.unbind(1)  # strided, as the towers make them
    segments = Segments.of(list(lengths), probe.device)
    mixed = attend(query, key, value, segments, scale)
    error = (mixed[-lengths[-1] :].float() - _truth(query, key, value, lengths[-1], scale)).abs().max().item()
    spent = probe.ms(lambda: attend(query, key, value, segments, scale), 10)
    flop = sum(4 * length**2 for length in lengths) * HEADS * 72  # what widening adds is no work of ours
    return {**spent, "tflops": flop / spent["ms"] / 1e9, "max_error": error}


def _truth(query: Tensor, key: Tensor, value: Tensor, length: int, scale: float) -> Tensor:
    """Return the last segment in float32, one head at a time, since all scores together take gigabytes."""
    heads = [
        functional.softmax((q.float() @ k.float().T) * scale, -1) @ v.float()
        for q, k, v in zip(*(part[-length:].unbind(1) for part in (query, key, value)), strict=True)
    ]
    return torch.stack(heads, 1)
