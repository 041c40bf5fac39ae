"""One server at a time: its connection, its row streams, and one `Receiver` for each transport of the contract.

A new transport is a value of the enum `Transport`, a receiver here, a sender in `encoder_service/transport/`, and a
line in the table of each.
"""

from collections.abc import Mapping, Sequence

from encoder_contract.transports import TRANSPORT_NAMES
from encoder_contract.v1 import encoder_pb2 as pb
from prefill_client.transport.device import DeviceReceiver
from prefill_client.transport.receiver import InlineReceiver, Receiver
from prefill_client.transport.shared_memory import SharedMemoryReceiver

# Best first; inline last, as it takes what no other does.
RECEIVERS: Mapping[pb.Transport.ValueType, type[Receiver]] = {
    receiver.transport: receiver for receiver in (DeviceReceiver, SharedMemoryReceiver, InlineReceiver)
}
TRANSPORTS = tuple(TRANSPORT_NAMES[transport] for transport in RECEIVERS)
"""Names of the transports, best first."""
INLINE = TRANSPORT_NAMES[pb.TRANSPORT_INLINE]
SHM = TRANSPORT_NAMES[pb.TRANSPORT_SHM]
DEVICE = TRANSPORT_NAMES[pb.TRANSPORT_DEVICE]
BY_DEFAULT = tuple(TRANSPORT_NAMES[transport] for transport, each in RECEIVERS.items() if each.by_default)
"""Names of those by which rows come to who does not say how."""


def receivers(endpoint: str, description: pb.DescribeResponse) -> dict[str, Receiver]:
    """Return what receives rows from that server, by name, best first."""
    found = (receiver.from_server(endpoint, description) for receiver in RECEIVERS.values())
    return {TRANSPORT_NAMES[receiver.transport]: receiver for receiver in found if receiver is not None}


def transport_of(ready: pb.ImageReady) -> str:
    """Return the name of the transport by which the rows come that this message announces."""
    return next(TRANSPORT_NAMES[t] for t, receiver in RECEIVERS.items() if receiver.announced(ready))


def asked(transports: Sequence[str], usable: Mapping[str, Receiver]) -> dict[str, Receiver]:
    """Return what may receive rows, by name, best first, for a caller who names `transports`.

    Inline always may; and with a device, shared memory, by which rows come that are not there.
    """
    also = [SHM] if DEVICE in transports else []
    return {name: usable[name] for name in (*transports, *also, INLINE) if name in usable}


__all__ = [
    "BY_DEFAULT",
    "DEVICE",
    "INLINE",
    "RECEIVERS",
    "SHM",
    "TRANSPORTS",
    "Receiver",
    "asked",
    "receivers",
    "transport_of",
]
