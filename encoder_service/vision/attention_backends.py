"""The attention backends: torch's own on any device, cuDNN and flash attention on CUDA."""

import importlib
from collections.abc import Callable
from itertools import groupby
from types import ModuleType
from typing import ClassVar

import torch
from torch import Tensor
from torch.nn import functional
from torch.nn.attention import SDPBackend, sdpa_kernel

from encoder_service.vision.segments import Attention, Segments

# What torch may choose on CUDA for a length it has not seen. Not cuDNN: it plans for every length anew, tens of
# milliseconds each (pytorch PR 191576), and photos come in many.
_UNPLANNED = [SDPBackend.FLASH_ATTENTION, SDPBackend.EFFICIENT_ATTENTION, SDPBackend.MATH]


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

    def _run(
        self, query: Tensor, key: Tensor, value: Tensor, length: int, count: int, scale: float
    ) -> Tensor:
        heads, head_size = query.shape[1:]
        query, key, value = (
            part.view(count, length, heads, head_size).transpose(1, 2) for part in (query, key, value)
        )
        mixed = self._dense(query, key, value, scale)
        return mixed.transpose(1, 2).reshape(count * length, heads, head_size)

    def _dense(self, query: Tensor, key: Tensor, value: Tensor, scale: float) -> Tensor:
        """[segments, heads, rows, head size] each → the same."""
        if not query.is_cuda:
            return functional.scaled_dot_product_attention(query, key, value, scale=scale)
        with sdpa_kernel(_UNPLANNED):
            return functional.scaled_dot_product_attention(query, key, value, scale=scale)


class CudnnAttention(SegmentAttention):
    """cuDNN's fused attention on dense batches (CUDA): it plans for every new shape and keeps the plan.

    Its form for packed segments is not used: torch looks its plan up and never keeps it (pytorch PR 191576), so that
    every call plans anew and a plan made while a graph is captured is lost.
    """

    name = "cudnn"

    def _dense(self, query: Tensor, key: Tensor, value: Tensor, scale: float) -> Tensor:
        attend = torch.ops.aten._scaled_dot_product_cudnn_attention
        output: Tensor = attend(query, key, value, None, False, 0.0, False, False, scale=scale)[0]
        return output


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


class FlashAttention:
    """Flash attention over packed segments (CUDA): releases 2, 3 and 4, each from a package of its own."""

    graphs = True
    # Release 3 has two builds: the wheel `fa3-fwd`, which has the forward pass alone, and one's own from the sources.
    _MODULES: ClassVar = {
        2: ("flash_attn",),
        3: ("fa3_fwd_interface", "flash_attn_interface"),
        4: ("flash_attn.cute",),
    }
    # Splitting a segment's keys over the device would make the order of sums hang on what else is in the batch.
    _OPTIONS: ClassVar[dict[int, dict[str, int]]] = {3: {"num_splits": 1}}

    def __init__(self, release: int) -> None:
        self.name = f"flash{release}"
        module = _first_of(self._MODULES[release])
        self._attend: Callable[..., Tensor | tuple[Tensor, ...]] = module.flash_attn_varlen_func
        self._options = self._OPTIONS.get(release, {})

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
            **self._options,
        )
        return output[0] if isinstance(output, tuple) else output


class FixedAndPacked:
    """Two backends: one segment whose length is fixed goes to the first, everything else to the second."""

    def __init__(self, fixed: Attention, packed: Attention) -> None:
        self.name = f"{packed.name}+{fixed.name}"
        self.graphs = packed.graphs
        self._fixed = fixed
        self._packed = packed

    def __call__(self, query: Tensor, key: Tensor, value: Tensor, segments: Segments, scale: float) -> Tensor:
        """See `Attention`."""
        attend = self._fixed if segments.fixed else self._packed
        return attend(query, key, value, segments, scale)


def build(name: str) -> Attention:
    """Return the backend of this name; raises what its library does when it cannot be imported."""
    if name == "sdpa":
        return SegmentAttention()
    if name == "varlen":
        return TorchVarlenAttention()
    if name == "cudnn":
        return CudnnAttention()
    return FlashAttention(int(name.removeprefix("flash")))


def _first_of(names: tuple[str, ...]) -> ModuleType:
    """Import the first of these modules that is installed; `ImportError` names them all."""
    for name in names:
        try:
            return importlib.import_module(name)
        except ModuleNotFoundError:
            continue
    raise ImportError(f"none of {', '.join(names)} is installed")
