"""Inbound messages: bounded before they are parsed, never decompressed, and refused with a reason."""

import asyncio
import gc
import gzip
import time
from time import thread_time
from typing import Any

import grpc
import psutil
import pytest
from grpc_health.v1.health_pb2 import HealthCheckRequest
from grpc_health.v1.health_pb2_grpc import HealthStub
from grpc_reflection.v1alpha.reflection_pb2 import ServerReflectionRequest
from grpc_reflection.v1alpha.reflection_pb2_grpc import ServerReflectionStub

from encoder_contract.errors import InvalidRequestError
from encoder_contract.v1 import encoder_pb2 as pb
from encoder_contract.v1.encoder_pb2_grpc import EncoderServiceStub
from encoder_service.api import inbound, messages
from encoder_service.api.caller import caller_of
from encoder_service.api.server import PENDING_CALLS
from encoder_service.app import Server
from encoder_service.config import Config
from encoder_service.devices.model import Model
from encoder_service.limits import Caller
from testing.device_thread import DeviceThread
from testing.raw_http2 import RawConnection, framed
from tests.servers import server_of
from tests.waiting import PATIENCE_S, soon

OURS = "/encoder_contract.v1.EncoderService/"
ADMIN = "/encoder_contract.v1.AdminService/"
EMPTY_NAMES = b"\x12\x00" * 1_000_000  # a million empty FetchImage messages in two megabytes
INVALID_ARGUMENT, RESOURCE_EXHAUSTED, UNIMPLEMENTED = "3", "8", "12"


async def status(connection: RawConnection, stream: int, within_s: float = PATIENCE_S) -> str:
    await soon(lambda: "grpc-status" in connection.trailers.get(stream, {}), within_s)
    return connection.trailers[stream]["grpc-status"]


@pytest.mark.attack("a compressed message that expands")
@pytest.mark.parametrize("encoding", ["gzip", "deflate", "identity", "nonsense", None])
async def test_a_compressed_message_is_refused_and_never_expanded(
    server: Server, encoding: str | None
) -> None:
    raw = await RawConnection.open(server.endpoint)
    headers = (("grpc-encoding", encoding),) if encoding else ()
    stream = await raw.call(OURS + "Fetch", headers=headers)
    message = framed(gzip.compress(EMPTY_NAMES * 2), compressed=True)
    # CPU time of this thread, which runs the server's event loop, without garbage collections.
    gc.collect()
    gc.disable()
    try:
        began = thread_time()
        pb.FetchRequest.FromString(EMPTY_NAMES * 2)
        two_million_s, began = thread_time() - began, thread_time()
        await raw.send(stream, message, end=True)
        assert await status(raw, stream) in (INVALID_ARGUMENT, UNIMPLEMENTED, "13")
        assert thread_time() - began < two_million_s, "two million messages were created"
    finally:
        gc.enable()
    await raw.close()


async def test_a_gzip_client_is_refused_with_the_reason(server: Server) -> None:
    async with grpc.aio.insecure_channel(server.endpoint) as channel:
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await EncoderServiceStub(channel).Describe(
                pb.DescribeRequest(), compression=grpc.Compression.Gzip, timeout=PATIENCE_S
            )
        assert caught.value.code() is grpc.StatusCode.UNIMPLEMENTED


@pytest.mark.parametrize(
    ("path", "message"),
    [
        (OURS + "Describe", b"\xfa\x01\x80\x20" + bytes(4096)),
        (ADMIN + "Flush", b"\xfa\x01\x80\x20" + bytes(4096)),
        ("/grpc.health.v1.Health/Check", b"\x0a\x80\x20" + b"a" * 4096),
        (OURS + "Fetch", EMPTY_NAMES[:200_000]),
        (OURS + "Submit", b"\x12\x80\x80\x08" + (b"\x0a\x00" * 65536)),
        (OURS + "Submit", b"\x1a\x00" + b"\x12\x80\x80\x08" + (b"\x0a\x00" * 65536)),
        (OURS + "Fetch", b"\x0a\xff\xff"),
        (OURS + "Submit", b"\x0a\xff\xff"),
        (OURS + "Describe", b"\xff"),
    ],
)  # fmt: skip
async def test_an_oversized_or_malformed_call_is_invalid(server: Server, path: str, message: bytes) -> None:
    raw = await RawConnection.open(server.endpoint)
    stream = await raw.call(path, message)
    assert await status(raw, stream) == INVALID_ARGUMENT
    await raw.close()


async def test_a_message_larger_than_a_piece_is_not_received(server: Server) -> None:
    raw = await RawConnection.open(server.endpoint)
    stream = await raw.call(OURS + "Submit")
    await raw.send(stream, framed(bytes(8 << 20))[:5])  # the length prefix is enough
    assert await status(raw, stream) == RESOURCE_EXHAUSTED
    await raw.close()


