"""Attention over packed segments: one interface, and its backends."""

import importlib
import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import ClassVar, Protocol, Self

import torch
from torch import Tensor
from torch.nn import functional

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Segments:
    """Consecutive segments of packed rows; rows attend only within their segment.

    `lengths` are on the host, in rows; `bounds` is their running sum from 0 on the device, int32
    [len(lengths) + 1]; `longest` bounds every length. In a replayed CUDA graph only `bounds` is read.
    """

    lengths: tuple[int, ...]
    bounds: Tensor
    longest: int

    @classmethod
    def of(cls, lengths: Sequence[int], device: torch.device) -> Self:
        """Segments of these lengths; there is at least one row."""
        return cls(tuple(lengths), running_bounds(lengths, device), max(lengths))


def running_bounds(lengths: Sequence[int], device: torch.device) -> Tensor:
    """The running sum of `lengths` from 0, int32 [len(lengths) + 1] on `device`."""
    bounds = torch.tensor([0, *lengths], dtype=torch.int32).cumsum(0, dtype=torch.int32)
    if device.type == "cuda":
        # Only from pinned memory does a copy never wait for the device.
        return bounds.pin_memory().to(device, non_blocking=True)
    return bounds


class Attention(Protocol):
    """A backend. It never mixes segments, never synchronises host and device, and does not modify its inputs."""

    name: str
    graphs: bool  # whether bounds are read on the device, so that a CUDA graph can be replayed with different ones

    def __call__(self, query: Tensor, key: Tensor, value: Tensor, segments: Segments, scale: float) -> Tensor:
        """[rows, heads, head size] each (strided views are fine) → [rows, heads, head size], contiguous."""
        ...


class SegmentAttention:
    """torch's scaled dot product attention, runs of equally long segments as one dense batch. Runs on any device."""

    name, graphs = "sdpa", False

    def __call__(self, query: Tensor, key: Tensor, value: Tensor, segments: Segments, scale: float) -> Tensor:
        """See `Attention`."""
        runs = [(length, len(list(run))) for length, run in groupby(segments.lengths) if length]
        if len(runs) == 1:
            return self._run(query, key, value, *runs[0], scale)
        output = torch.empty(query.shape, dtype=query.dtype, device=query.device)
        begin = 0
        for length, count in runs:
            rows = slice(begin, begin + length * count)
            output[rows] = self._run(query[rows], key[rows], value[rows], length, count, scale)
            begin = rows.stop
        return output

    @staticmethod
    def _run(query: Tensor, key: Tensor, value: Tensor, length: int, count: int, scale: float) -> Tensor:
        heads, head_size = query.shape[1:]
        query, key, value = (
            part.view(count, length, heads, head_size).transpose(1, 2) for part in (query, key, value)
        )
        mixed = functional.scaled_dot_product_attention(query, key, value, scale=scale)
        return mixed.transpose(1, 2).reshape(count * length, heads, head_size)


class TorchVarlenAttention:
    """torch's own variable-length flash attention (CUDA)."""

    name, graphs = "varlen", True

    def __init__(self) -> None:
        from torch.nn.attention.varlen import varlen_attn

        self._attend = varlen_attn

    def __call__(self, query: Tensor, key: Tensor, value: Tensor, segments: Segments, scale: float) -> Tensor:
        """See `Attention`."""
        bounds, longest = segments.bounds, segments.longest
        output = self._attend(query, key, value, bounds, bounds, longest, longest, scale=scale)
        assert isinstance(output, Tensor)  # no auxiliary outputs were asked for
        return output


class CudnnAttention:
    """cuDNN's fused attention over packed segments (CUDA), called as torch's own variable-length wrapper calls it."""

    name, graphs = "cudnn", True

    def __call__(self, query: Tensor, key: Tensor, value: Tensor, segments: Segments, scale: float) -> Tensor:
        """See `Attention`."""
        bounds, longest = segments.bounds, segments.longest
        outputs = torch.ops.aten._cudnn_attention_forward(
            query, key, value, None, bounds, bounds, longest, longest, True, 0.0, False, False, scale=scale
        )
        output: Tensor = outputs[0]
        return output


class FlashAttention:
    """Flash attention over packed segments (CUDA): releases 2, 3 and 4, each from its own package."""

    graphs = True
    _MODULES: ClassVar = {2: "flash_attn", 3: "flash_attn_interface", 4: "flash_attn.cute"}

    def __init__(self, release: int) -> None:
        self.name = f"flash{release}"
        module = importlib.import_module(self._MODULES[release])
        self._attend: Callable[..., Tensor | tuple[Tensor, ...]] = module.flash_attn_varlen_func

    def __call__(self, query: Tensor, key: Tensor, value: Tensor, segments: Segments, scale: float) -> Tensor:
        """See `Attention`."""
        output = self._attend(
            query,
            key,
            value,
            cu_seqlens_q=segments.bounds,
            cu_seqlens_k=segments.bounds,
            max_seqlen_q=segments.longest,
            max_seqlen_k=segments.longest,
            softmax_scale=scale,
            causal=False,
        )
        return output[0] if isinstance(output, tuple) else output


# `bench.gpu` prints the times that justify this order; peers measured cuDNN ahead of flash attention 3 by 11.6 % of
# time to first token on Hopper for these towers.
BACKENDS = ("cudnn", "flash4", "flash3", "varlen", "flash2", "sdpa")


def make_attention(name: str, device: torch.device, dtype: torch.dtype) -> Attention:
    """Return the backend called `name`, or with "auto" the first of `BACKENDS` that runs on `device` in `dtype`.

    Every candidate is tried on a small input first, so a missing package or an unsupported device is found at
    start. Raises `ValueError` for an unknown name, or if the backend requested by name cannot run.
    """
    if name != "auto":
        if name not in BACKENDS:
            raise ValueError(f"attention {name!r} is unknown (known: auto, {', '.join(BACKENDS)})")
        reason = why_not(name, device, dtype)
        if reason:
            raise ValueError(f"attention {name!r} cannot run here: {reason}")
        return _build(name)
    for candidate in BACKENDS:
        reason = why_not(candidate, device, dtype)
        if not reason:
            logger.info("attention: %s (auto, on %s in %s)", candidate, device, dtype)
            return _build(candidate)
        logger.debug("attention: not %s: %s", candidate, reason)
    raise AssertionError("scaled dot product attention runs everywhere")


def why_not(name: str, device: torch.device, dtype: torch.dtype) -> str:
    """Return why backend `name` cannot run on `device` in `dtype`; empty if it can."""
    if name == "sdpa":
        return ""
    if device.type != "cuda":
        return f"it needs CUDA, the device is {device}"
    if dtype is torch.float32:
        return "it has no float32 kernel"
    try:
        attend = _build(name)
        rows = torch.zeros(48, 2, 72, dtype=dtype, device=device)
        attend(rows, rows, rows, Segments.of([16, 32], device), 1.0)
        torch.cuda.synchronize(device)
    except (ImportError, RuntimeError, TypeError, AttributeError) as error:
        # Raised for a missing or old package, an unsupported architecture, or a kernel that was not built.
        return f"{type(error).__name__}: {error}"
    return ""


def _build(name: str) -> Attention:
    if name == "sdpa":
        return SegmentAttention()
    if name == "varlen":
        return TorchVarlenAttention()
    if name == "cudnn":
        return CudnnAttention()
    return FlashAttention(int(name.removeprefix("flash")))
