"""How rows reach callers: one `Sender` for each transport of the contract, and the choice between them.

Inline rows travel in the call itself, for any caller, and TCP rows over a connection beside it. With the other two
transports, rows stay in shared memory or on the device, and the caller gets a handle that says where. These are for
processes of the server's user on its host.

A new transport needs a value in the enum `Transport`, a sender here with its line in `SENDERS`, and a receiver in
`prefill_client/transport/` with its line there.
"""

import asyncio
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from hmac import compare_digest
from typing import ClassVar

from encoder_contract.device_memory import CUDA_SHARED_BYTES
from encoder_contract.framing import frame_rows
from encoder_contract.v1 import encoder_pb2 as pb
from encoder_service.rows_port import Reader, RowsPort, Transfer
from encoder_service.store import Pin, Store

# A separate pool: a copy that waits for space must not occupy the event loop's default threads, which checksum and sign
# rows.
_copies = ThreadPoolExecutor(8, "to-host")


class Sender(ABC):
    """One transport of a server. The client's `Receiver` is its counterpart. One instance serves all calls.

    Who holds what, and until when: the Fetch call pins an image before `prepare`. With `holds`, it releases the pin
    when the call ends: the caller ends it, dies or falls silent. Otherwise it releases the pin once the last of
    `frames` is sent, or the transfer of `offer` has ended. A sender keeps nothing of a call.

    What is checked: `accepts` decides, before any row is sent, whether the caller may use the transport. The caller of
    `prepare` has checked that the window lies inside the image. The receiver checks, with what `prepare` puts into the
    message, that the rows arrived whole and still belong to the image.

    What is always safe: ending a call at any point, because there is nothing to undo; asking for any transport, because
    a caller that may not use it gets the rows inline. All methods run on the event loop and must not block it.
    """

    transport: ClassVar[pb.Transport.ValueType]
    holds: ClassVar[bool]
    """Whether the caller reads the pinned rows in place, so that the pin must last until the call ends."""
    is_local: ClassVar[bool]
    """Whether it works only within one host."""

    @abstractmethod
    def __init__(self, store: Store, rows_port: RowsPort | None) -> None: ...

    @property
    def offered(self) -> bool:
        """Whether this server can use the transport."""
        return True

    def describe(self, description: pb.DescribeResponse) -> None:  # noqa: B027 - nothing is the default
        """Add what a caller must know before it can use this transport."""

    def accepts(self, request: pb.FetchRequest) -> bool:  # noqa: ARG002
        """Whether the caller may use it. With `is_local`, the caller is known to be on this host."""
        return True

    def reaches(self, pin: Pin) -> bool:
        """Whether this transport reads the tier of the pin. May move the pin to such a tier, if that takes no time."""
        return pin.tier == "host"

    async def reach(self, pin: Pin) -> None:
        """Move the pin to a tier that this transport reads. Raises `OverloadedError` if that tier is full of pins."""
        await asyncio.get_running_loop().run_in_executor(_copies, pin.to_host)

    def sent_by(self, pin: Pin) -> pb.Transport.ValueType:  # noqa: ARG002
        """Return the transport that these rows use: this one, or a fallback that its callers understand."""
        return self.transport

    @abstractmethod
    async def prepare(self, ready: pb.ImageReady, pin: Pin) -> None:
        """Complete the message that announces rows [row_begin, row_end) of `pin`."""

    @abstractmethod
    def frames(self, ready: pb.ImageReady, pin: Pin) -> Iterable[bytes]:
        """Return the serialised messages that follow it; none if the rows do not travel in the call."""

    def offer(
        self,
        ready: pb.ImageReady,  # noqa: ARG002
        pin: Pin,  # noqa: ARG002
        reader: Reader,  # noqa: ARG002
        on_last: Callable[[], None],  # noqa: ARG002
    ) -> Transfer | None:
        """Offer the rows to `reader` beside the call, and put the ticket into the message; None if they are not.

        `on_last` is called before the last bytes are sent.
        """
        return None


CHECKSUM_ON_LOOP_BYTES = 4 << 20  # XXH3 takes 0.2 ms for it; larger windows go to a worker thread


class InlineSender(Sender):
    """Sends the bytes of the rows, with their checksum."""

    transport = pb.TRANSPORT_INLINE
    holds = False
    is_local = False

    def __init__(self, store: Store, rows_port: RowsPort | None) -> None:
        """Keep nothing: the pins give the bytes."""

    async def prepare(self, ready: pb.ImageReady, pin: Pin) -> None:
        window = (ready.row_begin, ready.row_end)
        if ready.row_bytes <= CHECKSUM_ON_LOOP_BYTES or (pin.checksum_known and window == (0, pin.tokens)):
            ready.checksum = pin.checksum(*window)
        else:
            ready.checksum = await asyncio.to_thread(pin.checksum, *window)

    def frames(self, ready: pb.ImageReady, pin: Pin) -> Iterator[bytes]:
        """Return the rows in hand-framed messages. Each is built when the iterator reaches it."""
        return frame_rows(ready.index, pin.rows(ready.row_begin, ready.row_end))


