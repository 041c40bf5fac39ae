"""Error handling: any exception of a handler becomes a status for its caller and a reason in the log."""

import logging
from collections.abc import Awaitable, Callable

import grpc
import pytest

from encoder_contract.v1 import encoder_pb2 as pb
from encoder_contract.v1.admin_pb2 import EvictRequest, FlushRequest
from encoder_contract.v1.admin_pb2_grpc import AdminServiceStub
from encoder_contract.v1.encoder_pb2_grpc import EncoderServiceStub
from encoder_service.api import messages
from encoder_service.api.caller import Identity
from encoder_service.app import Server
from tests.calls import naming

Make = Callable[[grpc.aio.Channel, Server], Awaitable[object]]


async def describe(channel: grpc.aio.Channel, _: Server) -> object:
    return await EncoderServiceStub(channel).Describe(pb.DescribeRequest())


async def submit(channel: grpc.aio.Channel, _: Server) -> object:
    call = EncoderServiceStub(channel).Submit()
    await call.write(pb.SubmitRequest(open=pb.Caller()))
    await call.write(naming(pb.ImageName(digest=bytes(32))))
    return await call.read()


async def submit_nothing(channel: grpc.aio.Channel, _: Server) -> object:
    """No message is sent: otherwise gRPC's client might report its failed write instead of the answer."""
    return await EncoderServiceStub(channel).Submit().read()


async def fetch(channel: grpc.aio.Channel, _: Server) -> object:
    images = [pb.FetchImage(digest=bytes(32))]
    return await EncoderServiceStub(channel).Fetch(pb.FetchRequest(images=images)).read()


async def evict(channel: grpc.aio.Channel, server: Server) -> object:
    return await AdminServiceStub(channel).Evict(EvictRequest(proof=server.store.segment.segment_id))


async def flush(channel: grpc.aio.Channel, server: Server) -> object:
    return await AdminServiceStub(channel).Flush(FlushRequest(proof=server.store.segment.segment_id))


@pytest.mark.parametrize(
    ("make", "place"),
    [(make, (messages, "image_key")) for make in (submit, fetch)]
    + [(make, (Identity, "require")) for make in (describe, submit_nothing, fetch, evict, flush)],
    ids=lambda each: each[1] if isinstance(each, tuple) else each.__name__,
)
async def test_an_unexpected_exception_ends_its_call_with_a_logged_id(
    make: Make,
    place: tuple[object, str],
    server: Server,
    caplog: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def broken(*_: object) -> None:
        raise ValueError("a bug of ours")

    monkeypatch.setattr(*place, broken)
    async with grpc.aio.insecure_channel(server.endpoint) as channel:
        with pytest.raises(grpc.aio.AioRpcError, match=r"internal error [0-9a-f]{12}") as ended:
            await make(channel, server)
    assert ended.value.code() is grpc.StatusCode.INTERNAL
    assert "a bug of ours" not in str(ended.value.details())
    (record,) = [record for record in caplog.records if record.levelno == logging.ERROR]
    assert record.getMessage().split()[-1] in str(ended.value.details())
