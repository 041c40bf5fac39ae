"""Bytes of rows as tensors: in device memory, and copied between it and the host."""

from collections.abc import Iterable

import torch
from torch import Tensor

from encoder_contract.device_memory import DeviceMemory
from encoder_contract.extents import View, cut, pairs
from encoder_contract.registration import within_piece


def copy_tensors(targets: Iterable[View], sources: Iterable[View]) -> None:
    """Copy flat bytes into others of equal total length, possibly split elsewhere, and wait for completion.

    Between a GPU and registered host memory, all pieces are copied asynchronously, with one wait at the end. The
    sources must be ready on the calling thread's current stream.
    """
    devices = set()
    for target, source in pairs(
        cut(map(as_tensor, targets), within_piece), cut(map(as_tensor, sources), within_piece)
    ):
        target.copy_(source, non_blocking=True)
        devices |= {piece.device for piece in (source, target) if piece.is_cuda}
    for device in devices:
        copied = torch.cuda.Event(blocking=True)  # type: ignore[no-untyped-call]
        copied.record(torch.cuda.current_stream(device))
        copied.synchronize()  # a blocking event uses no core while it waits; waiting for the stream would


def as_tensor(memory: View) -> Tensor:
    """Return memory as a tensor, uint8 [bytes], without a copy."""
    return memory if isinstance(memory, Tensor) else torch.frombuffer(memory, dtype=torch.uint8)


def flat(rows: Tensor) -> Tensor:
    """Return the bytes of rows as uint8 [bytes]."""
    return rows.contiguous().view(torch.uint8).view(-1)


def tensor_over(memory: DeviceMemory, device: str) -> Tensor:
    """Return device memory as a tensor, uint8 [bytes], without a copy."""
    content = memory.content
    if isinstance(content, memoryview):
        return as_tensor(content)
    tensor = torch.as_tensor(content, device=device)
    assert tensor.data_ptr() == content.address, (
        "torch copied the memory: other processes would not see the rows"
    )
    return tensor
