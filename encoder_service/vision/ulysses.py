"""Encoding one image on several devices, each with its process (Ulysses, https://arxiv.org/abs/2309.14509).

Each process has a slice of the image's patches. Only attention needs other slices: there, each process has all patches
of some of the heads.
"""

import os
import socket
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from datetime import timedelta
from itertools import pairwise
from typing import Any

import torch
import torch._C._distributed_c10d as c10d
from torch import Tensor

from encoder_service.vision.layers import Attention, Segments

# Smaller images are encoded on one device, several in a batch. On the CPU the exchanges take a larger share of their
# time, but images of 1024 patches still gain. On a GPU a group runs without graphs, and its launches take about 9 ms of
# the host, as long as one GPU takes for 3520 patches with a graph. That is an estimate.
MIN_PATCHES = {"cpu": 3072, "cuda": 4096}
# A process that makes the others wait for longer has hung. Between two exchanges a process computes a slice of a block;
# on the CPU it may also encode a small image that overtakes.
LIMIT_S = 30.0
# For the rendezvous processes only have to connect, because all of them were waiting for work.
_RENDEZVOUS_S = 10.0
_LOOPBACK = "127.0.0.1"
_NO_WATCHDOG = dict.fromkeys(
    ("TORCH_NCCL_ASYNC_ERROR_HANDLING", "TORCH_NCCL_DUMP_ON_TIMEOUT", "TORCH_NCCL_ENABLE_MONITORING"), "0"
)
"""Our own watchdog judges what hangs."""
_INTERFACE = "NCCL_SOCKET_IFNAME"
"""Of NCCL's first connections. NCCL's own choice is one that other hosts reach, or that a firewall cuts off."""


