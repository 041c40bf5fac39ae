"""Attention backends (torch's own on any device; flash attention on CUDA), and the choice among them.

`make_attention` returns the backend of the setting, or the first one in an order that passes its trial. The trial runs
a backend on awkward input, compares it with float32, times it, and replays it in a CUDA graph.
"""

import importlib
import logging
import math
import time
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from itertools import groupby
from types import ModuleType
from typing import ClassVar

import torch
from torch import Tensor
from torch.nn import functional
from torch.nn.attention import SDPBackend, sdpa_kernel

from encoder_service.vision.graphs import CudaCapture
from encoder_service.vision.layers import Attention, Segments, running_bounds, to_device

logger = logging.getLogger(__name__)

# Best first, according to published measurements. `bench.gpu attention` prints times to check the order.
BACKENDS = ("flash3", "varlen", "flash2", "sdpa")
# The compute capability of H100 and H200.
HOPPER = (9, 0)


def make_attention(name: str, device: torch.device, dtype: torch.dtype, head_size: int) -> Attention:
    """Return the backend `name`, or for "auto" the first of `BACKENDS` that passes its trial on `device` in `dtype`.

    Raises `ValueError` if the name is unknown or the named backend cannot run.
    """
    if name == "auto":
        return _auto(device, dtype, head_size)
    if name not in BACKENDS:
        raise ValueError(f"attention {name!r} is unknown (known: auto, {', '.join(BACKENDS)})")
    if reason := why_not(name, device, dtype, head_size):
        raise ValueError(f"attention {name!r} cannot run here: {reason}")
    return build(name)


def why_not(name: str, device: torch.device, dtype: torch.dtype, head_size: int = 72) -> str:
    """Return why backend `name` cannot run on `device` in `dtype`; empty if it can."""
    if device.type != "cuda" and name != "sdpa":
        return f"it needs CUDA, the device is {device}"
    if dtype is torch.float32 and name != "sdpa":
        return "it has no float32 kernel"
    try:
        attend = build(name)
    except Exception as error:  # noqa: BLE001 - a library that cannot be imported can raise any type
        return f"{type(error).__name__}: {error}"
    # torch's own backend is the last resort: slow is better than none.
    limit_ms = math.inf if name == "sdpa" else MAX_THIRD_CALL_MS
    return trial_failure(attend, device, dtype, head_size, max_third_call_ms=limit_ms)


def _auto(device: torch.device, dtype: torch.dtype, head_size: int) -> Attention:
    reasons: dict[str, str] = {}
    for candidate in BACKENDS:
        reasons[candidate] = why_not(candidate, device, dtype, head_size)
        if not reasons[candidate]:
            break
        logger.debug("attention: not %s: %s", candidate, reasons[candidate])
    else:
        raise ValueError(f"no attention runs on {device} in {dtype}: {reasons}")
    if reasons["flash3"] and device.type == "cuda" and torch.cuda.get_device_capability(device) == HOPPER:
        logger.warning(
            "attention: not flash3, the fastest on this GPU: %s (the extra flash3 is for CUDA 13 on x86-64)",
            reasons["flash3"],
        )
    logger.info("attention: %s (auto, on %s in %s)", candidate, device, dtype)
    return build(candidate)


# The backends that torch may choose on CUDA for packed segments. Not cuDNN: it takes tens of milliseconds to plan for
# every new length (pytorch PR 191576), and photos have many lengths.
_UNPLANNED = [SDPBackend.FLASH_ATTENTION, SDPBackend.EFFICIENT_ATTENTION, SDPBackend.MATH]


# On the CPU, a long segment is computed in parts, so that small images can be encoded in between. A part has this many
# queries, the last one up to twice as many, of one head for each thread. From 768 queries on, torch's kernel takes 256
# at a time: a row has the same bits as in one call.
PART_QUERIES = 768


