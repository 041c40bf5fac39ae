"""Rows over TCP connections beside the call: the server's rows port sends them into memory of this process."""

from collections.abc import Callable
from typing import TYPE_CHECKING, Self

from encoder_contract.endpoint import Endpoint
from encoder_contract.rows_connection import RowsConnections
from encoder_contract.stream import check_rows
from encoder_contract.v1 import encoder_pb2 as pb
from prefill_client.transport.receiver import Arrival, Receiver, acquire_buffer
from prefill_client.transport.rows import OwnRows, element_type

if TYPE_CHECKING:  # it imports grpc
    from prefill_client.transport.channels import Channels


class TcpReceiver(Receiver):
    """Presents the ticket of each image on a connection of its own, and checks the checksum of what arrives."""

    transport = pb.TRANSPORT_TCP
    holds = False

    def __init__(self, connections: RowsConnections) -> None:
        self._connections = connections

    @classmethod
    def from_server(
        cls, endpoint: str, description: pb.DescribeResponse, channels: "Channels"
    ) -> Self | None:
        """Return a receiver if the server has a rows port, and the endpoint says at which host."""
        try:
            where = Endpoint.parse(endpoint)
        except ValueError:  # another form of gRPC's
            return None
        if not description.rows_port or where.path:
            return None
        return cls(RowsConnections(where.host, description.rows_port, channels.context, channels.server_name))

    @property
    def usable(self) -> bool:  # type: ignore[override]
        """Whether the port can be reached, as far as this process knows."""
        return self._connections.usable

    @staticmethod
    def announced(ready: pb.ImageReady) -> bool:
        """Return whether the message has a ticket."""
        return ready.HasField("ticket")

    def receive(self, ready: pb.ImageReady, is_open: Callable[[], bool]) -> Arrival:  # noqa: ARG002
        """Return the arrival of rows that `fill` receives."""
        return _TcpArrival(ready, self._connections)

    def close(self) -> None:
        """Close the connections."""
        self._connections.close()


class _TcpArrival(Arrival):
    def __init__(self, ready: pb.ImageReady, connections: RowsConnections) -> None:
        self._ready = ready
        self._connections = connections
        self._buffer = acquire_buffer(ready.row_bytes)
        self._checksum = 0

    @property
    def beside(self) -> bool:
        return True

    async def fill(self) -> None:
        self._checksum = await self._connections.receive(self._ready.ticket.secret, [self._buffer.data])

    def rows(self) -> OwnRows:
        ready = self._ready
        check_rows(ready, self._checksum)
        elements = self._buffer.view(element_type(ready.dtype))
        return OwnRows(elements.reshape(ready.row_end - ready.row_begin, ready.width))
