"""One server: its connection, its running calls, and one `Receiver` for each transport of the contract.

A new transport needs a value of the enum `Transport`, a receiver with its line in `RECEIVERS`, and a sender with its
line in `SENDERS` (`encoder_service/transport.py`).
"""

from collections.abc import Callable, Mapping, Sequence

from encoder_contract.transports import TRANSPORT_NAMES
from encoder_contract.v1 import encoder_pb2 as pb
from prefill_client.transport.device import DeviceReceiver
from prefill_client.transport.receiver import InlineReceiver, Receiver
from prefill_client.transport.shared_memory import SharedMemoryReceiver

# Best first. Inline is last: it takes what no other does.
RECEIVERS: Mapping[pb.Transport.ValueType, type[Receiver]] = {
    receiver.transport: receiver for receiver in (DeviceReceiver, SharedMemoryReceiver, InlineReceiver)
}
TRANSPORTS = tuple(TRANSPORT_NAMES[transport] for transport in RECEIVERS)
"""Names of the transports, best first."""
INLINE = TRANSPORT_NAMES[pb.TRANSPORT_INLINE]
SHM = TRANSPORT_NAMES[pb.TRANSPORT_SHM]
DEVICE = TRANSPORT_NAMES[pb.TRANSPORT_DEVICE]
BY_DEFAULT = tuple(TRANSPORT_NAMES[transport] for transport, each in RECEIVERS.items() if each.by_default)
"""Names of the transports that are used unless a caller names others."""


def receivers(endpoint: str, description: pb.DescribeResponse) -> dict[str, Receiver]:
    """Return the receivers that this process can use with a server, by name, best first."""
    found = (receiver.from_server(endpoint, description) for receiver in RECEIVERS.values())
    return {TRANSPORT_NAMES[receiver.transport]: receiver for receiver in found if receiver is not None}


Receivers = Callable[[str, pb.DescribeResponse], dict[str, Receiver]]
"""What makes the receivers for a server: `receivers`, unless other processes than this one read the rows."""


def transport_of(ready: pb.ImageReady) -> str:
    """Return the name of the transport of the rows that this message announces."""
    return next(TRANSPORT_NAMES[t] for t, receiver in RECEIVERS.items() if receiver.announced(ready))


def asked(transports: Sequence[str], usable: Mapping[str, Receiver]) -> dict[str, Receiver]:
    """Return the receivers for a caller that names `transports`, by name, best first.

    Inline is always among them. With "device" so is shared memory, for rows that are not on the device, or that this
    process cannot reach there.
    """
    also = [SHM] if DEVICE in transports else []
    names = (*transports, *also, INLINE)
    return {name: usable[name] for name in names if name in usable and usable[name].usable}


__all__ = [
    "BY_DEFAULT",
    "DEVICE",
    "INLINE",
    "RECEIVERS",
    "SHM",
    "TRANSPORTS",
    "Receiver",
    "Receivers",
    "asked",
    "receivers",
    "transport_of",
]