def test_only_files_may_exceed_the_names_limit() -> None:
    piece = pb.SubmitRequest(bytes=[pb.ImageBytes(index=7, data=bytes(messages.PIECE_BYTES), last=True)])
    assert messages.parse_submit(piece.SerializeToString(), 1).parsed() == piece
    for size in (0, 1, 100, 200, 20_000, 200_000):
        small = pb.SubmitRequest(bytes=[pb.ImageBytes(index=1, data=bytes(size))])
        assert messages.parse_submit(small.SerializeToString(), 1).parsed() == small
    names = pb.SubmitRequest(names=pb.ImageNames(names=[pb.ImageName(index=9, digest=bytes(32))] * 500))
    large = pb.SubmitRequest(bytes=[pb.ImageBytes(index=7, data=bytes(messages.PIECE_BYTES + 100))])
    halves = [pb.ImageBytes(index=n, data=bytes(messages.PIECE_BYTES // 2 + 100)) for n in range(2)]
    for submit, most in ((names, 1), (large, 1), (pb.SubmitRequest(bytes=halves), 2)):
        with pytest.raises(InvalidRequestError, match=r"the limit is|more fields than"):
            messages.parse_submit(submit.SerializeToString(), most)


def test_files_are_counted_and_left_out_before_a_message_is_parsed() -> None:
    caller = pb.Caller(request_id="r", client_id="c")
    files = [pb.ImageBytes(index=n, data=bytes(1000), last=True) for n in range(3)]
    names = pb.ImageNames(names=[pb.ImageName(index=n, digest=bytes(32)) for n in range(3)], kept=True)
    whole = pb.SubmitRequest(open=caller, names=names, bytes=files, last=True)
    raw = messages.parse_submit(whole.SerializeToString(), 4)
    assert raw.caller() == caller
    assert 3000 <= raw.file_bytes <= 3000 + 3 * messages.PIECE_FIELDS_BYTES
    assert raw.parsed() == whole
    assert raw.parsed(with_files=False) == pb.SubmitRequest(open=caller, names=names, last=True)
    with pytest.raises(InvalidRequestError, match="more fields than a call of 2 images"):
        messages.parse_submit(whole.SerializeToString(), 2)


def test_a_number_where_a_message_belongs_is_an_unknown_field() -> None:
    raw = messages.parse_submit(b"\x08\x01\x18\x01", 1)  # fields 1, which is `open`, and 3
    assert raw.open is None
    assert not raw.parsed().HasField("open")


def test_the_largest_names_of_a_call_fit() -> None:
    most, huge = 2**32 - 1, 2**64 - 1
    variant = pb.Variant(min_pixels=huge, max_pixels=huge)
    name = pb.ImageName(
        index=most, digest=bytes(32), variant=variant, grid=pb.Grid(t=most, h=most, w=most), size_bytes=huge
    )
    numbers = dict.fromkeys(("index", "row_begin", "row_end", "chunk", "needed_in_ms"), most)
    image = pb.FetchImage(digest=bytes(32), variant=variant, **numbers)
    prints = dict.fromkeys(("model_fingerprint", "processor_fingerprint"), bytes(32))
    ids = {"request_id": "x" * 128, "client_id": "y" * 128}
    caller = pb.Caller(**ids, **prints, priority=-8, tenant_salt=bytes(64))
    for count in (1, 512, 4096):
        fetch = pb.FetchRequest(
            caller=caller, images=[image] * count, transports=[1, 2], grace_ms=most, shm_proof=bytes(16)
        )
        submit = pb.SubmitRequest(names=pb.ImageNames(names=[name] * count))
        assert len(fetch.SerializeToString()) <= messages.names_bytes(count)
        assert len(submit.SerializeToString()) <= messages.names_bytes(count)


async def test_reflection_names_the_services(server: Server) -> None:
    async with grpc.aio.insecure_channel(server.endpoint) as channel:
        call = ServerReflectionStub(channel).ServerReflectionInfo(timeout=PATIENCE_S)
        await call.write(ServerReflectionRequest(list_services=""))
        answer = await call.read()
        await call.done_writing()
    names = {service.name for service in answer.list_services_response.service}
    assert {"encoder_contract.v1.EncoderService", "grpc.health.v1.Health"} <= names


@pytest.mark.attack("more calls than the server accepts")
async def test_calls_over_the_limit_are_refused_unread_and_health_still_answers(
    config: Config, model: Model, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Calls without a request end after ten seconds, which may be too short on a busy machine.
    monkeypatch.setattr(inbound, "REQUEST_S", 600.0)
    async with server_of(config, model, max_calls=8) as server:
        places = server._listener._gate._budget
        raw, other = await RawConnection.open(server.endpoint), await RawConnection.open(server.endpoint)
        # One host gets three quarters of the calls.
        held = [await raw.call(OURS + "Fetch") for _ in range(6)]
        await soon(lambda: places.held == 6)
        assert await status(other, await other.call(OURS + "Describe", b"")) == RESOURCE_EXHAUSTED
        health = await other.call("/grpc.health.v1.Health/Check", b"")
        assert await status(other, health) == "0"
        for stream in held:
            raw.reset_stream(stream)
        await soon(lambda: places.held == 0)
        assert await status(other, await other.call(OURS + "Describe", b"")) == "0"
        await raw.close()
        await other.close()


async def test_a_burst_of_calls_of_one_method_delays_no_call_of_another(
    server: Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    def slowly(context: messages.Context) -> Caller:
        """Take longer than a stall of a busy machine for the whole burst."""
        time.sleep(0.005)
        return caller_of(context)

    monkeypatch.setattr(inbound, "caller_of", slowly)
    raw = await RawConnection.open(server.endpoint)
    async with grpc.aio.insecure_channel(server.endpoint) as channel:
        stub = EncoderServiceStub(channel)
        health: Any = HealthStub(channel)
        await stub.Describe(pb.DescribeRequest(), timeout=PATIENCE_S)
        burst = [await raw.call(OURS + "Fetch", b"") for _ in range(PENDING_CALLS)]
        await stub.Describe(pb.DescribeRequest(), timeout=PATIENCE_S)
        await health.Check(HealthCheckRequest(), timeout=PATIENCE_S)
    answered = sum("grpc-status" in raw.trailers.get(stream, {}) for stream in burst)
    assert answered < len(burst) / 2, "Describe waited until the burst was accepted"
    for stream in burst:
        assert await status(raw, stream) == INVALID_ARGUMENT
    await raw.close()


@pytest.mark.attack("a message that is too large, or never ends")
async def test_messages_that_never_end_take_a_bounded_amount_of_memory(config: Config, model: Model) -> None:
    async with server_of(config, model) as server:
        connections = [await RawConnection.open(server.endpoint) for _ in range(4)]
        before = psutil.Process().memory_info().rss
        for size, calls in ((8 << 20, 8), (250 << 10, 40)):
            unfinished = framed(bytes(size))[:-1]
            for connection in connections:
                for _ in range(calls):
                    await connection.send(await connection.call(OURS + "Submit"), unfinished)
        grown = psutil.Process().memory_info().rss - before
        assert grown < 160 * (messages.PIECE_BYTES + (64 << 10)) + (32 << 20)
        for connection in connections:
            await connection.close()


async def test_a_read_that_fails_as_its_call_is_cancelled_is_not_logged() -> None:
    begun, failing, logged = asyncio.Event(), asyncio.Event(), list[object]()

    async def read() -> bytes:
        begun.set()
        await failing.wait()
        raise RuntimeError("the connection was lost")

    async def fail_and_cancel() -> None:
        requests = inbound.Requests(read, bytes)
        waiting = asyncio.create_task(requests.first())
        await begun.wait()
        assert requests._reading is not None
        requests._reading.add_done_callback(lambda _: waiting.cancel())
        failing.set()
        with pytest.raises(asyncio.CancelledError):
            await waiting

    asyncio.get_running_loop().set_exception_handler(lambda _, context: logged.append(context))
    await fail_and_cancel()
    await asyncio.sleep(0)  # the loop still refers to the tasks
    gc.collect()
    assert not logged


async def test_what_a_call_sends_after_its_last_read_message_is_bounded(
    config: Config, model: Model, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(inbound, "REFUSAL_S", 600.0)  # refused calls are not read
    calls, flood, memory, window = 12, bytes(32 << 20), psutil.Process(), config.call_window_kib << 10
    async with server_of(config, model) as server:
        async with await RawConnection.open(server.endpoint) as raw:
            streams = [await raw.call(OURS + "Submit") for _ in range(calls)]
            for stream in streams:
                await raw.send(stream, framed(b""))
            await soon(lambda: server.budgets.refused.held == calls)
            before = memory.memory_info().rss
            least = window - len(framed(b""))
            sent = [await raw.fill(stream, framed(flood), least) for stream in streams]
            grown = memory.memory_info().rss - before
            # A window holds one piece of a file and more, so that an upload from afar takes few round trips.
            # After a message was read, gRPC may open the window a second time.
            assert all(least <= each <= 2 * window for each in sent)
            assert grown < calls * 2 * window + messages.PIECE_BYTES
        await soon(lambda: not server.budgets.submits.held)


async def test_a_failing_drain_step_does_not_stop_the_others(
    config: Config, model: Model, monkeypatch: pytest.MonkeyPatch
) -> None:
    server = Server(config, [DeviceThread(config, model)], model.decoder.files)
    await server.start()
    segment = server.store.segment.path

    async def fails(*_: object) -> None:
        raise RuntimeError("a fault of ours")

    monkeypatch.setattr(server.cluster, "leave", fails)
    monkeypatch.setattr(server.dispatcher, "stop", fails)
    await server.drain()
    assert not segment.exists()
    # Another process may listen there by now.
    port = int(server.endpoint.rpartition(":")[2])
    listening = [each for each in psutil.net_connections("tcp") if each.status == psutil.CONN_LISTEN]
    assert (psutil.Process().pid, port) not in {(each.pid, each.laddr.port) for each in listening}
    monkeypatch.undo()
    await server.dispatcher.stop()
