"""Callers without a token: they take no place, little memory, and write no spans."""

from collections.abc import AsyncIterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import grpc
import psutil
import pytest

from encoder_contract import spans
from encoder_contract.fleet_key import SIGNATURE_METADATA
from encoder_contract.half_close import HALF_CLOSES
from encoder_contract.v1 import encoder_pb2 as pb
from encoder_contract.v1.encoder_pb2_grpc import EncoderServiceStub
from encoder_service.api import inbound, messages, server
from encoder_service.app import Server
from encoder_service.config import Config
from encoder_service.devices.model import Model
from encoder_service.limits import Budget, Budgets
from testing.attacks import CHECK, DESCRIBE, FETCH, SUBMIT, WATCH, attacking
from testing.raw_http2 import RawConnection, framed
from tests.processes import running
from tests.servers import server_of
from tests.tenants import TOKENS, guarded_by
from tests.waiting import PATIENCE_S, soon

OK, INVALID_ARGUMENT, DEADLINE_EXCEEDED, RESOURCE_EXHAUSTED, UNAUTHENTICATED = "0", "3", "4", "8", "16"
SAMPLED = f"00-{'ab' * 16}-{'cd' * 8}-01"
FLUSH = "/encoder_contract.v1.AdminService/Flush"
MIB = 1 << 20


@pytest.fixture
async def raw(guard: Server) -> AsyncIterator[RawConnection]:
    async with await RawConnection.open(guard.endpoint) as connection:
        yield connection


async def statuses(connection: RawConnection, streams: Sequence[int]) -> set[str]:
    """Return the statuses of calls, once all have ended."""
    await soon(lambda: all("grpc-status" in connection.trailers.get(stream, {}) for stream in streams))
    return {connection.trailers[stream]["grpc-status"] for stream in streams}


@pytest.mark.parametrize("path", [SUBMIT, FETCH, DESCRIBE, FLUSH])
async def test_a_stranger_is_refused_before_its_request_is_read(
    raw: RawConnection, monkeypatch: pytest.MonkeyPatch, path: str
) -> None:
    monkeypatch.setattr(inbound, "REQUEST_S", 2 * PATIENCE_S)
    assert await statuses(raw, [await raw.call(path)]) == {UNAUTHENTICATED}


@pytest.mark.parametrize("path", [SUBMIT, FETCH, DESCRIBE])
async def test_a_call_that_is_refused_holds_its_window_and_no_more(
    guarded: Config, model: Model, monkeypatch: pytest.MonkeyPatch, path: str
) -> None:
    monkeypatch.setattr(inbound, "REFUSAL_S", 2 * PATIENCE_S)
    async with (
        server_of(guarded, model, call_window_kib=256) as guard,
        await RawConnection.open(guard.endpoint) as raw,
    ):
        stream = await raw.call(path)
        await soon(lambda: guard.budgets.refused.held == 1)
        assert await raw.fill(stream, framed(bytes(MIB)), 256 << 10, patience_s=3.0) == 256 << 10


