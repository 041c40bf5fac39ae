"""The listener: one port with our calls, health and reflection on it."""

import asyncio

import grpc
from grpc_health.v1 import health, health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection

from encoder_contract.v1.admin_pb2_grpc import add_AdminServiceServicer_to_server
from encoder_service.admin import SERVICE as ADMIN_SERVICE
from encoder_service.admin import AdminService
from encoder_service.config import ConfigError, flag
from encoder_service.description import MAX_MESSAGE_BYTES
from encoder_service.service import SERVICE, EncoderService, generic_handler

OPTIONS = (
    ("grpc.max_receive_message_length", MAX_MESSAGE_BYTES),
    # The keepalive pings of clients that want to notice a silent server within two seconds.
    ("grpc.http2.min_ping_interval_without_data_ms", 500),
    ("grpc.http2.max_ping_strikes", 0),
    # A caller's machine that falls silent is noticed within ten seconds, and what its calls pinned is let go.
    ("grpc.keepalive_time_ms", 5000),
    ("grpc.keepalive_timeout_ms", 5000),
    ("grpc.http2.ping_timeout_ms", 5000),  # without it a minute: see the client's connection
    ("grpc.http2.max_pings_without_data", 0),
    ("grpc.so_reuseport", 0),  # a taken port is an error, not two servers that share it
)


class Listener:
    """Serves on `address` from `start` to `stop`. Build it on the event loop that is to serve."""

    def __init__(self, address: str, service: EncoderService, operator: AdminService) -> None:
        """Take the port. Raises `ConfigError` when it cannot be had."""
        self._server = grpc.aio.server(options=OPTIONS)
        self._server.add_generic_rpc_handlers((generic_handler(service),))
        add_AdminServiceServicer_to_server(operator, self._server)
        self._health = health.aio.HealthServicer()
        health_pb2_grpc.add_HealthServicer_to_server(self._health, self._server)
        names = (SERVICE, ADMIN_SERVICE, health.SERVICE_NAME, reflection.SERVICE_NAME)
        reflection.enable_server_reflection(names, self._server)
        try:
            port = self._server.add_insecure_port(address)
        except RuntimeError as error:
            raise ConfigError(
                f"{flag('listen')} {address}: the address is taken or not ours; port 0 takes a free one"
            ) from error
        host = address.rpartition(":")[0]
        self.endpoint = address if address.startswith("unix:") else f"{host}:{port}"

    async def start(self) -> None:
        """Answer calls, and say so to who asks for our health."""
        await self._server.start()
        for name in ("", SERVICE):
            await self._health.set(name, health_pb2.HealthCheckResponse.SERVING)

    def cut(self) -> None:
        """End running calls now, whatever `stop` was told."""
        self._cutting = asyncio.create_task(self._server.stop(0), name="cut")

    async def stop(self, grace_s: float) -> None:
        """Say that we no longer serve, take no new calls, and let running ones end for at most `grace_s`."""
        await self._health.enter_graceful_shutdown()
        await self._server.stop(grace_s)
