"""Bytes of rows as tensors: in device memory, and copied between it and the host."""

from collections.abc import Iterable

import torch
from torch import Tensor

from encoder_contract.device_memory import DeviceMemory
from encoder_contract.extents import cut, pairs
from encoder_contract.registration import within_piece


def copy_bytes(targets: Iterable[Tensor], sources: Iterable[Tensor]) -> None:
    """Copy flat uint8 tensors into others of equal total length, possibly split elsewhere, and wait for completion.

    Between a GPU and registered host memory, all pieces are copied asynchronously, with one wait at the end. The
    sources must be ready on the calling thread's current stream.
    """
    devices = set()
    for target, source in pairs(cut(targets, within_piece), cut(sources, within_piece)):
        target.copy_(source, non_blocking=True)
        devices |= {piece.device for piece in (source, target) if piece.is_cuda}
    for device in devices:
        copied = torch.cuda.Event(blocking=True)  # type: ignore[no-untyped-call]
        copied.record(torch.cuda.current_stream(device))
        copied.synchronize()  # a blocking event uses no core while it waits; waiting for the stream would


def flat(rows: Tensor) -> Tensor:
    """Return the bytes of rows as uint8 [bytes]."""
    return rows.contiguous().view(torch.uint8).view(-1)


def tensor_over(memory: DeviceMemory, device: str) -> Tensor:
    """Return device memory as a tensor, uint8 [bytes], without a copy."""
    content = memory.content
    if isinstance(content, memoryview):
        return torch.frombuffer(content, dtype=torch.uint8)
    tensor = torch.as_tensor(content, device=device)
    assert tensor.data_ptr() == content.address, (
        "torch copied the memory: other processes would not see the rows"
    )
    return tensor
