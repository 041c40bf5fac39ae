"""The trial of an attention backend: on awkward input, compared with float32, timed, and replayed in a CUDA graph."""

import time
from collections.abc import Sequence

import torch
from torch import Tensor

from encoder_service.vision.capture import CudaCapture
from encoder_service.vision.segments import Attention, Segments, running_bounds

# Odd lengths, an empty segment, a single row; and others of the same sum, for the replay.
LENGTHS = (130, 0, 64, 1)
OTHER_LENGTHS = (2, 100, 93, 0)
HEADS = 2

# Of a row, as a share of the row. Bfloat16 is off by three thousandths; what mixes segments, or reads strided rows as
# if they lay side by side, by all of it.
MAX_ROW_ERROR = 0.02
# The third call on 195 rows takes some ten microseconds; what takes longer plans or compiles anew in every call.
MAX_THIRD_CALL_MS = 5.0


def failure(
    attend: Attention,
    device: torch.device,
    dtype: torch.dtype,
    head_size: int,
    *,
    fixed: bool = False,
    max_third_call_ms: float = MAX_THIRD_CALL_MS,
) -> str:
    """Return what is wrong with a backend on `device` in `dtype`; empty if it may be used.

    With `fixed` it is tried on one segment of a fixed length. On CUDA a third call of more than
    `max_third_call_ms` is wrong, too, and so is a graph that cannot be captured or does not give, replayed with other
    rows and bounds, what belongs to those.
    """
    try:
        return _failure(attend, _Case(device, dtype, head_size, fixed), max_third_call_ms)
    except Exception as error:  # noqa: BLE001 - whatever a foreign kernel raises is the reason
        return f"{type(error).__name__}: {error}"


class _Case:
    """Random queries, keys and values as the towers make them, and what attention over them must give."""

    def __init__(self, device: torch.device, dtype: torch.dtype, head_size: int, fixed: bool) -> None:
        self.device = device
        self.fixed = fixed
        generator = torch.Generator().manual_seed(0)
        shape = (2, sum(LENGTHS), 3, HEADS, head_size)
        self.first, self.second = torch.randn(shape, generator=generator).to(device, dtype).unbind(0)
        self.scale = head_size**-0.5

    def lengths(self, packed: Sequence[int]) -> tuple[int, ...]:
        return (sum(packed),) if self.fixed else tuple(packed)

    def segments(self, packed: Sequence[int]) -> Segments:
        lengths = self.lengths(packed)
        longest = max(self.lengths(LENGTHS) + self.lengths(OTHER_LENGTHS))
        return Segments(lengths, running_bounds(lengths, self.device), longest, self.fixed)

    def run(self, attend: Attention, packed: Tensor, segments: Segments) -> Tensor:
        """Query, key and value are strided views of one packed tensor [rows, 3, heads, head size]."""
        query, key, value = packed.unbind(1)
        return attend(query, key, value, segments, self.scale)

    def error(self, mixed: Tensor, packed: Tensor, lengths: Sequence[int]) -> float:
        """Return the largest relative error of a row; not a number if one is none."""
        truth = _in_float32(packed.cpu().float(), lengths, self.scale)
        return float(((mixed.cpu().float() - truth).norm(dim=-1) / truth.norm(dim=-1)).max())


def _failure(attend: Attention, case: _Case, max_third_call_ms: float) -> str:
    segments = case.segments(LENGTHS)
    error = case.error(case.run(attend, case.first, segments), case.first, segments.lengths)
    if not error <= MAX_ROW_ERROR:
        return f"its rows are off by {error:.2g} of themselves"
    if case.device.type != "cuda":
        return ""
    for _ in range(2):
        torch.cuda.synchronize(case.device)
        began = time.perf_counter()
        case.run(attend, case.first, segments)
        torch.cuda.synchronize(case.device)
    spent_ms = (time.perf_counter() - began) * 1e3
    if spent_ms > max_third_call_ms:
        return f"its third call took {spent_ms:.1f} ms"
    return _replay_failure(attend, case) if attend.graphs or case.fixed else ""


def _replay_failure(attend: Attention, case: _Case) -> str:
    """Return what is wrong with a captured call that is replayed with other rows and bounds."""
    packed, segments = case.first.clone(), case.segments(LENGTHS)
    replay = CudaCapture(case.device)(lambda: case.run(attend, packed, segments))
    packed.copy_(case.second)
    segments.bounds.copy_(case.segments(OTHER_LENGTHS).bounds)
    mixed = replay()
    error = case.error(mixed, case.second, case.lengths(OTHER_LENGTHS))
    return "" if error <= MAX_ROW_ERROR else f"replayed, its rows are off by {error:.2g} of themselves"


def _in_float32(packed: Tensor, lengths: Sequence[int], scale: float) -> Tensor:
    """Attention by its definition, segment by segment: packed [rows, 3, heads, head size] on the CPU."""
    mixed = []
    for segment in torch.split(packed, list(lengths)):
        query, key, value = segment.unbind(1)
        weights = torch.softmax(torch.einsum("qhd,khd->hqk", query, key) * scale, dim=-1)
        mixed.append(torch.einsum("hqk,khd->qhd", weights, value))
    return torch.cat(mixed)
