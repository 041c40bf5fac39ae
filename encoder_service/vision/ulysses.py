"""One image over several devices, each with a process (Ulysses, https://arxiv.org/abs/2309.14509).

Each process has a slice of the image's patches. Attention alone needs other slices: there, each process has all patches
of some of the heads.
"""

import socket
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from datetime import timedelta
from itertools import pairwise
from typing import Any

import torch
import torch._C._distributed_c10d as c10d
from torch import Tensor

from encoder_service.vision.layers import Attention, Segments

# Smaller images are encoded whole, several in a batch. On the CPU the exchanges take a larger part of their time, but
# images of 1024 patches still gain. What a GPU gains, and from which size on, is not measured.
MIN_PATCHES = 3072
# A process that lets the others wait for so long has hung. Between two exchanges it computes a slice of a block, and on
# the CPU perhaps a small image that overtakes.
LIMIT_S = 30.0
# To meet, they need but connect: all were waiting for work.
_MEET_S = 10.0
_LOOPBACK = "127.0.0.1"


def shares(total: int, count: int, unit: int = 1) -> list[int]:
    """Divide `total` into `count` shares, as equal as multiples of `unit` are; the last has the rest."""
    bounds = [total * number // count // unit * unit for number in range(count)]
    return [end - begin for begin, end in pairwise([*bounds, total])]


def meeting_place() -> c10d.TCPStore:
    """Return where groups form, on a free port of the loopback interface; it is served while this is held."""
    listening = socket.create_server((_LOOPBACK, 0))
    port = listening.getsockname()[1]
    return c10d.TCPStore(
        _LOOPBACK, port, is_master=True, wait_for_workers=False, master_listen_fd=listening.detach()
    )


class Group:
    """The processes of all devices, to number `rank` of the `size` there are. For one thread."""

    def __init__(
        self, device: torch.device, port: int, rank: int, size: int, limit_s: float = LIMIT_S
    ) -> None:
        """`port` is that of the meeting place."""
        self.rank = rank
        self.size = size
        self._device = device
        self._port = port
        self._limit = timedelta(seconds=limit_s)
        self._number = -1
        self._connected: Any = None

    @contextmanager
    def joined(self, number: int) -> Iterator[None]:
        """Meet the others, unless the last group had this number, too.

        Whatever the block raises ends the group: exchanges of the others then fail.
        """
        try:
            if number != self._number:
                self._leave()
                self._connected, self._number = self._meet(number), number
            yield
        except BaseException:
            self._leave()
            raise

    def exchange(self, parts: Sequence[Tensor], sizes: Sequence[int]) -> Tensor:
        """Give each process its part; return the parts for this one, in order and flat.

        `sizes` are theirs, in elements.
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
        if self._connected is not None:
            self._connected.abort()
        self._connected, self._number = None, -1

    def _meet(self, number: int) -> Any:
        meeting = c10d.TCPStore(_LOOPBACK, self._port, is_master=False, timeout=self._limit)
        store = c10d.PrefixStore(str(number), meeting)
        store.set(f"here {self.rank}", "")
        store.wait([f"here {rank}" for rank in range(self.size)], timedelta(seconds=_MEET_S))
        if self._device.type == "cuda":
            nccl = c10d.ProcessGroupNCCL.Options()
            nccl._timeout = self._limit
            return c10d.ProcessGroupNCCL(store, self.rank, self.size, nccl)
        gloo: Any = c10d.ProcessGroupGloo
        options = gloo._Options()
        options._devices, options._timeout = [gloo.create_device(hostname=_LOOPBACK)], self._limit
        return gloo(store, self.rank, self.size, options)


class UlyssesAttention:
    """Attention over slices of an image: exchanged for all its patches of some heads, which `inner` mixes, and back."""

    graphs = False

    def __init__(self, inner: Attention, group: Group, slices: Sequence[int]) -> None:
        """`slices` are the patches of each process."""
        self.name = inner.name
        self._inner = inner
        self._group = group
        self._slices = slices

    def __call__(self, query: Tensor, key: Tensor, value: Tensor, segments: Segments, scale: float) -> Tensor:
        """See `Attention`; `segments` are those of the whole image."""
        group, (own, heads, size) = self._group, query.shape
        theirs = shares(heads, group.size)
        mine = theirs[group.rank]
        parts = zip(*(torch.split(each, theirs, 1) for each in (query, key, value)), strict=True)
        whole = group.exchange(
            [torch.stack(part, 1) for part in parts], [3 * count * mine * size for count in self._slices]
        ).view(-1, 3, mine, size)
        query, key, value = whole.unbind(1)
        mixed = self._inner(query, key, value, segments, scale)
        back = group.exchange(
            torch.split(mixed, list(self._slices)), [own * count * size for count in theirs]
        )
        chunks = torch.split(back, [own * count * size for count in theirs])
        return torch.cat([chunk.view(own, -1, size) for chunk in chunks], 1)
