"""One server at a time: its connection, its row streams, and one `Receiver` for each transport of the contract.

A new transport is a value of the enum `Transport`, a receiver here, a sender in `encoder_service/transport/`, and a
line in the table of each.
"""

from collections.abc import Mapping

from encoder_contract.transports import TRANSPORT_NAMES
from encoder_contract.v1 import encoder_pb2 as pb
from prefill_client.transport.inline import InlineReceiver
from prefill_client.transport.shared_memory import SharedMemoryReceiver
from prefill_client.transport.transport import Receiver

# Best first; inline last, as it takes what no other does.
RECEIVERS: Mapping[pb.Transport.ValueType, type[Receiver]] = {
    receiver.transport: receiver for receiver in (SharedMemoryReceiver, InlineReceiver)
}
TRANSPORTS = tuple(TRANSPORT_NAMES[transport] for transport in RECEIVERS)
"""Names of the transports, best first."""
INLINE = TRANSPORT_NAMES[pb.TRANSPORT_INLINE]


def receivers(endpoint: str, description: pb.DescribeResponse) -> dict[str, Receiver]:
    """Return what receives rows from that server, by name, best first."""
    found = (receiver.from_server(endpoint, description) for receiver in RECEIVERS.values())
    return {TRANSPORT_NAMES[receiver.transport]: receiver for receiver in found if receiver is not None}


def transport_of(ready: pb.ImageReady) -> str:
    """Return the name of the transport by which the rows come that this message announces."""
    return next(TRANSPORT_NAMES[t] for t, receiver in RECEIVERS.items() if receiver.announced(ready))


__all__ = ["INLINE", "RECEIVERS", "TRANSPORTS", "Receiver", "receivers", "transport_of"]
