"""How rows reach callers: one `Sender` for each transport of the contract, and the choice between them.

Inline rows travel in the call itself, for every caller. By shared memory and on a device rows stay where they are and a
handle says where, for processes of our user on our host.

A new transport is a value of the enum `Transport`, a sender here with its line in `SENDERS`, and a receiver in
`prefill_client/transport/` with its line there.
"""

import asyncio
import os
import stat
from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from hmac import compare_digest
from pathlib import Path
from typing import ClassVar

from encoder_contract.device_memory import CUDA_SHARED_BYTES
from encoder_contract.framing import frame_rows
from encoder_contract.v1 import encoder_pb2 as pb
from encoder_service.store import Pin, Store

# Threads of their own: a copy that waits for space must not keep the event loop's threads from hashing uploads.
_copies = ThreadPoolExecutor(8, "to-host")


class Sender(ABC):
    """One transport of a server; the client's `Receiver` is its counterpart. One instance serves all calls.

    Who holds what, and until when: the Fetch call pins an image before `prepare` and releases it. With `holds`, that is
    when the call ends, which is when the caller says so, dies or falls silent; without, when the last of `frames` was
    sent. A sender itself keeps nothing of a call.

    What is checked: before any row is sent, that the caller may use the transport (`accepts`). The window lies inside
    the image when `prepare` is called. Whether the rows arrived whole and are still the image's is for the receiver to
    check, by what `prepare` put into the message.

    What is always safe: to end a call at any point, as there is nothing to undo; and to ask for any transport, as a
    caller that may not use it gets the rows inline. Everything runs on the event loop and must not block it.
    """

    transport: ClassVar[pb.Transport.ValueType]
    holds: ClassVar[bool]
    """Whether the caller reads the rows where they are pinned, so that they stay so until the call ends."""
    is_local: ClassVar[bool]
    """Whether it works only within one host."""

    @abstractmethod
    def __init__(self, store: Store) -> None:
        """Send rows of `store`."""

    @property
    def offered(self) -> bool:
        """Whether this server has what the transport needs."""
        return True

    def describe(self, description: pb.DescribeResponse) -> None:  # noqa: B027 - nothing is the default
        """Add what a caller has to know before it can use this transport."""

    def accepts(self, request: pb.FetchRequest) -> bool:  # noqa: ARG002
        """Whether the caller, who is on this host if the transport needs that, may use it."""
        return True

    async def reach(self, pin: Pin) -> None:
        """Bring the rows to a tier that this transport reads. Raises `OverloadedError` when it is full of pins."""
        if pin.tier != "host":
            await asyncio.get_running_loop().run_in_executor(_copies, pin.to_host)

    def sent_by(self, pin: Pin) -> pb.Transport.ValueType:  # noqa: ARG002
        """Return the transport by which these rows leave: this one, or a lesser one that its callers understand."""
        return self.transport

    @abstractmethod
    async def prepare(self, ready: pb.ImageReady, pin: Pin) -> None:
        """Complete the message that announces rows [row_begin, row_end) of `pin`."""

    @abstractmethod
    def frames(self, ready: pb.ImageReady, pin: Pin) -> Iterable[bytes]:
        """Return the serialised messages that follow it; none when the rows stay where they are."""


CHECKSUM_ON_LOOP_BYTES = 4 << 20  # XXH3 does this in 0.2 ms; more goes to a worker thread


class InlineSender(Sender):
    """Sends the bytes of the rows, and a checksum of them."""

    transport = pb.TRANSPORT_INLINE
    holds = False
    is_local = False

    def __init__(self, store: Store) -> None:
        """Need nothing: pins give the bytes."""

    async def prepare(self, ready: pb.ImageReady, pin: Pin) -> None:
        """Add the checksum."""
        window = (ready.row_begin, ready.row_end)
        if ready.row_bytes <= CHECKSUM_ON_LOOP_BYTES or (pin.checksum_known and window == (0, pin.tokens)):
            ready.checksum = pin.checksum(*window)
        else:
            ready.checksum = await asyncio.to_thread(pin.checksum, *window)

    def frames(self, ready: pb.ImageReady, pin: Pin) -> Iterator[bytes]:
        """Return the rows, hand-framed, each message made when it is taken."""
        return frame_rows(ready.index, pin.rows(ready.row_begin, ready.row_end))


