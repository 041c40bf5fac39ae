"""Every way in which an image or a call is refused: alone, by name, and with an error of the family."""

import asyncio
import struct
import threading
import time
from collections.abc import Callable, Coroutine
from contextlib import suppress
from typing import Any

import grpc
import pytest

from encoder_contract.digest import content_digest
from encoder_contract.errors import DeadlineError, EncoderError, InvalidImageError, ModelMismatchError
from encoder_contract.header import Header, read_header
from encoder_contract.v1 import admin_pb2
from encoder_contract.v1 import encoder_pb2 as pb
from encoder_contract.v1.admin_pb2_grpc import AdminServiceStub
from encoder_service.api import inbound, submit
from encoder_service.app import Server
from encoder_service.config import Config
from encoder_service.devices.model import Model
from encoder_service.limits import REFUSAL_S
from prefill_client import EncoderClient, Image, RowRequest, read_images
from testing.hostile_images import png_chunk
from testing.photos import photo
from tests.calls import (
    begin_submit,
    collect,
    connection,
    fetched,
    finish,
    named,
    naming,
    next_state,
    next_states,
    raw_submit,
    stub,
)
from tests.gate import Gate
from tests.servers import client_elsewhere, server_of
from tests.waiting import PATIENCE_S


async def test_a_window_outside_the_image_fails_alone(client: EncoderClient) -> None:
    (image,) = await client.submit([photo(64, 64, 4)])
    windows = [(0, image.tokens + 1), (0, 0), (3, 2)]
    outcomes = await collect(client, [RowRequest(image.digest, *window) for window in windows])
    assert isinstance(outcomes[0].error, InvalidImageError)
    assert outcomes[1].error is None
    assert isinstance(outcomes[2].error, InvalidImageError)


async def a_call(client: EncoderClient) -> None:
    call = (await stub(client)).Fetch(pb.FetchRequest(images=[pb.FetchImage(digest=b"short")]))
    assert await call.code() is not grpc.StatusCode.OK


async def a_name(client: EncoderClient) -> None:
    (answers,) = (await raw_submit(client, [(pb.ImageName(digest=b"short"), b"")])).values()
    assert [answer.state for answer in answers] == [pb.STATE_FAILED]


async def an_upload(client: EncoderClient) -> None:
    (answers,) = (await raw_submit(client, [named(0, b"this is not an image")])).values()
    assert [answer.state for answer in answers] == [pb.STATE_NEEDS_BYTES, pb.STATE_FAILED]


REFUSED = pytest.mark.parametrize("refused", [a_call, a_name, an_upload])
Refused = Callable[[EncoderClient], Coroutine[Any, Any, None]]


@pytest.mark.attack("refused calls and images, repeated at once, to keep the event loop busy")
@REFUSED
async def test_a_refusal_is_answered_late(client: EncoderClient, refused: Refused) -> None:
    began = time.monotonic()
    for _ in range(4):
        await refused(client)
    assert time.monotonic() - began >= 4 * REFUSAL_S


@REFUSED
async def test_a_refusal_delays_no_other_call(
    client: EncoderClient, refused: Refused, monkeypatch: pytest.MonkeyPatch
) -> None:
    for module in (submit, inbound):
        monkeypatch.setattr(module, "REFUSAL_S", 600.0)
    task = asyncio.create_task(refused(client))
    (image,) = await client.submit([photo(64, 64, 4)])
    assert (await fetched(client, image.digest)).error is None
    assert not task.done()
    task.cancel()
    with suppress(asyncio.CancelledError):
        await task


def png_header(width: int, height: int) -> bytes:
    """A file that says it is a huge PNG and holds no pixel: a decompression bomb's header."""
    header = struct.pack(">IIBBBBB", width, height, 8, 2, 0, 0, 0)
    return b"\x89PNG\r\n\x1a\n" + png_chunk(b"IHDR", header) + bytes(100)