def even_shares(total: int, count: int, unit: int = 1) -> list[int]:
    """Divide `total` into `count` nearly equal multiples of `unit`; the last share also has the remainder."""
    bounds = [total * number // count // unit * unit for number in range(count)]
    return [end - begin for begin, end in pairwise([*bounds, total])]


def start_rendezvous() -> c10d.TCPStore:
    """Serve the store through which groups form, on a free port of the loopback interface, while it is referenced."""
    listening = socket.create_server((_LOOPBACK, 0))
    port = listening.getsockname()[1]
    return c10d.TCPStore(
        _LOOPBACK, port, is_master=True, wait_for_workers=False, master_listen_fd=listening.detach()
    )


class UlyssesGroup:
    """The processes of all devices, as seen by process `rank` of `size`. Not thread-safe."""

    def __init__(
        self, device: torch.device, port: int, rank: int, size: int, limit_s: float = LIMIT_S
    ) -> None:
        """`port` is the port of `start_rendezvous`."""
        self.rank = rank
        self.size = size
        self._device = device
        self._port = port
        self._limit = timedelta(seconds=limit_s)
        self._lock = threading.Lock()  # of what follows
        self._number = -1
        self._connected: Any = None
        self._last_aborted = -1

    @contextmanager
    def joined(self, number: int) -> Iterator[None]:
        """Connect to the other processes, unless the last group had this number too.

        Any exception in the block ends the group: on the CPU, the exchanges of the others then fail. On a GPU, they
        would wait for ever: somebody has to tell the others to `abort`.
        """
        try:
            self._require(number)
            if number != self._number:
                self._leave()
                connected = self._rendezvous(number)
                with self._lock:
                    self._connected, self._number = connected, number
                self._require(number)
            yield
        except BaseException:
            self._leave()
            raise

    def form(self, number: int) -> None:
        """Connect to the other processes, which call this too, before an image needs it. Raises as `joined` does.

        NCCL connects when the first bytes are exchanged: that takes seconds.
        """
        with self.joined(number):
            self.exchange(
                [torch.zeros(1, dtype=torch.uint8, device=self._device)] * self.size, [1] * self.size
            )
            self.complete(number)

    def abort(self, number: int) -> None:
        """End the exchanges of group `number`, because another of its processes has failed. Thread-safe.

        On a GPU, the device then goes on with whatever was received: `complete` raises.
        """
        with self._lock:
            self._last_aborted = max(number, self._last_aborted)
            connected = self._connected if number == self._number else None
        if connected is not None:
            if self._device.type == "cuda":
                # NCCL makes this thread's current device current again: that would create a context on the first GPU.
                torch.cuda.set_device(self._device)
            connected.abort()

    def complete(self, number: int) -> None:
        """Wait until the device has done everything so far. Raises `RuntimeError` if the group was aborted before."""
        if self._device.type == "cuda":
            done = torch.cuda.Event(blocking=True)  # type: ignore[no-untyped-call]
            done.record(torch.cuda.current_stream(self._device))
            done.synchronize()
        self._require(number)

    def _require(self, number: int) -> None:
        with self._lock:
            if number <= self._last_aborted:
                raise RuntimeError(f"another process of group {number} has failed")

    def exchange(self, parts: Sequence[Tensor], sizes: Sequence[int]) -> Tensor:
        """Send each process its part; return the parts for this process, flat and in the order of ranks.

        `sizes` are the sizes of the received parts, in elements.
        """
        sent = torch.cat([part.reshape(-1) for part in parts])
        received = sent.new_empty(sum(sizes))
        width = sent.element_size()
        self._connected.alltoall_base(
            received.view(torch.uint8),
            sent.view(torch.uint8),
            [size * width for size in sizes],
            [part.numel() * width for part in parts],
            c10d.AllToAllOptions(),
        ).wait()
        return received

    def _leave(self) -> None:
        with self._lock:
            connected = self._connected
            self._connected, self._number = None, -1
        if connected is not None:
            connected.abort()

    def _rendezvous(self, number: int) -> Any:
        rendezvous = c10d.TCPStore(_LOOPBACK, self._port, is_master=False, timeout=self._limit)
        store = c10d.PrefixStore(str(number), rendezvous)
        store.set(f"here {self.rank}", "")
        store.wait([f"here {rank}" for rank in range(self.size)], timedelta(seconds=_RENDEZVOUS_S))
        if self._device.type == "cuda":
            # Else torch's watchdog ends this process when another one has failed; and after one exchange of 30 s its
            # monitor does so eight minutes after each later group, because that leaves a flag in the server's store.
            os.environ.update(_NO_WATCHDOG)
            os.environ.setdefault(_INTERFACE, "lo")
            nccl = c10d.ProcessGroupNCCL.Options()
            nccl._timeout = self._limit
            return c10d.ProcessGroupNCCL(store, self.rank, self.size, nccl)
        gloo: Any = c10d.ProcessGroupGloo
        options = gloo._Options()
        options._devices, options._timeout = [gloo.create_device(hostname=_LOOPBACK)], self._limit
        return gloo(store, self.rank, self.size, options)


class UlyssesAttention:
    """Attention over slices of an image: exchange them for all patches of some heads, run `inner`, exchange back."""

    graphs = persistent = False

    def __init__(self, inner: Attention, group: UlyssesGroup, shares: Sequence[int]) -> None:
        """`shares` are the numbers of patches of the processes."""
        self.name = inner.name
        self._inner = inner
        self._group = group
        self._shares = shares

    def __call__(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        segments: Segments,
        scale: float,
        between: Callable[[], None] = lambda: None,
    ) -> Tensor:
        """See `Attention`; `segments` are those of the whole image."""
        group, (own_patches, heads, head_size) = self._group, query.shape
        head_shares = even_shares(heads, group.size)
        own_heads = head_shares[group.rank]
        parts = zip(*(torch.split(each, head_shares, 1) for each in (query, key, value)), strict=True)
        whole = group.exchange(
            [torch.stack(part, 1) for part in parts],
            [3 * count * own_heads * head_size for count in self._shares],
        ).view(-1, 3, own_heads, head_size)
        query, key, value = whole.unbind(1)
        mixed = self._inner(query, key, value, segments, scale, between)
        sizes = [own_patches * count * head_size for count in head_shares]
        received = group.exchange(torch.split(mixed, list(self._shares)), sizes)
        chunks = torch.split(received, sizes)
        return torch.cat([chunk.view(own_patches, -1, head_size) for chunk in chunks], 1)
