"""Health over gRPC: it answers at once, notifies watchers of a drain, and does not wait for stalled ones."""

import asyncio
import time
from dataclasses import replace
from typing import Any

import grpc
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc

from encoder_service.api import server as health
from encoder_service.app import Server
from encoder_service.config import Config
from encoder_service.devices.model import Model
from testing.device_thread import DeviceThread
from testing.raw_http2 import RawConnection
from tests.waiting import PATIENCE_S, soon

SERVING = health_pb2.HealthCheckResponse.SERVING
NOT_SERVING = health_pb2.HealthCheckResponse.NOT_SERVING
SERVICE = "encoder_contract.v1.EncoderService"
WATCH = "/grpc.health.v1.Health/Watch"


def request(service: str = "") -> health_pb2.HealthCheckRequest:
    return health_pb2.HealthCheckRequest(service=service)


async def test_check_and_watch_know_the_server_and_its_service_and_nothing_else(server: Server) -> None:
    async with grpc.aio.insecure_channel(server.endpoint) as channel:
        stub: Any = health_pb2_grpc.HealthStub(channel)
        for name in ("", SERVICE):
            assert (await stub.Check(request(name), timeout=PATIENCE_S)).status == SERVING
            assert (await stub.Watch(request(name), timeout=PATIENCE_S).read()).status == SERVING
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await stub.Check(request("nobody"), timeout=PATIENCE_S)
        assert caught.value.code() is grpc.StatusCode.NOT_FOUND
        unknown = await stub.Watch(request("nobody"), timeout=PATIENCE_S).read()
        assert unknown.status == health_pb2.HealthCheckResponse.SERVICE_UNKNOWN


async def test_a_drain_notifies_watchers_despite_dead_and_stalled_ones(config: Config, model: Model) -> None:
    server = Server(
        replace(config, drain_s=2 * PATIENCE_S), [DeviceThread(config, model)], model.decoder.files
    )
    await server.start()
    raw = await RawConnection.open(server.endpoint, window=0)  # not even the first answer can be sent
    await raw.call(WATCH, b"")
    async with grpc.aio.insecure_channel(server.endpoint) as channel:
        stub: Any = health_pb2_grpc.HealthStub(channel)
        watches = [stub.Watch(request(), timeout=PATIENCE_S) for _ in range(3)]
        assert [(await watch.read()).status for watch in watches] == [SERVING] * 3
        leaver = watches.pop()
        leaver.cancel()
        with pytest.raises(asyncio.CancelledError):
            await leaver.read()
        late = stub.Watch(request(SERVICE), timeout=PATIENCE_S)
        assert (await late.read()).status == SERVING
        began = time.monotonic()
        draining = asyncio.create_task(server.drain())
        for watch in (*watches, late):
            assert (await watch.read()).status == NOT_SERVING
            assert await watch.read() is grpc.aio.EOF
        await draining
    assert time.monotonic() - began < PATIENCE_S, "the drain did not wait for the stalled watcher"
    await raw.close()


async def test_health_watches_are_bounded_per_connection(server: Server) -> None:
    async with (
        grpc.aio.insecure_channel(server.endpoint) as greedy,
        grpc.aio.insecure_channel(server.endpoint, options=[("grpc.use_local_subchannel_pool", 1)]) as other,
    ):
        stub: Any = health_pb2_grpc.HealthStub(greedy)
        watches = [
            stub.Watch(request(), timeout=PATIENCE_S) for _ in range(health.MAX_WATCHES_PER_CONNECTION)
        ]
        for watch in watches:
            await watch.read()
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await stub.Watch(request(), timeout=PATIENCE_S).read()
        assert caught.value.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
        assert (await stub.Check(request(), timeout=PATIENCE_S)).status == SERVING
        other_health: Any = health_pb2_grpc.HealthStub(other)
        assert (await other_health.Watch(request(), timeout=PATIENCE_S).read()).status == SERVING
        for watch in watches:
            watch.cancel()

        async def notified() -> bool:
            try:
                return (await stub.Watch(request(), timeout=PATIENCE_S).read()).status == SERVING
            except grpc.aio.AioRpcError:
                return False

        await soon(notified)
