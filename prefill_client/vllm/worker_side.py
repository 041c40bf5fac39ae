"""The worker's part of the connector: copies rows to the device, and rows of the engine's own tower to host memory."""

import logging
import os
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor

import torch

from prefill_client.transport.rows import element_type, tensor_view
from prefill_client.vllm.host_memory import RECORD, Load, MappedMemory, Outgoing, Save
from prefill_client.vllm.staging import StagingWorker

_log = logging.getLogger("vllm.encoder_service")


class RowLoader:
    """Loads rows onto the device of one worker."""

    def __init__(self, width: int, dtype: str, device: torch.device) -> None:
        """`width` and `dtype` describe a row as the service makes it."""
        self._width = width
        self._dtype = dtype
        self._device = device
        self._memory: MappedMemory | None = None
        self._registered = False
        self._staging: StagingWorker | None = None
        # Copies run on a side stream, so that they begin while the compute stream still runs the previous step.
        self._stream = torch.cuda.Stream(device) if device.type == "cuda" else None  # type: ignore[no-untyped-call]

    def connect(self, staging: bytes) -> None:
        """Connect to the `Staging` at this address, once; with an empty address, do nothing."""
        if staging and self._staging is None:
            self._staging = StagingWorker(staging, self._width, self._dtype, self._device)

    def load(self, path: str, loads: Iterable[Load], cache: dict[str, torch.Tensor]) -> None:
        """Add a tensor [rows, width] on the device to `cache` for each load: staged, or from the memory at `path`.

        On a GPU the copies may still run on the side stream when this returns; the current stream waits for them. They
        have ended when the step's output is there, since its forward runs on the current stream.
        """
        if self._memory is None or self._memory.path != path:
            is_gpu = self._device.type == "cuda"
            self._memory = MappedMemory(path, writable=is_gpu)  # CUDA cannot register read-only memory
            self._registered = is_gpu and register(self._memory, self._device)
        for load in loads:
            if load.staged:
                assert self._staging is not None, "this worker has confirmed the copy"
                cache[load.identifier] = self._staging.rows(load.staged)
            else:
                cache[load.identifier] = self._copy(self._memory, load)

    def _copy(self, memory: MappedMemory, load: Load) -> torch.Tensor:
        with torch.cuda.stream(self._stream):  # does nothing without one
            size, begin = sum(length for _, length in load.extents), 0
            rows = torch.empty(size, dtype=torch.uint8, device=self._device)
            for piece in memory.pieces(load.extents):
                # From unregistered memory, CUDA copies in pieces while this thread waits.
                rows[begin : begin + len(piece)].copy_(
                    tensor_view(piece, "uint8"), non_blocking=self._registered
                )
                begin += len(piece)
        if self._stream is not None:
            current = torch.cuda.current_stream(self._device)
            current.wait_stream(self._stream)
            rows.record_stream(current)  # the side stream allocated it, the current stream reads it
        return rows.view(getattr(torch, self._dtype)).view(-1, self._width)


def register(memory: MappedMemory, device: torch.device) -> bool:
    """Register all of `memory` with CUDA. This allocates all of it, and takes 0.3 s per GiB.

    Return False, with a warning, if CUDA refuses. Copies from it are then slower, and the calling thread waits for
    them.
    """
    whole = memory.whole
    with torch.cuda.device(device):
        error = int(torch.cuda.cudart().cudaHostRegister(whole.ctypes.data, whole.nbytes, 0))  # type: ignore[no-untyped-call]
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


class RowSaver:
    """Copies rows of the engine's own tower from the device of one worker to host memory."""

    def __init__(self, width: int, dtype: str, device: torch.device) -> None:
        """`width` and `dtype` describe a row as the engine makes it."""
        self._width = width
        self._dtype = getattr(torch, dtype)
        self._memory: MappedMemory | None = None
        self._pipe = -1
        self._copies = ThreadPoolExecutor(1, "rows-out")
        # Copies run on a side stream, so that the compute stream goes on with the language model.
        self._stream = torch.cuda.Stream(device) if device.type == "cuda" else None  # type: ignore[no-untyped-call]

    def save(self, outgoing: Outgoing, save: Save, rows: torch.Tensor) -> None:
        """Begin to copy `rows` [rows, width] to host memory. The pipe gets a record when the copy ends or fails."""
        if self._memory is None:
            self._memory = MappedMemory(outgoing.path, writable=True)
            self._pipe = os.open(outgoing.pipe, os.O_WRONLY | os.O_CLOEXEC)
        rows_are_made = None
        if self._stream is not None:
            rows_are_made = torch.cuda.Event()  # type: ignore[no-untyped-call]
            rows_are_made.record()
        self._copies.submit(self._copy, self._memory, save, rows, rows_are_made)

    def close(self) -> None:
        """Wait for running copies to end, and close the pipe."""
        self._copies.shutdown()
        if self._pipe >= 0:
            os.close(self._pipe)
            self._pipe = -1

    def _copy(
        self, memory: MappedMemory, save: Save, rows: torch.Tensor, rows_are_made: "torch.cuda.Event | None"
    ) -> None:
        copied = False
        try:
            if rows_are_made is not None:
                rows_are_made.wait(self._stream)
            with torch.cuda.stream(self._stream):  # does nothing without one
                self._write(memory, save, rows)
            copied = True
        except Exception:  # noqa: BLE001 - the engine goes on after any error
            _log.exception("rows of the engine's tower cannot be shared")
        finally:
            os.write(self._pipe, RECORD.pack(save.number, copied))

    def _write(self, memory: MappedMemory, save: Save, rows: torch.Tensor) -> None:
        if rows.dtype != self._dtype or rows.ndim != 2 or rows.shape[1] != self._width:
            raise ValueError(f"the tower made rows {tuple(rows.shape)} of {rows.dtype}")
        data = rows.contiguous().view(torch.uint8).reshape(-1)
        if len(data) != sum(length for _, length in save.extents):
            raise ValueError(
                f"the tower made {len(rows)} rows, but the prompt has another number of placeholder tokens"
            )
        begin = 0
        for piece in memory.pieces(save.extents):
            # The memory is not registered, so this returns when the copy is done.
            tensor_view(piece, "uint8").copy_(data[begin : begin + len(piece)])
            begin += len(piece)