async def test_every_bad_image_fails_alone_and_its_neighbours_are_encoded(client: EncoderClient) -> None:
    good = [photo(100 + 20 * n, 90, n) for n in range(3)]
    truncated = photo(640, 480, 7)[:9000]
    wrong = named(8, photo(70, 70, 8))
    wrong[0].digest = bytes(32)
    grid = pb.Grid(t=1, h=2, w=2)
    files = [
        named(0, good[0]),
        named(1, b"this is not an image"),
        named(2, b""),
        named(3, good[1]),
        named(4, truncated),
        named(5, png_header(60_000, 60_000)),
        named(6, photo(2010, 10, 1)),
        named(7, photo(150, 70, 8), grid=grid),
        wrong,
        named(9, good[2]),
    ]
    states = await raw_submit(client, files)
    assert all(len(answers) == 2 for answers in states.values()), "each was asked for, then answered"
    failed = {
        index: answers[-1].error for index, answers in states.items() if answers[-1].state == pb.STATE_FAILED
    }
    assert set(failed) == {1, 2, 5, 6, 7, 8}
    assert all(error.code == 3 for error in failed.values())
    assert "max_image_pixels" in failed[5].message
    assert "aspect ratio" in failed[6].message
    assert "grid" in failed[7].message
    assert "hash" in failed[8].message

    digests = [content_digest(image) for image in (*good, truncated)]
    outcomes = await collect(client, [RowRequest(digest) for digest in digests], grace_ms=0)
    assert [outcomes[n].error for n in range(3)] == [None] * 3
    assert isinstance(outcomes[3].error, InvalidImageError)


async def test_an_image_over_the_byte_limit_is_refused_naming_it(client: EncoderClient) -> None:
    call = await begin_submit(client, pb.ImageName(index=1, digest=bytes(32)))
    assert (await next_state(call)).state == pb.STATE_NEEDS_BYTES
    piece = bytes(1 << 18)
    for n in range(4 * 34):
        await call.write(pb.SubmitRequest(bytes=[pb.ImageBytes(index=1, data=piece, last=n == 4 * 34 - 1)]))
    state = await next_state(call)
    assert (state.state, state.error.code) == (pb.STATE_FAILED, 3)
    assert "max_image_bytes" in state.error.message


async def test_a_broken_image_is_decoded_once_and_then_refused_by_name(client: EncoderClient) -> None:
    truncated = photo(640, 480, 11)[:9000]
    (submitted,) = await client.submit([truncated])
    assert submitted.error is None, "its header is sound"
    first = (await collect(client, [RowRequest(submitted.digest)]))[0].error
    assert isinstance(first, InvalidImageError)
    (again,) = await client.submit([truncated])
    assert isinstance(again.error, InvalidImageError)


async def test_a_call_meant_for_another_model_is_refused_with_both_fingerprints(
    client: EncoderClient,
) -> None:
    other = pb.Caller(model_fingerprint=b"\x01" * 32)
    stream = (await connection(client)).fetch(
        [RowRequest(bytes(32))], other, grace_ms=0, transports=["inline"], timeout_s=PATIENCE_S
    )
    with pytest.raises(ModelMismatchError) as caught:
        async for _ in stream:
            pass
    assert "01" * 32 in str(caught.value)
    assert client.description.model_fingerprint.hex() in str(caught.value)


async def test_a_client_refuses_a_server_with_another_model(server: Server) -> None:
    with pytest.raises(ModelMismatchError):
        await EncoderClient.connect(server.endpoint, model_fingerprint=b"\x02" * 32)


async def test_a_non_image_fails_alone_at_the_client(client: EncoderClient) -> None:
    answers = await client.submit([b"nothing", photo(64, 64, 12)])
    assert isinstance(answers[0].error, InvalidImageError)
    assert answers[1].error is None


@pytest.mark.parametrize("messages", [
    [naming(pb.ImageName(index=1, digest=bytes(32)))],
    [pb.SubmitRequest(open=pb.Caller()), pb.SubmitRequest(bytes=[pb.ImageBytes(index=5, data=b"x", last=True)])],
    [pb.SubmitRequest(open=pb.Caller(priority=99))],
    [pb.SubmitRequest(open=pb.Caller(request_id="x" * 200))],
])  # fmt: skip
async def test_a_call_that_breaks_the_contract_ends_with_invalid_argument(
    client: EncoderClient, messages: list[pb.SubmitRequest]
) -> None:
    call = (await stub(client)).Submit(timeout=PATIENCE_S)
    for message in messages:
        with suppress(grpc.aio.AioRpcError, asyncio.InvalidStateError):  # the server may have ended the call
            await call.write(message)
    assert await call.code() is grpc.StatusCode.INVALID_ARGUMENT


async def test_the_operators_calls_are_refused_without_the_proof(server: Server) -> None:
    async with grpc.aio.insecure_channel(server.endpoint) as channel:
        stub = AdminServiceStub(channel)
        for call, request in (
            (stub.Flush, admin_pb2.FlushRequest()),
            (stub.Evict, admin_pb2.EvictRequest(proof=bytes(16), address=bytes(32))),
            (stub.Flush, admin_pb2.FlushRequest(proof=b"guess")),
        ):
            with pytest.raises(grpc.aio.AioRpcError) as caught:
                await call(request, timeout=PATIENCE_S)
            assert caught.value.code() is grpc.StatusCode.PERMISSION_DENIED


