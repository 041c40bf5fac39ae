"""One server: the connection to it, its running calls, and a `Receiver` for each transport of the contract.

To add a transport, add a value to the enum `Transport`, a receiver to `RECEIVERS`, and a sender to `SENDERS` in
`encoder_service/transport.py`.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING

from encoder_contract.transports import TRANSPORT_NAMES
from encoder_contract.v1 import encoder_pb2 as pb
from prefill_client.transport.device import DeviceReceiver
from prefill_client.transport.receiver import InlineReceiver, Receiver
from prefill_client.transport.shared_memory import SharedMemoryReceiver
from prefill_client.transport.tcp import TcpReceiver

if TYPE_CHECKING:  # it imports grpc
    from prefill_client.transport.channels import Channels

# Best first. Inline is last, because it accepts rows that no other transport announces.
RECEIVERS: Mapping[pb.Transport.ValueType, type[Receiver]] = {
    receiver.transport: receiver
    for receiver in (DeviceReceiver, SharedMemoryReceiver, TcpReceiver, InlineReceiver)
}
TRANSPORTS = tuple(TRANSPORT_NAMES[transport] for transport in RECEIVERS)
"""Names of the transports, best first."""
INLINE = TRANSPORT_NAMES[pb.TRANSPORT_INLINE]
SHM = TRANSPORT_NAMES[pb.TRANSPORT_SHM]
TCP = TRANSPORT_NAMES[pb.TRANSPORT_TCP]
DEVICE = TRANSPORT_NAMES[pb.TRANSPORT_DEVICE]
BY_DEFAULT = tuple(TRANSPORT_NAMES[transport] for transport, each in RECEIVERS.items() if each.by_default)
"""Names of the transports that a caller uses by default."""


def receivers(endpoint: str, description: pb.DescribeResponse, channels: "Channels") -> dict[str, Receiver]:
    """Return the receivers that this process can use with a server, by name, best first."""
    candidates = (receiver.from_server(endpoint, description, channels) for receiver in RECEIVERS.values())
    return {TRANSPORT_NAMES[receiver.transport]: receiver for receiver in candidates if receiver is not None}


Receivers = Callable[[str, pb.DescribeResponse, "Channels"], dict[str, Receiver]]
"""A factory of the receivers for a server: `receivers`, or another one if other processes read the rows."""


def transport_of(ready: pb.ImageReady) -> str:
    """Return the name of the transport of the rows that this message announces."""
    return next(TRANSPORT_NAMES[t] for t, receiver in RECEIVERS.items() if receiver.announced(ready))


def select_receivers(transports: Sequence[str], available: Mapping[str, Receiver]) -> dict[str, Receiver]:
    """Return the receivers for a call that requests `transports`, by name, best first.

    Inline is always among them. "device" also selects shared memory and TCP, for rows that are not on the device or
    that this process cannot reach there.
    """
    fallback = [SHM, TCP] if DEVICE in transports else []
    names = (*transports, *fallback, INLINE)
    return {name: available[name] for name in names if name in available and available[name].usable}


__all__ = [
    "BY_DEFAULT",
    "DEVICE",
    "INLINE",
    "RECEIVERS",
    "SHM",
    "TCP",
    "TRANSPORTS",
    "Receiver",
    "Receivers",
    "receivers",
    "select_receivers",
    "transport_of",
]
