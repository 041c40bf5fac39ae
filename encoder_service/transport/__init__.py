"""How rows leave: one `Sender` for each transport of the contract, and which of them a call uses.

A new transport is a value of the enum `Transport`, a sender here, a receiver in `prefill_client/transport/`, and a line
in the table of each.
"""

from collections.abc import Iterator, Mapping

from encoder_contract.v1 import encoder_pb2 as pb
from encoder_service.store import Store
from encoder_service.transport.caller_segment import CallerSegments
from encoder_service.transport.device import DeviceSender
from encoder_service.transport.inline import InlineSender
from encoder_service.transport.shared_memory import SharedMemorySender
from encoder_service.transport.transport import Sender

# Best first.
SENDERS: Mapping[pb.Transport.ValueType, type[Sender]] = {
    sender.transport: sender for sender in (DeviceSender, SharedMemorySender, InlineSender)
}


class Transports:
    """The transports of one server."""

    def __init__(self, store: Store) -> None:
        self._senders = {transport: sender(store) for transport, sender in SENDERS.items()}
        self._incoming = CallerSegments(store)

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
        """Return the file through which a caller puts rows, open for reading; None: they come inline."""
        return self._incoming.open(opened) if is_local else None

    def _usable(self, *, is_local: bool) -> Iterator[Sender]:
        return (
            sender
            for sender in self._senders.values()
            if sender.offered and (is_local or not sender.is_local)
        )


__all__ = ["SENDERS", "Sender", "Transports"]