class SegmentAttention:
    """torch's scaled dot product attention on any device. Adjacent segments of equal length are one dense batch."""

    name, graphs, persistent = "sdpa", False, False

    def __call__(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        segments: Segments,
        scale: float,
        between: Callable[[], None] = lambda: None,
    ) -> Tensor:
        """See `Attention`."""
        runs = [(length, len(list(run))) for length, run in groupby(segments.lengths) if length]
        if len(runs) == 1:
            return self._run(query, key, value, *runs[0], scale, between)
        output = torch.empty(query.shape, dtype=query.dtype, device=query.device)
        begin = 0
        for length, count in runs:
            rows = slice(begin, begin + length * count)
            output[rows] = self._run(query[rows], key[rows], value[rows], length, count, scale, between)
            begin = rows.stop
        return output

    def _run(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        length: int,
        count: int,
        scale: float,
        between: Callable[[], None],
    ) -> Tensor:
        heads, head_size = query.shape[1:]
        query, key, value = (
            part.view(count, length, heads, head_size).transpose(1, 2) for part in (query, key, value)
        )
        if query.is_cuda or length < 2 * PART_QUERIES:
            with sdpa_kernel(_UNPLANNED) if query.is_cuda else nullcontext():
                mixed = functional.scaled_dot_product_attention(query, key, value, scale=scale)
            return mixed.transpose(1, 2).reshape(count * length, heads, head_size)
        output = torch.empty(count, length, heads, head_size, dtype=query.dtype)
        for head in range(0, heads, threads := torch.get_num_threads()):
            group = slice(head, head + threads)
            for begin in range(0, length - PART_QUERIES + 1, PART_QUERIES):
                is_last = begin + 2 * PART_QUERIES > length
                rows = slice(begin, length if is_last else begin + PART_QUERIES)
                between()
                output[:, rows, group] = functional.scaled_dot_product_attention(
                    query[:, group, rows], key[:, group], value[:, group], scale=scale
                ).transpose(1, 2)
        return output.view(count * length, heads, head_size)


class TorchVarlenAttention:
    """torch's own variable-length flash attention (CUDA)."""

    name, graphs, persistent = "varlen", True, False

    def __init__(self) -> None:
        from torch.nn.attention.varlen import varlen_attn

        self._attend = varlen_attn

    def __call__(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        segments: Segments,
        scale: float,
        between: Callable[[], None] = lambda: None,  # noqa: ARG002
    ) -> Tensor:
        """See `Attention`."""
        bounds, longest = segments.bounds, segments.longest
        output = self._attend(query, key, value, bounds, bounds, longest, longest, scale=scale)
        assert isinstance(output, Tensor)  # this call requests no auxiliary outputs
        return output


class FlashAttention2:
    """Flash attention 2 over packed segments (CUDA)."""

    name, graphs, persistent = "flash2", True, False

    def __init__(self) -> None:
        from flash_attn import flash_attn_varlen_func

        self._attend: Callable[..., Tensor] = flash_attn_varlen_func

    def __call__(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        segments: Segments,
        scale: float,
        between: Callable[[], None] = lambda: None,  # noqa: ARG002
    ) -> Tensor:
        """See `Attention`."""
        bounds, longest = segments.bounds, segments.longest
        return self._attend(query, key, value, bounds, bounds, longest, longest, softmax_scale=scale)


class FlashAttention3:
    """Flash attention 3 over packed segments (Hopper), whose kernel is then persistent: see its `run_flash_fwd`.

    Calls its operator directly: the wrapper in its package makes two empty tensors in every call, which takes time on
    the host and copies from the host, so that some releases cannot be captured.
    """

    name, graphs, persistent = "flash3", True, True
    # Its builds, module → operators: the wheel `fa3-fwd`, with the forward pass only, and a build from the sources.
    _BUILDS: ClassVar = {"fa3_fwd_interface": "fa3_fwd", "flash_attn_interface": "flash_attn_3"}

    def __init__(self) -> None:
        module = _import_first(tuple(self._BUILDS))  # registers the operators
        operators = getattr(torch.ops, self._BUILDS[module.__name__])
        self._attend: Callable[..., Sequence[Tensor]] = operators.fwd

    def __call__(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        segments: Segments,
        scale: float,
        between: Callable[[], None] = lambda: None,  # noqa: ARG002
    ) -> Tensor:
        """See `Attention`."""
        output, *_ = self._attend(
            query,
            key,
            value,
            cu_seqlens_q=segments.bounds,
            cu_seqlens_k=segments.bounds,
            max_seqlen_q=segments.longest,
            max_seqlen_k=segments.longest,
            softmax_scale=scale,
            # If a segment's keys were split over the device, the order of sums would depend on the rest of the batch.
            num_splits=1,
        )
        return output


def build(name: str) -> Attention:
    """Return the backend of this name. Raises the library's error if it cannot be imported."""
    backends: dict[str, Callable[[], Attention]] = {
        "flash3": FlashAttention3,
        "varlen": TorchVarlenAttention,
        "flash2": FlashAttention2,
        "sdpa": SegmentAttention,
    }
    return backends[name]()


