"""The log line of each call, and the log level."""

import asyncio
import json
import logging

import grpc
import pytest

from encoder_contract.v1 import encoder_pb2 as pb
from encoder_contract.v1.encoder_pb2_grpc import EncoderServiceStub
from encoder_service.app import Server
from encoder_service.logs import ConsoleFormatter, JsonFormatter, toggle_debug
from prefill_client import EncoderClient
from tests.calls import stub
from tests.gate import Gate
from tests.operator_view import fetches_wait_for, settled, use
from tests.waiting import PATIENCE_S


def lines_of_calls(caplog: pytest.LogCaptureFixture) -> list[logging.LogRecord]:
    return [record for record in caplog.records if record.name == "encoder_service.api.inbound"]


async def test_each_call_leaves_one_line_with_its_stages_and_no_image(
    server: Server, gate: Gate, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    async with await EncoderClient.connect(server.endpoint) as client:
        with gate.closed():
            using = asyncio.create_task(use(client))
            await fetches_wait_for(server, 3)  # otherwise they might finish first
        await using
    await settled(server, "calls_total", 3)
    lines = lines_of_calls(caplog)
    assert [line.message for line in lines] == ["submit", "fetch", "fetch"]
    submit, inline, shm = (json.loads(JsonFormatter().format(line)) for line in lines)
    assert (submit["images"], submit["queued"], submit["status"]) == (3, 3, "OK")
    assert (inline["images"], inline["failed"], inline["invalid_image"]) == (3, 1, 1)
    assert {"wait_ms", "ms", "bytes"} <= inline.keys()
    assert {f"{stage}_ms" for stage in ("queue", "decode", "preprocess", "vit", "copy_out")} <= (
        inline.keys() | shm.keys()
    )
    assert {line["request"] for line in (submit, inline, shm)} == {"chat-1"}
    assert " status=OK" in ConsoleFormatter("%(message)s").format(lines[0])
    assert all(len(line.getMessage()) + len(str(line.__dict__.get("fields"))) < 1000 for line in lines)


async def test_a_refused_call_is_counted_and_logged_with_its_status(
    server: Server, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    async with await EncoderClient.connect(server.endpoint) as client:
        server.service.draining = True
        call = (await stub(client)).Submit(timeout=PATIENCE_S)
        await call.write(pb.SubmitRequest(open=pb.Caller()))
        assert await call.code() is grpc.StatusCode.UNAVAILABLE
    now = await settled(server, "calls_total", 1, call="submit", status="UNAVAILABLE")
    assert now.total("calls_in_progress") == 0
    assert "draining" in str(lines_of_calls(caplog)[-1].__dict__["fields"])


@pytest.mark.attack("a forged log line")
async def test_client_names_cannot_forge_or_flood_log_lines(
    server: Server, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    async with grpc.aio.insecure_channel(server.endpoint) as channel:
        caller = pb.Caller(request_id="a\nERROR b=c", client_id="x" * 10_000)
        call = EncoderServiceStub(channel).Fetch(pb.FetchRequest(caller=caller))
        with pytest.raises(grpc.aio.AioRpcError, match="at most 128 bytes"):
            await call.read()
    async with grpc.aio.insecure_channel(server.endpoint) as channel:
        call = EncoderServiceStub(channel).Fetch(
            pb.FetchRequest(), metadata=(("x-request-id", "from-a-proxy"),)
        )
        with pytest.raises(grpc.aio.AioRpcError):
            await call.read()
    await settled(server, "calls_total", 2, call="fetch")
    forged, proxied = lines_of_calls(caplog)
    line = ConsoleFormatter("%(message)s").format(forged)
    assert "\n" not in line
    assert "request='a\\nERROR b=c'" in line
    assert len(line) < 600
    assert "request=from-a-proxy" in ConsoleFormatter("%(message)s").format(proxied)


def test_the_log_level_of_a_running_server_is_toggled() -> None:
    root = logging.getLogger()
    before = root.level
    try:
        root.setLevel("WARNING")
        toggle_debug("warning")
        assert root.level == logging.DEBUG
        toggle_debug("warning")
        assert root.level == logging.WARNING
    finally:
        root.setLevel(before)
