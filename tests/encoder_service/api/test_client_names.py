"""Invented client names: a host with many names gets no more than the shares of a few."""

from dataclasses import replace
from typing import Any, cast

import grpc

from encoder_contract.digest import content_digest
from encoder_contract.v1 import encoder_pb2 as pb
from encoder_contract.v1.encoder_pb2_grpc import EncoderServiceStub
from encoder_service.api.caller import KEEP_NAME_S, MAX_NAMES_PER_HOST, ClientNames
from encoder_service.app import Server
from encoder_service.config import Config
from encoder_service.engine.model import Model
from encoder_service.image.decoder import Decoder
from testing.device_thread import DeviceThread
from testing.photos import photo, with_comment
from tests.calls import finish, naming, next_state
from tests.gate import Gate
from tests.tcp_proxy import TcpProxy

PLACES = 64


def test_the_first_names_of_a_host_have_their_own_share() -> None:
    names = ClientNames()
    first = [f"client {n}" for n in range(MAX_NAMES_PER_HOST)]
    for _ in range(2):
        assert [names.resolve(name, "ipv4:10.0.0.1") for name in first] == first
        assert names.resolve("one more", "ipv4:10.0.0.1") == "ipv4:10.0.0.1"
        assert names.resolve("", "ipv4:10.0.0.1") == "ipv4:10.0.0.1"
    assert names.resolve("one more", "ipv4:10.0.0.2") == "one more"


def test_an_unused_name_loses_its_share() -> None:
    now = 0.0
    names = ClientNames(lambda: now)
    for n in range(MAX_NAMES_PER_HOST):
        names.resolve(f"client {n}", "host")
    now = KEEP_NAME_S
    assert names.resolve("client 0", "host") == "client 0"
    assert names.resolve("late", "host") == "host"
    now = KEEP_NAME_S + 1
    assert names.resolve("late", "host") == "late"
    assert names.resolve("client 0", "host") == "client 0"


async def submitted(endpoint: str, client_id: str, file: bytes) -> bool:
    """Submit one image for good; return whether it was accepted."""
    async with grpc.aio.insecure_channel(endpoint) as channel:
        call: Any = EncoderServiceStub(channel).Submit(timeout=60)
        await call.write(pb.SubmitRequest(open=pb.Caller(client_id=client_id)))
        await call.write(naming(pb.ImageName(index=0, digest=content_digest(file))))
        state = await next_state(call)
        if state.state == pb.STATE_NEEDS_BYTES:
            await call.write(pb.SubmitRequest(bytes=[pb.ImageBytes(index=0, data=file, last=True)]))
            state = await next_state(call)
        await finish(call)
        assert state.state in (pb.STATE_QUEUED, pb.STATE_FAILED)
        return bool(state.state == pb.STATE_QUEUED)


async def test_a_host_with_many_invented_names_leaves_room_for_others(
    config: Config, model: Model, gate: Gate
) -> None:
    gated = replace(model, decoder=cast(Decoder, gate))
    server = Server(replace(config, max_queued_images=PLACES), gated, [DeviceThread(config, gated)])
    await server.start()
    proxy = await TcpProxy(int(server.endpoint.rpartition(":")[2]), from_host="127.0.0.9").start()
    picture = photo(64, 64, 7000)
    try:
        with gate.closed():
            accepted = [
                await submitted(server.endpoint, f"invented {n}", with_comment(picture, n))
                for n in range(2 * PLACES)
            ]
            assert PLACES / 2 < sum(accepted) < PLACES
            assert await submitted(f"127.0.0.1:{proxy.port}", "newcomer", with_comment(picture, 2 * PLACES))
    finally:
        await proxy.stop()
        await server.drain()