async def test_refusals_beyond_a_number_are_not_delayed(
    guarded: Config, model: Model, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(inbound, "REFUSAL_S", 2 * PATIENCE_S)
    limits = {"refused": Budget(1, "delayed refusals")}
    async with (
        server_of(guarded, model, limits=limits) as guard,
        await RawConnection.open(guard.endpoint) as raw,
    ):
        delayed = await raw.call(SUBMIT)
        await soon(lambda: guard.budgets.refused.held == 1)
        assert await statuses(raw, [await raw.call(FETCH) for _ in range(20)]) == {UNAUTHENTICATED}
        assert delayed not in raw.trailers


async def test_a_refused_caller_that_half_closes_gets_a_message(guarded: Config, model: Model) -> None:
    """Through a proxy that loses the status of a call which ends before its caller has half-closed."""
    limits = {"submits": Budget(1, "open Submit calls")}
    chat = ("authorization", f"Bearer {TOKENS['chat']}")
    async with (
        server_of(guarded, model, limits=limits) as guard,
        grpc.aio.insecure_channel(guard.endpoint) as channel,
    ):
        guard.budgets.submits.take_now(None, 1)
        for metadata, status in (((), UNAUTHENTICATED), ((chat,), RESOURCE_EXHAUSTED)):
            call: Any = EncoderServiceStub(channel).Submit(metadata=(*metadata, HALF_CLOSES))
            answer = await call.read()
            assert (str(answer.error.code), answer.error.message) == (status, await call.details())
            with pytest.raises(grpc.aio.AioRpcError):  # no message
                await EncoderServiceStub(channel).Submit(metadata=metadata).read()
        guard.budgets.submits.release(None, 1)


async def test_a_refused_caller_that_does_not_read_its_error_counts_until_it_leaves(
    guarded: Config, model: Model, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(inbound, "REFUSAL_S", 0.001)
    limits = {"refused": Budget(1, "delayed refusals")}
    async with (
        server_of(guarded, model, limits=limits) as guard,
        await RawConnection.open(guard.endpoint) as others,
    ):
        async with await RawConnection.open(guard.endpoint, window=0) as raw:
            await raw.call(SUBMIT, headers=(HALF_CLOSES,))
            await soon(lambda: guard.budgets.refused.held == 1)
            for _ in range(20):  # each takes longer than a refusal
                assert await statuses(others, [await others.call(SUBMIT, headers=(HALF_CLOSES,))]) == {
                    UNAUTHENTICATED
                }
            assert guard.budgets.refused.held == 1
        await soon(lambda: not guard.budgets.refused.held)


@pytest.mark.attack("callers that keep their windows closed, so that no answer or refusal can be sent")
@pytest.mark.parametrize("path", [SUBMIT, DESCRIBE])
async def test_a_caller_that_does_not_read_its_first_answer_counts_until_it_leaves(
    config: Config, model: Model, path: str
) -> None:
    """For so long, gRPC keeps what it has sent."""
    async with (
        server_of(config, model, limits={"reader_idle_s": 0.05}) as server,
        await RawConnection.open(server.endpoint) as others,
    ):
        budget = server.budgets.submits if path == SUBMIT else server.budgets.calls
        gate = server._listener._submit_gate if path == SUBMIT else server._listener._gate
        async with await RawConnection.open(server.endpoint, window=0) as raw:
            # A Submit with an invalid message is told so.
            await raw.call(path, b"" if path == DESCRIBE else b"invalid", headers=(HALF_CLOSES,))
            await soon(lambda: budget.held == 1)
            await gate.wait_idle()
            # The others read, however busy this machine is.
            server._listener._gate._reader_idle_s = PATIENCE_S
            for _ in range(20):
                assert await statuses(others, [await others.call(DESCRIBE, b"")]) == {OK}
            await soon(lambda: budget.held == 1)  # the last one has left, too
        await soon(lambda: not budget.held)


async def test_requests_of_strangers_that_do_not_arrive_leave_tenants_their_places(
    guarded: Config, model: Model, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(inbound, "REQUEST_S", 2 * PATIENCE_S)
    limits = {"strangers": Budget(8, "calls of unknown callers whose request has not arrived")}
    signed = ((SIGNATURE_METADATA, "bm8gc2lnbmF0dXJl"),)  # only with its request could it be a replica's
    async with (
        server_of(guarded, model, limits=limits) as guard,
        await RawConnection.open(guard.endpoint) as raw,
    ):
        for path in (FETCH, CHECK, WATCH) * 2:
            await raw.call(path, headers=signed)
        await soon(lambda: guard.budgets.strangers.held == 6)
        assert not guard.budgets.calls.held
        more = [await raw.call(path, headers=signed) for path in (FETCH, CHECK, WATCH)]
        assert await statuses(raw, more) == {RESOURCE_EXHAUSTED}
        metadata = (("authorization", f"Bearer {TOKENS['chat']}"),)
        async with grpc.aio.insecure_channel(guard.endpoint) as channel:
            await EncoderServiceStub(channel).Describe(
                pb.DescribeRequest(), metadata=metadata, timeout=PATIENCE_S
            )


@pytest.mark.parametrize("path", [FETCH, DESCRIBE, CHECK, WATCH])
async def test_a_call_has_to_end_its_request(
    server: Server, monkeypatch: pytest.MonkeyPatch, path: str
) -> None:
    async with await RawConnection.open(server.endpoint) as raw:
        twice = await raw.call(path)
        await raw.send(twice, framed(b"") * 2)
        assert await statuses(raw, [twice]) == {INVALID_ARGUMENT}
        monkeypatch.setattr(inbound, "REQUEST_S", 0.5)
        open_ended = await raw.call(path)
        await raw.send(open_ended, framed(b""))
        assert await statuses(raw, [open_ended]) == {DEADLINE_EXCEEDED}


@pytest.mark.attack("calls without a token that fill their windows")
async def test_strangers_on_all_streams_take_a_bounded_amount_of_memory(
    checkpoint: Path, tenants_file: Path, config: Config
) -> None:
    guarded = guarded_by(tenants_file, config)
    files = {"tenants_file": guarded.tenants_file, "fleet_key_file": guarded.fleet_key_file}
    with running(checkpoint, **files) as server, attacking("strangers", server) as go:
        process = psutil.Process(server.process.pid)
        metadata = (("authorization", f"Bearer {TOKENS['chat']}"),)
        async with grpc.aio.insecure_channel(server.endpoint) as channel:
            stub: Any = EncoderServiceStub(channel)

            async def is_served() -> bool:
                # Cancelled: too many calls of its method wait.
                code = await stub.Describe(pb.DescribeRequest(), metadata=metadata, timeout=PATIENCE_S).code()
                assert code in (grpc.StatusCode.OK, grpc.StatusCode.CANCELLED)
                return bool(code is grpc.StatusCode.OK)

            await soon(is_served)
            before = process.memory_info().rss
            go()
            refused = server.metrics().total("calls_total", status="UNAUTHENTICATED")

            def has_refused_many() -> bool:
                return server.metrics().total("calls_total", status="UNAUTHENTICATED") > refused + 300

            await soon(has_refused_many)
            await soon(is_served)
        assert process.memory_info().rss - before < 400 * MIB


def test_the_bound_on_unread_data_counts_every_call_that_may_have_some(config: Config) -> None:
    budgets = Budgets.of(config)
    window, message = 256 << 10, messages.max_request_bytes(512)
    submits, others = budgets.submits.size, budgets.arriving.size + budgets.strangers.size
    bound = server.unread_bytes(budgets, window)
    assert bound > submits * (window + message) + others * (window + message)
    assert bound > server.PENDING_CALLS * len(server.REGISTERED) * window
    assert server.unread_bytes(Budgets.of(replace(config, max_calls=1)), window) < bound / 3


@pytest.mark.attack("spans with forged trace ids, by callers without a token")
async def test_only_admitted_callers_write_spans(guard: Server, monkeypatch: pytest.MonkeyPatch) -> None:
    begun: list[tuple[str, str]] = []
    monkeypatch.setattr(
        spans.CallSpan, "begin", classmethod(lambda _, name, traceparent: begun.append((name, traceparent)))
    )
    traced = (("traceparent", SAMPLED),)
    request = pb.FetchRequest(images=[pb.FetchImage(digest=b"\1" * 32)])
    async with grpc.aio.insecure_channel(guard.endpoint) as channel:
        stub: Any = EncoderServiceStub(channel)
        forged = (*traced, (SIGNATURE_METADATA, b"no signature"))
        reader = (*traced, ("authorization", f"Bearer {TOKENS['reader']}"))
        for call in (
            stub.Submit(metadata=traced),
            stub.Fetch(request, metadata=traced),
            stub.Fetch(request, metadata=forged),
            stub.Submit(metadata=reader),  # has no right to submit
        ):
            assert await call.code() in (grpc.StatusCode.UNAUTHENTICATED, grpc.StatusCode.PERMISSION_DENIED)
        assert not begun
        chat = (*traced, ("authorization", f"Bearer {TOKENS['chat']}"))
        [answer] = [answer async for answer in stub.Fetch(request, metadata=chat)]
        assert len(answer.errors) == 1
        assert begun == [("encoder.fetch", SAMPLED)]