class TcpSender(InlineSender):
    """Sends the bytes of the rows over a connection of the rows port, with the checksum in the call.

    As its base, it sends those for which the caller gets no ticket in the call.
    """

    transport = pb.TRANSPORT_TCP

    def __init__(self, store: Store, rows_port: RowsPort | None) -> None:
        super().__init__(store, rows_port)
        self._port = rows_port

    @property
    def offered(self) -> bool:
        """Whether this server has a rows port."""
        return self._port is not None

    def describe(self, description: pb.DescribeResponse) -> None:
        assert self._port is not None
        description.rows_port = self._port.port

    def offer(
        self, ready: pb.ImageReady, pin: Pin, reader: Reader, on_last: Callable[[], None]
    ) -> Transfer | None:
        assert self._port is not None
        transfer = self._port.offer(pin.rows(ready.row_begin, ready.row_end), reader, on_last)
        ready.ticket.secret, ready.ticket.port = transfer.secret, self._port.port
        return transfer


class SharedMemorySender(Sender):
    """Sends handles. A caller proves that it runs as our user by sending the first bytes of the segment."""

    transport = pb.TRANSPORT_SHM
    holds = True
    is_local = True

    def __init__(self, store: Store, rows_port: RowsPort | None) -> None:  # noqa: ARG002
        self._segment = store.segment

    def describe(self, description: pb.DescribeResponse) -> None:
        description.shm_segment = str(self._segment.path)

    def accepts(self, request: pb.FetchRequest) -> bool:
        """Whether the caller has read the segment."""
        return compare_digest(request.shm_proof, self._segment.segment_id)

    async def prepare(self, ready: pb.ImageReady, pin: Pin) -> None:
        ready.handle.CopyFrom(pin.handle(ready.row_begin, ready.row_end).to_message())

    def frames(self, _ready: pb.ImageReady, _pin: Pin) -> tuple[bytes, ...]:
        return ()


class DeviceSender(SharedMemorySender):
    """Sends handles to the copy on the device, or to the host copy if the device has none. Same callers as its base.

    The receiver needs no CUDA event: rows become visible only once the device has written them (`copy_bytes` waits).
    """

    transport = pb.TRANSPORT_DEVICE

    def __init__(self, store: Store, rows_port: RowsPort | None) -> None:
        super().__init__(store, rows_port)
        self._store = store

    @property
    def offered(self) -> bool:
        """Whether there is a device tier that other processes can open."""
        return self._store.device_probe is not None

    def describe(self, description: pb.DescribeResponse) -> None:
        super().describe(description)
        if (probe := self._store.device_probe) is not None:
            description.device_probe = probe.name
            description.device_probe_bytes = CUDA_SHARED_BYTES

    def reaches(self, pin: Pin) -> bool:
        """Move the pin to the device's copy if there is one, else leave it on the host. The transport reads both."""
        self._store.moves.to_device(pin)
        return True

    def sent_by(self, pin: Pin) -> pb.Transport.ValueType:
        """Return `TRANSPORT_SHM` for rows that are not on the device."""
        return self.transport if pin.tier == "device" else super().transport


# Best first.
SENDERS: Mapping[pb.Transport.ValueType, type[Sender]] = {
    sender.transport: sender for sender in (DeviceSender, SharedMemorySender, TcpSender, InlineSender)
}


class Transports:
    """The transports of one server; `rows_port` is its port for rows, if it has one."""

    def __init__(self, store: Store, rows_port: RowsPort | None) -> None:
        senders = [sender(store, rows_port) for sender in SENDERS.values()]
        offered = {sender.transport: sender for sender in senders if sender.offered}
        remote = {transport: sender for transport, sender in offered.items() if not sender.is_local}
        self._usable = {True: offered, False: remote}  # by whether the caller is on this host
        self._inline = offered[pb.TRANSPORT_INLINE]

    def describe(self, description: pb.DescribeResponse, *, is_local: bool) -> None:
        """List the transports that a caller can use, with what it must know for each."""
        for sender in self._usable[is_local].values():
            description.transports.append(sender.transport)
            sender.describe(description)

    def choose(self, request: pb.FetchRequest, *, is_local: bool) -> tuple[Sender, Sender | None]:
        """Return the first of the request's transports that its caller may use; inline if there is none.

        And the sender for rows that cannot stay in place; None if the caller accepts no other rows.
        """
        usable = self._usable[is_local]
        named = (usable[transport] for transport in request.transports if transport in usable)
        accepted = [sender for sender in named if sender.accepts(request)] or [self._inline]
        return accepted[0], next((sender for sender in accepted if not sender.holds), None)
