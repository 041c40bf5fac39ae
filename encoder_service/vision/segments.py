"""Segments of packed rows, and the interface of attention over them."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol, Self

import torch
from torch import Tensor


@dataclass(frozen=True, slots=True)
class Segments:
    """Consecutive segments of packed rows; rows attend only within their segment.

    `lengths` are on the host, in rows; `bounds` is their running sum from 0 on the device, int32
    [len(lengths) + 1]; `longest` bounds every length. In a replayed CUDA graph only `bounds` is read, unless the
    segments are `fixed`: one segment of all rows, whose length is the same in every replay, so that a kernel may be
    planned for it alone.
    """

    lengths: tuple[int, ...]
    bounds: Tensor
    longest: int
    fixed: bool = False

    def __post_init__(self) -> None:
        assert not self.fixed or len(self.lengths) == 1, self.lengths

    @classmethod
    def of(cls, lengths: Sequence[int], device: torch.device) -> Self:
        """Segments of these lengths; there is at least one row."""
        return cls(tuple(lengths), running_bounds(lengths, device), max(lengths))


def running_bounds(lengths: Sequence[int], device: torch.device) -> Tensor:
    """The running sum of `lengths` from 0, int32 [len(lengths) + 1] on `device`."""
    bounds = torch.tensor([0, *lengths], dtype=torch.int32).cumsum(0, dtype=torch.int32)
    return moved(bounds, device)


def moved(made: Tensor, device: torch.device) -> Tensor:
    """Return a tensor that was made on the host on `device`; the host does not wait for the device."""
    if device.type == "cuda":
        # Only from pinned memory does a copy never wait.
        return made.pin_memory().to(device, non_blocking=True)
    return made


class Attention(Protocol):
    """A backend. It never mixes segments, never synchronises host and device, and does not modify its inputs."""

    name: str
    graphs: bool  # whether bounds are read on the device, so that a CUDA graph can be replayed with different ones

    def __call__(self, query: Tensor, key: Tensor, value: Tensor, segments: Segments, scale: float) -> Tensor:
        """[rows, heads, head size] each (strided views are fine) → [rows, heads, head size], contiguous."""
        ...
