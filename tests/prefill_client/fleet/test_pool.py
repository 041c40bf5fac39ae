"""The pool of connections: reconnecting to restarted servers, and resolving names."""

import asyncio
import logging
import socket
from collections.abc import Iterator
from contextlib import AsyncExitStack
from itertools import chain, repeat
from pathlib import Path
from typing import Any

import grpc
import numpy as np
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc

from encoder_contract.credentials import Credentials
from encoder_contract.errors import UnavailableError
from encoder_contract.v1 import encoder_pb2 as pb
from encoder_service.app import Server
from encoder_service.config import Config
from encoder_service.devices.model import Model
from encoder_service.limits import Budget
from prefill_client import EncoderClient, RowRequest
from prefill_client.fleet import pool
from prefill_client.transport import channels
from prefill_client.transport.channels import Channels
from testing.photos import photo
from testing.processes import free_port
from testing.tcp_proxy import TcpProxy
from tests.calls import all_connect, collect, connection
from tests.closed_port import closed_port
from tests.processes import running
from tests.servers import server_of
from tests.waiting import PATIENCE_S, soon, within_some_limit


async def transport(client: EncoderClient) -> str:
    """Submit an image and fetch it; return the transport, or the error."""
    (answer,) = await client.submit([photo(64, 96, 61)], timeout_s=PATIENCE_S)
    if answer.error is not None:
        return type(answer.error).__name__
    (fetched,) = (await collect(client, [RowRequest(answer.digest)])).values()
    return type(fetched.error).__name__ if fetched.error else fetched.transport


async def is_shared(client: EncoderClient) -> bool:
    return await transport(client) == "shm"


async def test_a_restarted_server_shares_its_memory_again(config: Config, model: Model) -> None:
    listen = f"127.0.0.1:{free_port()}"
    async with server_of(config, model, listen=listen):
        client = await EncoderClient.connect(listen)
        assert await transport(client) == "shm"
    async with client, server_of(config, model, listen=listen):
        await soon(lambda: is_shared(client))


async def test_a_server_that_connects_slowly_is_used(server: Server, monkeypatch: pytest.MonkeyPatch) -> None:
    """Connecting takes longer than a call waits, so later calls continue the attempt of earlier ones."""
    monkeypatch.setattr(pool, "CONNECT_AGAIN_S", 0.2)
    proxy = await TcpProxy(int(server.endpoint.rpartition(":")[2])).start()
    try:
        async with await EncoderClient.connect(f"127.0.0.1:{proxy.port}") as client:
            proxy.cut()
            proxy.mend()
            proxy.delay(0.15)  # each way

            async def submitted() -> bool:
                (answer,) = await client.submit([photo(64, 96, 60)])
                return answer.error is None

            await soon(submitted)
    finally:
        await proxy.stop()


