"""Names of the transports, as metrics, logs and the client use them."""

from collections.abc import Mapping

from encoder_contract.v1 import encoder_pb2 as pb

TRANSPORT_NAMES: Mapping[pb.Transport.ValueType, str] = {
    value: name.removeprefix("TRANSPORT_").lower()
    for name, value in pb.Transport.items()
    if value != pb.TRANSPORT_UNSPECIFIED
}
"""Value of the enum `Transport` -> its name: "inline" for `TRANSPORT_INLINE`."""