async def test_a_submit_deadline_at_any_moment_is_a_contract_error(client: EncoderClient) -> None:
    images = [photo(400, 400, 700 + n) for n in range(4)]
    read = [image for image in read_images(images, client.description.geometry) if isinstance(image, Image)]
    endpoint = (await connection(client)).endpoint
    outcomes = set()
    for timeout_ms in (*range(1, 12), *range(12, 60, 4)):
        try:
            async with client._pool.attempt(endpoint, timeout_ms / 1000) as ours:
                stream = ours.submit(read, pb.Caller())
                try:
                    await stream.answers()
                    await stream.finish()
                finally:
                    stream.close()
            outcomes.add("answered")
        except EncoderError as error:
            outcomes.add("late" if isinstance(error, DeadlineError) else repr(error))
    assert "late" in outcomes
    assert outcomes <= {"answered", "late"}


async def test_a_full_queue_refuses_a_name_before_its_bytes(config: Config, model: Model, gate: Gate) -> None:
    images = [photo(300 + n, 300, 800 + n) for n in range(3)]
    async with server_of(config, gate.before(model), max_queued_images=2) as server:
        with gate.closed():
            for n in range(2):  # two hosts, so that none is over its share
                async with client_elsewhere(server, f"127.0.0.{2 + n}") as client:
                    (answer,) = await client.submit([images[n]])
                    assert answer.error is None
            async with await EncoderClient.connect(server.endpoint) as client:
                before = server.budgets.upload_bytes.held
                grid = client.description.geometry.grid(302, 300)
                name, _ = named(1, images[2], grid=pb.Grid(t=1, h=grid.h, w=grid.w))
                state = await next_state(await begin_submit(client, name))
                assert (state.state, state.error.code) == (pb.STATE_FAILED, 8)
                assert state.error.retry_after_ms > 0
                assert server.budgets.upload_bytes.held == before


async def test_a_file_named_in_many_variants_is_read_once_and_not_on_the_loop(
    server: Server, client: EncoderClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    read_on: list[int] = []

    def read(data: bytes, *options: Any) -> Header:
        read_on.append(threading.get_ident())
        return read_header(data, *options)

    monkeypatch.setattr("encoder_service.image.sources.read_header", read)
    image = photo(400, 300, 901)
    (first,) = await client.submit([image])
    assert first.error is None
    most = client.description.geometry.max_pixels
    names = [
        pb.ImageName(index=n, digest=first.digest, variant=pb.Variant(max_pixels=most - n)) for n in range(64)
    ]
    call = await begin_submit(client, *names)
    states = [state.state for state in await next_states(call, len(names))]
    await finish(call)
    assert set(states) <= {pb.STATE_QUEUED, pb.STATE_CACHED}
    assert len(read_on) == 1
    assert read_on[0] != threading.get_ident()


async def test_refused_images_take_no_space_from_kept_files(server: Server, client: EncoderClient) -> None:
    sources = server._sources
    bad = [
        b"no image at all" * 300,
        png_header(60_000, 60_000),
        photo(2010, 10, 902),
        photo(640, 480, 903)[:9000],
    ]
    states = await raw_submit(client, [named(n, image) for n, image in enumerate(bad)])
    assert [states[n][-1].state == pb.STATE_FAILED for n in range(4)] == [True, True, True, False]
    outcome = (await collect(client, [RowRequest(content_digest(bad[3]))]))[0]
    assert isinstance(outcome.error, InvalidImageError)
    assert (len(sources), sources.held_bytes) == (0, 0)
    (good,) = await client.submit([photo(64, 64, 904)])
    assert good.error is None
    assert len(sources) == 1


async def test_a_file_that_cannot_be_decoded_is_refused_in_every_variant(client: EncoderClient) -> None:
    truncated = photo(640, 480, 905)[:9000]
    await client.submit([truncated])
    outcome = (await collect(client, [RowRequest(content_digest(truncated))]))[0]
    assert isinstance(outcome.error, InvalidImageError)
    variant = pb.Variant(max_pixels=client.description.geometry.max_pixels // 2)
    state = await next_state(await begin_submit(client, named(1, truncated, variant=variant)[0]))
    assert (state.state, state.error.code) == (pb.STATE_FAILED, 3)
