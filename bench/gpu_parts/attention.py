"""Measures the server's attention backends: whether each passes its trial, its error and its speed."""

from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from bench.gpu_parts.probe import Probe
from encoder_service.vision.attention import BACKENDS, build, why_not
from encoder_service.vision.layers import Attention, Segments

HEADS, HEAD_SIZES = 16, (72, 80)  # of the towers of Qwen3-VL and Qwen2.5-VL
# Patches of one image: a small photo, 1280×720, 960×1280, 1920×1080, 2560×1440. Last: eight small photos in one batch.
CASES = ((1024,), (3520,), (4800,), (8160,), (14400,), (1024,) * 8)
DRY_CASES = ((64,), (32, 16))


@torch.inference_mode()
def run(probe: Probe) -> None:
    """Note the result of every backend's trial, then its error and time in each case."""
    for name in BACKENDS:
        for head_size in HEAD_SIZES[: 1 if probe.dry else None]:
            reason = why_not(name, probe.device, torch.bfloat16, head_size)
            probe.note(heads := f"{name}, heads of {head_size}", trial=reason or "passed")
            if reason:
                continue
            attend = build(name)
            for lengths in DRY_CASES if probe.dry else CASES:
                case = f"{heads}, {len(lengths)}x{lengths[0]}"
                probe.attempt(case, partial(_case, probe, attend, head_size, lengths))


def _case(probe: Probe, attend: Attention, head_size: int, lengths: tuple[int, ...]) -> dict[str, Any]:
    rows, scale = sum(lengths), head_size**-0.5
    packed = torch.randn(rows, 3, HEADS, head_size, device=probe.device).bfloat16()
    query, key, value = packed.unbind(1)  # strided, as in the towers
    segments = Segments.of(list(lengths), probe.device)
    mixed = attend(query, key, value, segments, scale)
    error = (
        (mixed[-lengths[-1] :].float() - _reference(query, key, value, lengths[-1], scale)).abs().max().item()
    )
    spent = probe.ms(lambda: attend(query, key, value, segments, scale), 10)
    flop = (
        sum(4 * length**2 for length in lengths) * HEADS * 72
    )  # without the work that padding 72 to 80 adds
    return {**spent, "tflops": flop / spent["ms"] / 1e9, "max_error": error}


def _reference(query: Tensor, key: Tensor, value: Tensor, length: int, scale: float) -> Tensor:
    """Return the last segment's attention in float32, one head at a time: the scores of all heads take gigabytes."""
    heads = [
        functional.softmax((q.float() @ k.float().T) * scale, -1) @ v.float()
        for q, k, v in zip(*(part[-length:].unbind(1) for part in (query, key, value)), strict=True)
    ]
    return torch.stack(heads, 1)
