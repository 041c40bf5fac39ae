"""Rows from GPU to GPU: every worker copies them out of the server's GPU memory before a step may use them.

The scheduler's process receives the handle and keeps its Fetch call open. The workers open the memory and copy, each on
a thread that talks to the scheduler's process through a socket. They cannot copy in a step: the service may overwrite
rows before they are copied, and an error in a step ends the engine. Nor does vLLM pass anything to its workers while
all requests wait for images. An image counts as arrived once all workers have confirmed that their copies are its rows.

Messages have the same form in both directions: the number of a copy, and a text with its length. The text to a worker
is a handle; if it is empty, the worker frees the copy. The text from a worker is the error; if it is empty, the worker
has made the copy.
"""

import asyncio
import itertools
import logging
import os
import socket
import struct
import threading
from collections.abc import Callable
from contextlib import suppress

import torch

from encoder_contract.device_memory import open_memory
from encoder_contract.handle import Handle
from encoder_contract.v1 import encoder_pb2 as pb
from prefill_client.transport import DEVICE, Receiver, receivers
from prefill_client.transport.channels import Channels
from prefill_client.transport.device import DeviceReceiver, DeviceRows, current_gpu

_log = logging.getLogger("vllm.encoder_service")
FRAME = struct.Struct("<QI")
"""Before each text: the number of its copy, and its length in bytes."""
_PEER = struct.Struct("3i")  # ucred: pid, uid, gid


class Staging:
    """The scheduler's side: rows that all workers have copied, or are copying. For one event loop."""

    def __init__(self, workers: int, limit_bytes: int) -> None:
        """Each of `workers` keeps at most `limit_bytes` of rows. With 0, nothing is copied."""
        self._expected = workers
        self._limit_bytes = limit_bytes
        self.address = b""
        """Where workers connect; empty before `open`, and always if the limit is 0."""
        self._server: asyncio.Server | None = None
        self._workers: dict[asyncio.StreamWriter, asyncio.Task[None] | None] = {}
        self._numbers = itertools.count(1)
        self._staged: dict[int, int] = {}  # bytes of each copy, by number
        self._replies: dict[int, asyncio.Queue[str]] = {}  # of workers, by the number of the copy

    async def open(self) -> None:
        """Listen for workers. The kernel chooses the socket's name, which leaves no file behind."""
        if self._limit_bytes:
            listening = socket.socket(socket.AF_UNIX)
            listening.bind("")
            self._server = await asyncio.start_unix_server(self._read_replies, sock=listening)
            self.address = listening.getsockname()

    async def close(self) -> None:
        """Close the connections. The workers' copies remain until their processes end."""
        if self._server is not None:
            self._server.close()
        for worker in self._workers:
            worker.close()
        await asyncio.gather(*filter(None, self._workers.values()))

    @property
    def is_complete(self) -> bool:
        """Whether all workers are connected."""
        return len(self._workers) == self._expected

    @property
    def free_bytes(self) -> int:
        """Bytes of rows that may be copied now."""
        return self._limit_bytes - sum(self._staged.values())

    async def copy(self, handle: Handle) -> int:
        """Return the number of a copy that every worker has made and checked; 0 if one could not."""
        if handle.row_bytes > self.free_bytes:
            return 0
        number = next(self._numbers)
        self._staged[number] = handle.row_bytes
        error = "cancelled"
        try:
            error = await self._call_workers(number, handle.to_message())
        finally:
            if error:
                self.release(number)
        if error:
            _log.info("rows come through host memory: a worker could not copy them from the GPU: %s", error)
        return 0 if error else number

    def release(self, number: int) -> None:
        """Let the workers free a copy. A worker frees it before it makes its next copy."""
        del self._staged[number]
        self._send(number, b"")

    async def probe(self, memory: bytes, memory_bytes: int) -> str:
        """Let all workers open memory of a server's GPU; return the first error, or nothing."""
        return await self._call_workers(
            next(self._numbers), pb.Handle(memory=memory, memory_bytes=memory_bytes)
        )

    def receivers(
        self, endpoint: str, description: pb.DescribeResponse, channels: Channels
    ) -> dict[str, Receiver]:
        """Return the receivers for a server. The workers open its GPU memory, this process does not."""
        by_transport = receivers(endpoint, description, channels)
        device = _WorkersReceiver.from_server(endpoint, description, channels)
        if device is not None:
            device.staging = self
            by_transport[DEVICE] = device
        return by_transport

    async def _call_workers(self, number: int, handle: pb.Handle) -> str:
        """Send a handle to all workers; return the first error, or nothing."""
        if not self.is_complete:
            return "a worker is missing"
        replies = self._replies[number] = asyncio.Queue()
        try:
            self._send(number, handle.SerializeToString())
            for _ in range(self._expected):
                if error := await replies.get():
                    return error
        finally:
            del self._replies[number]
        return ""

    def _send(self, number: int, text: bytes) -> None:
        for worker in self._workers:
            worker.write(FRAME.pack(number, len(text)) + text)

    async def _read_replies(self, reader: asyncio.StreamReader, worker: asyncio.StreamWriter) -> None:
        """Read the replies of a worker. Only processes of our user are accepted."""
        peer = worker.get_extra_info("socket").getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _PEER.size)
        if _PEER.unpack(peer)[1] != os.geteuid():
            worker.close()
            return
        self._workers[worker] = asyncio.current_task()
        with suppress(asyncio.IncompleteReadError, OSError):
            while True:
                number, size = FRAME.unpack(await reader.readexactly(FRAME.size))
                error = (await reader.readexactly(size)).decode()
                if replies := self._replies.get(number):
                    replies.put_nowait(error)
        del self._workers[worker]
        for replies in self._replies.values():
            replies.put_nowait("the worker has ended")


