"""The worker's part: copies rows from host memory to the device, and rows of the engine's own tower back."""

import logging
import os
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor

import torch

from prefill_client.transport.rows import element_type, tensor_view
from prefill_client.vllm.host_memory import RECORD, Load, MappedMemory, Outgoing, Save
from prefill_client.vllm.staging import Stage

_log = logging.getLogger("vllm.encoder_service")


class RowLoader:
    """Of one worker, on its own device."""

    def __init__(self, width: int, dtype: str, device: torch.device) -> None:
        """`width`, `dtype`: a row, as the service describes it."""
        self._width = width
        self._dtype = dtype
        self._device = device
        self._memory: MappedMemory | None = None
        self._registered = False
        self._stage: Stage | None = None
        # Beside the stream that computes: the copies begin while that still runs the step before.
        self._stream = torch.cuda.Stream(device) if device.type == "cuda" else None  # type: ignore[no-untyped-call]

    def join(self, staging: bytes) -> None:
        """Begin to copy rows for the `Staging` at this address, unless that is so or there is none."""
        if staging and self._stage is None:
            self._stage = Stage(staging, self._width, self._dtype, self._device)

    def load(self, path: str, loads: Iterable[Load], cache: dict[str, torch.Tensor]) -> None:
        """Put a tensor [rows, width] on the device into `cache` for each: staged, or from the memory at `path`.

        On a GPU the copies may still be under way, on a stream of their own for which the current one waits. The memory
        is free when the step's output is there: it comes out of a forward on that stream.
        """
        if self._memory is None or self._memory.path != path:
            is_gpu = self._device.type == "cuda"
            self._memory = MappedMemory(path, writable=is_gpu)  # CUDA registers no memory that is read-only
            self._registered = is_gpu and register(self._memory, self._device)
        for load in loads:
            if load.staged:
                assert self._stage is not None, "a worker confirms its copies"
                cache[load.identifier] = self._stage.take(load.staged)
            else:
                cache[load.identifier] = self._copied(self._memory, load)

    def _copied(self, memory: MappedMemory, load: Load) -> torch.Tensor:
        with torch.cuda.stream(self._stream):  # does nothing without one
            size, begin = sum(length for _, length in load.extents), 0
            rows = torch.empty(size, dtype=torch.uint8, device=self._device)
            for piece in memory.pieces(load.extents):
                # Out of pageable memory it would be read piece by piece, while this thread waits.
                rows[begin : begin + len(piece)].copy_(
                    tensor_view(piece, "uint8"), non_blocking=self._registered
                )
                begin += len(piece)
        if self._stream is not None:
            current = torch.cuda.current_stream(self._device)
            current.wait_stream(self._stream)
            rows.record_stream(current)  # its memory is the side stream's, and is read on this one
        return rows.view(getattr(torch, self._dtype)).view(-1, self._width)


def register(memory: MappedMemory, device: torch.device) -> bool:
    """Register all of `memory` with CUDA, which takes all of it from the machine, 0.3 s a GiB.

    Return False, with a warning, if CUDA refuses: copies from it are slower then, and the thread waits for them.
    """
    whole = memory.whole
    with torch.cuda.device(device):
        error = int(torch.cuda.cudart().cudaHostRegister(whole.ctypes.data, whole.nbytes, 0))  # type: ignore[no-untyped-call]
    if error:
        _log.warning(
            "CUDA does not register the host memory for rows (cudaError %d), so that loading them is slower. A "
            "locked-memory limit is the usual reason: see `ulimit -l`",
            error,
        )
    return not error


def row_bytes(width: int, dtype: str) -> int:
    """Return the bytes of one row."""
    return width * element_type(dtype).itemsize


class RowSaver:
    """Of one worker, on its own device."""

    def __init__(self, width: int, dtype: str, device: torch.device) -> None:
        """`width`, `dtype`: a row, as the engine makes it."""
        self._width = width
        self._dtype = getattr(torch, dtype)
        self._memory: MappedMemory | None = None
        self._pipe = -1
        self._copies = ThreadPoolExecutor(1, "rows-out")
        # Beside the stream that computes, which goes on with the language model meanwhile.
        self._stream = torch.cuda.Stream(device) if device.type == "cuda" else None  # type: ignore[no-untyped-call]

    def save(self, outgoing: Outgoing, save: Save, rows: torch.Tensor) -> None:
        """Begin to copy `rows` [rows, width] out; the pipe is told when they are there, or cannot be."""
        if self._memory is None:
            self._memory = MappedMemory(outgoing.path, writable=True)
            self._pipe = os.open(outgoing.pipe, os.O_WRONLY | os.O_CLOEXEC)
        made = None
        if self._stream is not None:
            made = torch.cuda.Event()  # type: ignore[no-untyped-call]
            made.record()
        self._copies.submit(self._copy, self._memory, save, rows, made)

    def close(self) -> None:
        """End the copies that are under way."""
        self._copies.shutdown()
        if self._pipe >= 0:
            os.close(self._pipe)
            self._pipe = -1

    def _copy(
        self, memory: MappedMemory, save: Save, rows: torch.Tensor, made: "torch.cuda.Event | None"
    ) -> None:
        copied = False
        try:
            if made is not None:
                made.wait(self._stream)
            with torch.cuda.stream(self._stream):  # does nothing without one
                self._write(memory, save, rows)
            copied = True
        except Exception:  # noqa: BLE001 - whatever it is, the engine goes on
            _log.exception("rows of the engine's tower cannot be shared")
        finally:
            os.write(self._pipe, RECORD.pack(save.number, copied))

    def _write(self, memory: MappedMemory, save: Save, rows: torch.Tensor) -> None:
        if rows.dtype != self._dtype or rows.ndim != 2 or rows.shape[1] != self._width:
            raise ValueError(f"the tower made rows {tuple(rows.shape)} of {rows.dtype}")
        data = rows.contiguous().view(torch.uint8).reshape(-1)
        if len(data) != sum(length for _, length in save.extents):
            raise ValueError(
                f"the tower made {len(rows)} rows, but the prompt has another number of places for them"
            )
        begin = 0
        for piece in memory.pieces(save.extents):
            # Into pageable memory: it returns when the copy is done.
            tensor_view(piece, "uint8").copy_(data[begin : begin + len(piece)])
            begin += len(piece)