def _import_first(names: tuple[str, ...]) -> ModuleType:
    """Import the first of these modules that is installed. The `ImportError` names them all."""
    for name in names:
        try:
            return importlib.import_module(name)
        except ModuleNotFoundError:
            continue
    raise ImportError(f"none of {', '.join(names)} is installed")


# Odd lengths, an empty segment, and a single row; for the replay, other lengths of the same sum.
LENGTHS = (130, 0, 64, 1)
OTHER_LENGTHS = (2, 100, 93, 0)
HEADS = 2

# The relative error of a row. Bfloat16 alone is off by three thousandths. A backend that mixes segments, or reads
# strided rows as contiguous, is off by the whole row.
MAX_ROW_ERROR = 0.02
# The third call on 195 rows should take some ten microseconds. A slower backend plans or compiles again in every call.
MAX_THIRD_CALL_MS = 5.0


def trial_failure(
    attend: Attention,
    device: torch.device,
    dtype: torch.dtype,
    head_size: int,
    *,
    max_third_call_ms: float = MAX_THIRD_CALL_MS,
) -> str:
    """Return why a backend must not be used on `device` in `dtype`; empty if it may.

    On CUDA, a third call that takes more than `max_third_call_ms` is a failure. So is a graph that cannot be captured,
    or that gives wrong rows when it is replayed with other rows and bounds.
    """
    try:
        return _failure(attend, _Case(device, dtype, head_size), max_third_call_ms)
    except Exception as error:  # noqa: BLE001 - kernels raise many types, and each is a reason
        return f"{type(error).__name__}: {error}"


class _Case:
    """Random queries, keys and values with the layout that towers have, and the right result."""

    def __init__(self, device: torch.device, dtype: torch.dtype, head_size: int) -> None:
        self.device = device
        generator = torch.Generator().manual_seed(0)
        shape = (2, sum(LENGTHS), 3, HEADS, head_size)
        self.first, self.second = torch.randn(shape, generator=generator).to(device, dtype).unbind(0)
        self.scale = head_size**-0.5

    def segments(self, lengths: Sequence[int]) -> Segments:
        return Segments(
            tuple(lengths), to_device(running_bounds(lengths), self.device), max(*LENGTHS, *OTHER_LENGTHS)
        )

    def run(self, attend: Attention, packed: Tensor, segments: Segments) -> Tensor:
        """Run attention on query, key and value as strided views of one tensor [rows, 3, heads, head size]."""
        query, key, value = packed.unbind(1)
        return attend(query, key, value, segments, self.scale)

    def error(self, mixed: Tensor, packed: Tensor, lengths: Sequence[int]) -> float:
        """Return the largest relative error of a row; NaN if a row has one."""
        truth = _in_float32(packed.cpu().float(), lengths, self.scale)
        return float(((mixed.cpu().float() - truth).norm(dim=-1) / truth.norm(dim=-1)).max())


def _failure(attend: Attention, case: _Case, max_third_call_ms: float) -> str:
    segments = case.segments(LENGTHS)
    error = case.error(case.run(attend, case.first, segments), case.first, segments.lengths)
    if not error <= MAX_ROW_ERROR:
        return f"the relative error of its rows is {error:.2g}"
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
    return _replay_failure(attend, case) if attend.graphs else ""


def _replay_failure(attend: Attention, case: _Case) -> str:
    """Capture a call and replay it with other rows and bounds; return why the result is wrong, or empty."""
    packed, segments = case.first.clone(), case.segments(LENGTHS)
    replay = CudaCapture(case.device)(lambda: case.run(attend, packed, segments))
    packed.copy_(case.second)
    segments.bounds.copy_(case.segments(OTHER_LENGTHS).bounds)
    mixed = replay()
    error = case.error(mixed, case.second, OTHER_LENGTHS)
    return (
        ""
        if error <= MAX_ROW_ERROR
        else f"in a replayed graph, the relative error of its rows is {error:.2g}"
    )


def _in_float32(packed: Tensor, lengths: Sequence[int], scale: float) -> Tensor:
    """Compute attention by its definition, segment by segment, from packed [rows, 3, heads, head size] on the CPU."""
    mixed = []
    for segment in torch.split(packed, list(lengths)):
        query, key, value = segment.unbind(1)
        weights = torch.softmax(torch.einsum("qhd,khd->hqk", query, key) * scale, dim=-1)
        mixed.append(torch.einsum("hqk,khd->qhd", weights, value))
    return torch.cat(mixed)