class _WorkersReceiver(DeviceReceiver):
    """Receives handles for the workers. The scheduler's process itself creates no context on a GPU."""

    staging: Staging
    _opening: "asyncio.Task[str] | None" = None

    @property
    def usable(self) -> bool:  # type: ignore[override]
        """Whether all workers have opened the probe. They try when a call first names this transport."""
        if self._opening is None and self.staging.is_complete:
            self._opening = asyncio.create_task(self._open())
        return self._opening is not None and self._opening.done() and not self._opening.result()

    def rows(self, ready: pb.ImageReady, is_open: Callable[[], bool]) -> DeviceRows:
        """Return rows whose memory this process does not open."""
        return DeviceRows(Handle.from_message(ready.handle), ready.width, ready.dtype, is_held=is_open)

    async def _open(self) -> str:
        error = await self.staging.probe(self._probe, self._probe_bytes)
        if error:
            self._warn(error)
        return error


class StagingWorker:
    """A worker's side: its copies, on its own device. A thread makes them, and a step uses them."""

    def __init__(self, address: bytes, width: int, dtype: str, device: torch.device) -> None:
        """Connect to the `Staging` at `address`. `width` and `dtype` describe a row as the engine reads it."""
        self._width = width
        self._dtype = dtype
        self._rows: dict[int, torch.Tensor] = {}
        # Copies run on a side stream, so that the compute stream goes on.
        self._stream = torch.cuda.Stream(device) if device.type == "cuda" else None  # type: ignore[no-untyped-call]
        threading.Thread(target=self._serve, args=(address,), name="gpu-rows", daemon=True).start()

    def rows(self, number: int) -> torch.Tensor:
        """Return a confirmed copy, [rows, width], for the current stream. The caller must not write to it."""
        rows = self._rows[number]
        if self._stream is not None:
            # The side stream allocated it, the current stream reads it.
            rows.record_stream(torch.cuda.current_stream(rows.device))
        return rows

    def _serve(self, address: bytes) -> None:
        if self._stream is not None:  # else leaving a stream would create a context on the first GPU
            torch.cuda.set_device(self._stream.device)
        with suppress(OSError), socket.socket(socket.AF_UNIX) as connection:  # the engine ends
            connection.connect(address)
            with connection.makefile("rwb") as stream:
                while len(header := stream.read(FRAME.size)) == FRAME.size:
                    number, size = FRAME.unpack(header)
                    if not size:
                        self._rows.pop(number, None)
                        continue
                    error = self._copy(number, pb.Handle.FromString(stream.read(size))).encode()
                    stream.write(FRAME.pack(number, len(error)) + error)
                    stream.flush()

    def _copy(self, number: int, handle: pb.Handle) -> str:
        """Copy the rows of a handle; return the error, or nothing.

        `DeviceRows.tensor` checks after the copy that the memory still held the rows of the handle.
        """
        try:
            with torch.cuda.stream(self._stream):  # does nothing without one
                if handle.segment:
                    rows = DeviceRows(Handle.from_message(handle), self._width, self._dtype)
                    self._rows[number] = rows.tensor(self._dtype)
                else:  # a probe
                    open_memory(handle.memory, handle.memory_bytes, current_gpu())
        except Exception as error:  # noqa: BLE001 - the engine goes on after any error
            return str(error) or repr(error)
        return ""