class SharedMemorySender(Sender):
    """Sends handles. By the segment's first bytes a caller proves that it can read it, and so runs as our user."""

    transport = pb.TRANSPORT_SHM
    holds = True
    is_local = True

    def __init__(self, store: Store) -> None:
        """Send handles into the segment of `store`."""
        self._segment = store.segment

    def describe(self, description: pb.DescribeResponse) -> None:
        """Add the path of the segment."""
        description.shm_segment = str(self._segment.path)

    def accepts(self, request: pb.FetchRequest) -> bool:
        """Whether the caller could read the segment."""
        return compare_digest(request.shm_proof, self._segment.segment_id)

    async def prepare(self, ready: pb.ImageReady, pin: Pin) -> None:
        """Add the handle."""
        ready.handle.CopyFrom(pin.handle(ready.row_begin, ready.row_end).to_message())

    def frames(self, _ready: pb.ImageReady, _pin: Pin) -> tuple[bytes, ...]:
        """Return no messages."""
        return ()


class DeviceSender(SharedMemorySender):
    """Sends handles, as shared memory does and to the same callers: of the device's copy where there is one.

    A handle needs no event for order: rows become visible only after the device has written them (`copy_bytes` waits).
    """

    transport = pb.TRANSPORT_DEVICE

    def __init__(self, store: Store) -> None:
        """Send handles into the device tier of `store`, if it has one."""
        super().__init__(store)
        self._store = store

    @property
    def offered(self) -> bool:
        """Whether there is a device tier that others can open."""
        return self._store.device_probe is not None

    def describe(self, description: pb.DescribeResponse) -> None:
        """Add the path of the segment and the probe."""
        super().describe(description)
        if (probe := self._store.device_probe) is not None:
            description.device_probe = probe.name
            description.device_probe_bytes = CUDA_SHARED_BYTES

    async def reach(self, pin: Pin) -> None:
        """Take the device's copy if there is one, else leave the rows on the host."""
        self._store.to_device(pin)

    def sent_by(self, pin: Pin) -> pb.Transport.ValueType:
        """Return shared memory for rows that are not on the device."""
        return self.transport if pin.tier == "device" else super().transport


# Best first.
SENDERS: Mapping[pb.Transport.ValueType, type[Sender]] = {
    sender.transport: sender for sender in (DeviceSender, SharedMemorySender, InlineSender)
}


class Transports:
    """The transports of one server."""

    def __init__(self, store: Store) -> None:
        self._senders = {transport: sender(store) for transport, sender in SENDERS.items()}
        self._segment = store.segment

    def describe(self, description: pb.DescribeResponse, *, is_local: bool) -> None:
        """Add those that a caller can use, and what it has to know for that."""
        for sender in self._usable(is_local=is_local):
            description.transports.append(sender.transport)
            sender.describe(description)

    def choose(self, request: pb.FetchRequest, *, is_local: bool) -> Sender:
        """Return the first of the request's transports that its caller may use; inline when there is none."""
        usable = {sender.transport: sender for sender in self._usable(is_local=is_local)}
        wanted = (usable[transport] for transport in request.transports if transport in usable)
        return next(
            (sender for sender in wanted if sender.accepts(request)), self._senders[pb.TRANSPORT_INLINE]
        )

    def open_segment(self, opened: pb.PutOpen, *, is_local: bool) -> int | None:
        """Return the file through which a caller puts rows, open for reading; None: they come inline.

        Only a regular file of our user, in our segment's folder, and only for a caller that has proved it could open it
        itself. It is read and never mapped: the caller may cut it short at any time.
        """
        path = Path(opened.segment)
        if not is_local or not opened.segment or path.parent != self._segment.path.parent:
            return None
        if not compare_digest(opened.shm_proof, self._segment.segment_id):
            return None
        try:
            # Without O_NONBLOCK, opening a FIFO blocks until another process opens it for writing.
            file = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK)
        except OSError:
            return None
        status = os.fstat(file)
        if stat.S_ISREG(status.st_mode) and status.st_uid == os.geteuid():
            return file
        os.close(file)
        return None

    def _usable(self, *, is_local: bool) -> Iterator[Sender]:
        return (
            sender
            for sender in self._senders.values()
            if sender.offered and (is_local or not sender.is_local)
        )
