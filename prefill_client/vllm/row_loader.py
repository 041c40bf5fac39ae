"""In each worker: copies rows from host memory into vLLM's encoder cache, before the step that reads them."""

from collections.abc import Iterable

import torch

from prefill_client.transport.rows import element_type, tensor_view
from prefill_client.vllm.host_memory import MappedMemory
from prefill_client.vllm.load_plan import Load


class RowLoader:
    """Of one worker, on its own device."""

    def __init__(self, width: int, dtype: str, device: torch.device) -> None:
        """`width`, `dtype`: a row, as the service describes it."""
        self._width = width
        self._dtype = dtype
        self._device = device
        self._memory: MappedMemory | None = None
        # Beside the stream that computes: the copies begin while that still runs the step before.
        self._stream = torch.cuda.Stream(device) if device.type == "cuda" else None  # type: ignore[no-untyped-call]

    def load(self, path: str, loads: Iterable[Load], cache: dict[str, torch.Tensor]) -> None:
        """Put a tensor [rows, width] on the device into `cache` for each; the memory at `path` is free afterwards."""
        if self._memory is None or self._memory.path != path:
            self._memory = MappedMemory(path)
        for load in loads:
            cache[load.identifier] = self._copied(self._memory, load)

    def _copied(self, memory: MappedMemory, load: Load) -> torch.Tensor:
        with torch.cuda.stream(self._stream):  # does nothing without one
            size, begin = sum(length for _, length in load.extents), 0
            rows = torch.empty(size, dtype=torch.uint8, device=self._device)
            for piece in memory.pieces(load.extents):
                # Out of pageable memory: it returns when the memory has been read.
                rows[begin : begin + len(piece)].copy_(tensor_view(piece, "uint8"))
                begin += len(piece)
        if self._stream is not None:
            current = torch.cuda.current_stream(self._device)
            current.wait_stream(self._stream)
            rows.record_stream(current)  # its memory is the side stream's, and is read on this one
        return rows.view(getattr(torch, self._dtype)).view(-1, self._width)


def row_bytes(width: int, dtype: str) -> int:
    """Return the bytes of one row."""
    return width * element_type(dtype).itemsize
