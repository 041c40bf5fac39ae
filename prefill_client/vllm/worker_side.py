"""The worker's part of the connector: copies rows to the device."""

import logging
from collections.abc import Iterable
from functools import partial

import torch

from encoder_contract.extents import cut, pairs, views
from encoder_contract.registration import CudaRegistration, within_piece
from prefill_client.transport.rows import element_type, tensor_view
from prefill_client.vllm.host_memory import MappedMemory, RowLoad
from prefill_client.vllm.staging import StagingWorker

_log = logging.getLogger("vllm.encoder_service")


class RowLoader:
    """Loads rows onto the device of one worker."""

    def __init__(self, width: int, dtype: str, device: torch.device) -> None:
        """`width` and `dtype` describe a row as the service makes it."""
        self._width = width
        self._dtype = dtype
        self._device = device
        self._path = ""
        self._memory = torch.empty(0, dtype=torch.uint8)
        self._staging: StagingWorker | None = None
        # Copies run on a side stream, so that they begin while the compute stream still runs the previous step.
        self._stream = torch.cuda.Stream(device) if device.type == "cuda" else None  # type: ignore[no-untyped-call]

    def connect(self, staging: bytes) -> None:
        """Connect to the `Staging` at this address, once; with an empty address, do nothing."""
        if staging and self._staging is None:
            self._staging = StagingWorker(staging, self._width, self._dtype, self._device)

    def load(self, path: str, loads: Iterable[RowLoad], cache: dict[str, torch.Tensor]) -> None:
        """Add a tensor [rows, width] on the device to `cache` for each load: staged, or from the memory at `path`.

        On a GPU the copies may still run on the side stream when this returns; the current stream waits for them. They
        have ended when the step's output is there, since its forward runs on the current stream.
        """
        if self._path != path:
            self._map(path)
        for load in loads:
            if load.staged:
                assert self._staging is not None, "this worker has confirmed the copy"
                cache[load.identifier] = self._staging.rows(load.staged)
            else:
                cache[load.identifier] = self._copy(load)

    def _map(self, path: str) -> None:
        """Map the memory and, on a GPU, begin to register it: no step waits for that."""
        # CUDA cannot register read-only memory.
        mapped = MappedMemory(path, writable=self._stream is not None)
        self._path, self._memory = path, tensor_view(mapped.whole, "uint8")
        if self._stream is not None:
            # Its device has a number. The engine's "cuda" is another GPU on another thread.
            CudaRegistration(self._memory, partial(register, device=self._stream.device))

    def _copy(self, load: RowLoad) -> torch.Tensor:
        with torch.cuda.stream(self._stream):  # does nothing without one
            size = sum(length for _, length in load.extents)
            rows = torch.empty(size, dtype=torch.uint8, device=self._device)
            sources = cut(views(self._memory, load.extents), within_piece)
            for target, source in pairs([rows], sources):
                # From memory that is not registered, CUDA first copies to memory of its own, while this thread waits.
                target.copy_(source, non_blocking=True)
        if self._stream is not None:
            current = torch.cuda.current_stream(self._device)
            current.wait_stream(self._stream)
            rows.record_stream(current)  # the side stream allocated it, the current stream reads it
        return rows.view(getattr(torch, self._dtype)).view(-1, self._width)


def register(memory: torch.Tensor, device: torch.device) -> bool:
    """Register a piece of the memory with CUDA. This allocates all of it, and takes 0.3 s per GiB.

    Return False, with a warning, if CUDA refuses: copies from it are then slower, and steps wait for them. CUDA keeps
    the error for the thread, whose next kernel would report it as its own.
    """
    with torch.cuda.device(device):
        error = int(torch.cuda.cudart().cudaHostRegister(memory.data_ptr(), len(memory), 0))  # type: ignore[no-untyped-call]
    if error:
        _log.warning(
            "CUDA cannot register the host memory for rows (cudaError %d), so loading rows is slower. A locked-memory "
            "limit is the usual reason: see `ulimit -l`",
            error,
        )
    return not error


def row_bytes(width: int, dtype: str) -> int:
    """Return the bytes of one row."""
    return width * element_type(dtype).itemsize