async def test_a_server_is_used_as_soon_as_it_accepts_connections(
    server: Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Retired channels to its endpoint are still there, and connect again only after their pause."""
    pauses = {f"grpc.{name}_reconnect_backoff_ms": int(1000 * PATIENCE_S) for name in ("initial", "max")}
    options = tuple({**dict(channels.CHANNEL_OPTIONS), **pauses}.items())
    monkeypatch.setattr(channels, "CHANNEL_OPTIONS", options)
    monkeypatch.setattr(pool, "WATCH_AGAIN_S", 0.02)
    proxy = await TcpProxy(int(server.endpoint.rpartition(":")[2])).start()
    try:
        endpoint = f"127.0.0.1:{proxy.port}"
        async with await EncoderClient.connect(endpoint) as client:
            proxy.cut()
            await soon(lambda: "no server answers" in client.why_down.get(endpoint, ""))
            proxy.mend()
            await soon(lambda: not client.why_down)
    finally:
        await proxy.stop()


async def test_a_call_keeps_its_connection_when_later_calls_get_a_new_one(
    config: Config, model: Model
) -> None:
    async with server_of(config, model) as server, await EncoderClient.connect(server.endpoint) as client:
        (answer,) = await client.submit([photo(64, 96, 62)])
        (expected,) = (await collect(client, [RowRequest(answer.digest)])).values()
        before = await connection(client)
        client._pool._drop(server.endpoint, before)
        await all_connect(client)
        assert await connection(client) is not before
        stream = before.fetch(
            [RowRequest(answer.digest)], pb.Caller(), grace_ms=0, transports=["shm"], timeout_s=60
        )
        fetched = await anext(aiter(stream))
        assert fetched.error is None
        assert np.array_equal(fetched.copy().array, expected.array)
        stream.close()


async def test_a_killed_and_restarted_server_shares_its_memory_again(config: Config) -> None:
    listen = f"127.0.0.1:{free_port()}"
    with running(config.model, listen=listen) as first:
        async with await EncoderClient.connect(listen) as client:
            assert await transport(client) == "shm"
            first.kill()
            with running(config.model, listen=listen):
                await soon(lambda: is_shared(client))


def device_mappings() -> list[str]:
    """Return the mappings of this process of memory that stands in for a GPU's."""
    maps = Path("/proc/self/maps").read_text()
    return [line for line in maps.splitlines() if "encoder-service-device" in line]


async def test_memory_of_a_killed_server_is_unmapped_before_another_starts(config: Config) -> None:
    """On a GPU, a restarted server would find no room for its tier."""
    options = {"store_device_gib": 0.02, "store_host_gib": 0.05}
    with running(config.model, **options) as server:
        async with await EncoderClient.connect(server.endpoint) as client:
            (answer,) = await client.submit([photo(64, 96, 61)], timeout_s=PATIENCE_S)
            found = await collect(client, [RowRequest(answer.digest)], transports=["device"])
            assert [each.transport for each in found.values()] == ["device"]
            del found
            assert device_mappings()
            server.kill()
            await soon(lambda: not device_mappings())


async def held_watches(endpoint: str, count: int, stack: AsyncExitStack) -> int:
    """Hold health watches, 40 a connection; return how many the server answered."""
    answered = 0
    while count > 0:
        options = [("grpc.use_local_subchannel_pool", 1)]
        channel = await stack.enter_async_context(grpc.aio.insecure_channel(endpoint, options=options))
        stub: Any = health_pb2_grpc.HealthStub(channel)
        here, count = min(count, 40), count - 40
        watches = [stub.Watch(health_pb2.HealthCheckRequest()) for _ in range(here)]
        for watch in watches:
            answered += (await watch.read()).status == health_pb2.HealthCheckResponse.SERVING
            stack.callback(watch.cancel)
    return answered


async def test_a_refused_watch_does_not_say_that_a_server_is_down(
    config: Config, model: Model, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(pool, "WATCH_REFUSED_S", 0.02)
    caplog.set_level(logging.DEBUG, pool.__name__)
    budget = Budget(1, "open health calls")
    async with AsyncExitStack() as stack:
        server = await stack.enter_async_context(server_of(config, model, limits={"health_calls": budget}))
        assert await held_watches(server.endpoint, 1, stack) == 1
        async with await EncoderClient.connect(server.endpoint) as client:
            await soon(lambda: caplog.text.count("open health calls (1) is reached") > 3)
            assert client.any_serves
            assert client._pool.router.is_up(server.endpoint)
            assert not client.why_down
            assert await transport(client) == "shm"


async def test_a_server_is_watched_by_a_thousand_clients(config: Config, model: Model) -> None:
    async with AsyncExitStack() as stack:
        server = await stack.enter_async_context(server_of(config, model))
        assert await held_watches(server.endpoint, 1000, stack) == 1000


NAME = "dns:encoder:50051"
NOT_YET = "not an address"


class Names:
    """The addresses of the name at each lookup. The last answer repeats."""

    def __init__(self, *answers: str) -> None:
        self._answers: Iterator[str] = chain(answers, repeat(answers[-1]))
        self.lookups = 0

    def getaddrinfo(self, *_asked: object, **_how: object) -> list[tuple[Any, ...]]:
        """Answer like `socket.getaddrinfo`."""
        self.lookups += 1
        answer = next(self._answers)
        if answer == NOT_YET:
            raise socket.gaierror(socket.EAI_NONAME, "Name or service not known")
        host, _, port = answer.rpartition(":")
        return [(socket.AF_INET, socket.SOCK_STREAM, socket.IPPROTO_TCP, "", (host, int(port)))]


def resolve(monkeypatch: pytest.MonkeyPatch, *answers: str) -> Names:
    """Replace Python's name resolution. gRPC gets addresses, and resolves nothing."""
    names = Names(*answers)
    monkeypatch.setattr(socket, "getaddrinfo", names.getaddrinfo)
    return names


async def test_connect_waits_for_a_name_to_resolve(server: Server, monkeypatch: pytest.MonkeyPatch) -> None:
    names = resolve(monkeypatch, NOT_YET, NOT_YET, server.endpoint)
    async with await EncoderClient.connect(NAME, timeout_s=PATIENCE_S) as client:
        assert names.lookups >= 3
        assert client._pool.router.endpoints == (server.endpoint,)


async def test_a_replacement_server_is_found_while_waiting_for_the_old_one(
    server: Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    with closed_port() as gone:
        resolve(monkeypatch, gone, server.endpoint)
        async with await EncoderClient.connect(NAME, timeout_s=PATIENCE_S) as client:
            assert client._pool.router.endpoints == (server.endpoint,)
            assert client._pool.router.is_up(server.endpoint), (
                "the one that is gone is not there, not this one"
            )


async def test_an_unresolvable_name_is_in_the_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pool, "WATCH_AGAIN_S", 0.05)

    async def looked_up_again(limit_s: float) -> bool:
        names = resolve(monkeypatch, NOT_YET)
        with pytest.raises(UnavailableError, match=f"{NAME} does not resolve: .*not known"):
            await EncoderClient.connect(NAME, timeout_s=limit_s)
        return names.lookups > 1

    await within_some_limit(looked_up_again)


async def test_without_wait_a_name_is_resolved_once(monkeypatch: pytest.MonkeyPatch) -> None:
    names = resolve(monkeypatch, NOT_YET)
    with pytest.raises(UnavailableError, match=f"{NAME} does not resolve"):
        await EncoderClient.connect(NAME, timeout_s=PATIENCE_S, wait=False)
    assert names.lookups == 1


async def test_a_close_that_is_cancelled_anywhere_leaves_nothing_open(server: Server) -> None:
    turns, has_ended = 0, False
    while not has_ended:
        turns += 1
        with closed_port() as gone:
            opened = pool.Pool(
                [server.endpoint, gone],
                model=b"",
                processor=b"",
                channels=Channels(Credentials()),
                connect_timeout_s=PATIENCE_S,
                wait=True,
            )
            connection = await opened.connection(server.endpoint)
            caller = asyncio.create_task(opened.connection(gone))
            await asyncio.sleep(0)
            closing = asyncio.create_task(opened.close())
            for _ in range(turns):
                await asyncio.sleep(0)
            has_ended = closing.done()
            closing.cancel()
            await asyncio.wait([closing, caller], timeout=PATIENCE_S)
            assert closing.cancelled() != has_ended, "a cancellation is not swallowed"
            await soon(lambda opened=opened: all(each.done() for each in opened._connections.values()))  # type: ignore[misc]
            state = connection.channel.get_state
            await soon(lambda state=state: state() is grpc.ChannelConnectivity.SHUTDOWN)  # type: ignore[misc]
    assert turns > 2
