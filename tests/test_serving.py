"""A client and a real server: submit, fetch, and every way in which an image can fail alone."""

import asyncio
from contextlib import suppress
from dataclasses import replace
from typing import cast

import numpy as np
import pytest
import torch

from bench.images import photo
from encoder_contract.digest import content_digest
from encoder_contract.errors import (
    DeadlineError,
    EncoderError,
    InvalidImageError,
    ModelMismatchError,
    UnknownImageError,
)
from encoder_contract.v1 import encoder_pb2 as pb
from encoder_contract.v1.encoder_pb2_grpc import EncoderServiceStub
from encoder_service.config import Config
from encoder_service.decode import Decoder
from encoder_service.model import Model
from encoder_service.preprocess import to_patches
from encoder_service.server import Server
from prefill_client.client import EncoderClient
from prefill_client.connection import Connection
from prefill_client.images import FetchedRows, Image, RowRequest, read_images
from tests.conftest import Gate

SIZES = [(320, 200), (64, 64), (200, 331), (97, 640)]


async def collect(
    client: EncoderClient, requests: list[RowRequest], **options: object
) -> dict[int, FetchedRows]:
    """Return copies of all outcomes by index."""
    outcomes: dict[int, FetchedRows] = {}
    async with client.fetch(requests, timeout_s=60, **options) as stream:  # type: ignore[arg-type]
        async for outcome in stream:
            assert outcome.index not in outcomes, "an image has one outcome"
            outcomes[outcome.index] = outcome
    return outcomes


def expected_rows(model: Model, image: bytes) -> torch.Tensor:
    """The rows as the rooms make them, called directly."""
    (pixels,) = model.decoder.decode([image])
    assert isinstance(pixels, torch.Tensor)
    grid = model.processor.geometry.grid(pixels.shape[1], pixels.shape[0])
    (patches,) = to_patches([pixels], [grid], model.processor.geometry)
    return model.tower.encode([patches], [grid])[0]


async def test_describe_tells_model_geometry_and_limits(client: EncoderClient, model: Model) -> None:
    description = client.description
    assert description.model_type == "qwen3_vl"
    assert description.model_fingerprint == model.recipe.model
    assert description.geometry == model.processor.geometry
    assert (description.width, description.hidden) == (model.tower.spec.width, model.tower.spec.hidden)
    assert description.max_image_bytes == 32 << 20


@pytest.mark.parametrize("shm", [True, False])
async def test_submitted_images_come_back_as_the_rows_of_the_tower(
    client: EncoderClient, model: Model, shm: bool
) -> None:
    images = [photo(width, height, seed) for seed, (width, height) in enumerate(SIZES)]
    images += [photo(180, 120, 9, orientation=orientation) for orientation in (3, 6, 8)]
    submitted = await client.submit(images)
    assert [s.error for s in submitted] == [None] * len(images)
    async with client.fetch([RowRequest(s.digest) for s in submitted], shm=shm, timeout_s=60) as stream:
        seen = 0
        async for rows in stream:
            seen += 1
            assert rows.transport == ("shm" if shm else "inline")
            assert rows.grid == submitted[rows.index].grid
            assert rows.address == submitted[rows.index].address
            assert torch.equal(rows.tensor(), expected_rows(model, images[rows.index]))
    assert seen == len(images)


async def test_a_known_image_is_cached_and_its_bytes_are_not_asked_for(client: EncoderClient) -> None:
    image = photo(160, 120, 1)
    (first,) = await client.submit([image])
    assert not first.cached
    await collect(client, [RowRequest(first.digest)])
    (second,) = await client.submit([image])
    assert second.cached
    assert (second.grid, second.tokens, second.address) == (first.grid, first.tokens, first.address)
    outcome = (await collect(client, [RowRequest(first.digest)]))[0]
    assert (outcome.source, outcome.stage_ms) == ("host", {})


async def test_the_server_confirms_grids_while_nothing_is_decoded(client: EncoderClient, gate: Gate) -> None:
    with gate.closed():
        (submitted,) = await client.submit([photo(640, 360, 3)])
        assert submitted.grid == client.description.geometry.grid(640, 360)
        assert submitted.tokens == client.description.geometry.tokens(submitted.grid)
        assert not submitted.cached
    assert (await collect(client, [RowRequest(submitted.digest)]))[0].error is None


async def test_a_row_window_is_exactly_those_rows(client: EncoderClient) -> None:
    (image,) = await client.submit([photo(320, 240, 4)])
    whole = (await collect(client, [RowRequest(image.digest)], shm=False))[0].array
    windows = [(0, 1), (3, 17), (image.tokens - 1, image.tokens), (5, 0)]
    outcomes = await collect(client, [RowRequest(image.digest, a, b) for a, b in windows], shm=False)
    for index, (begin, end) in enumerate(windows):
        assert np.array_equal(outcomes[index].array, whole[begin : end or None])


async def test_a_window_outside_the_image_fails_alone(client: EncoderClient) -> None:
    (image,) = await client.submit([photo(64, 64, 4)])
    outcomes = await collect(
        client,
        [
            RowRequest(image.digest, 0, image.tokens + 1),
            RowRequest(image.digest),
            RowRequest(image.digest, 3, 2),
        ],
    )
    assert isinstance(outcomes[0].error, InvalidImageError)
    assert outcomes[1].error is None
    assert isinstance(outcomes[2].error, InvalidImageError)


async def test_fetch_waits_for_an_image_that_is_submitted_later(client: EncoderClient) -> None:
    image = photo(96, 96, 5)
    fetching = asyncio.create_task(collect(client, [RowRequest(content_digest(image))], grace_ms=20_000))
    await asyncio.sleep(0.2)
    assert not fetching.done()
    await client.submit([image])
    assert (await fetching)[0].error is None


async def test_fetch_of_what_nobody_submits_ends_in_not_found_after_its_grace(client: EncoderClient) -> None:
    (known,) = await client.submit([photo(64, 64, 6)])
    outcomes = await collect(client, [RowRequest(bytes(32)), RowRequest(known.digest)], grace_ms=100)
    assert isinstance(outcomes[0].error, UnknownImageError)
    assert outcomes[1].error is None


async def connection(client: EncoderClient) -> Connection:
    """The client's connection, to speak the protocol by hand."""
    (endpoint,) = client._pool.router.endpoints
    return await client._pool.connection(endpoint)


async def stub(client: EncoderClient) -> EncoderServiceStub:
    return EncoderServiceStub((await connection(client)).channel)


def naming(*names: pb.ImageName) -> pb.SubmitRequest:
    return pb.SubmitRequest(names=pb.ImageNames(names=names))


async def raw_submit(
    client: EncoderClient, images: list[tuple[pb.ImageName, bytes]]
) -> dict[int, list[pb.ImageState]]:
    """Speak the protocol by hand, past the client's own checks."""
    call = (await stub(client)).Submit(timeout=20)
    await call.write(pb.SubmitRequest(open=pb.Caller(request_id="raw")))
    await call.write(pb.SubmitRequest(names=pb.ImageNames(names=[name for name, _ in images])))
    states: dict[int, list[pb.ImageState]] = {}
    left = len(images)
    while left:
        state = (await call.read()).state
        states.setdefault(state.index, []).append(state)
        if state.state == pb.STATE_NEEDS_BYTES:
            data = next(data for name, data in images if name.index == state.index)
            await call.write(pb.SubmitRequest(bytes=pb.ImageBytes(index=state.index, data=data, last=True)))
        else:
            left -= 1
    await call.done_writing()
    return states


def named(index: int, data: bytes, **fields: object) -> tuple[pb.ImageName, bytes]:
    return pb.ImageName(index=index, digest=content_digest(data), **fields), data  # type: ignore[arg-type]


def png_header(width: int, height: int) -> bytes:
    """A file that says it is a huge PNG and holds no pixel: a decompression bomb's header."""
    import struct
    import zlib

    body = b"IHDR" + struct.pack(">IIBBBBB", width, height, 8, 2, 0, 0, 0)
    return (
        b"\x89PNG\r\n\x1a\n" + struct.pack(">I", 13) + body + struct.pack(">I", zlib.crc32(body)) + bytes(100)
    )


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
    call = (await stub(client)).Submit(timeout=20)
    await call.write(pb.SubmitRequest(open=pb.Caller()))
    await call.write(naming(pb.ImageName(index=1, digest=bytes(32))))
    assert (await call.read()).state.state == pb.STATE_NEEDS_BYTES
    piece = bytes(1 << 20)
    for n in range(34):
        await call.write(pb.SubmitRequest(bytes=pb.ImageBytes(index=1, data=piece, last=n == 33)))
    state = (await call.read()).state
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
    async with (await connection(client)).fetch([RowRequest(bytes(32))], other, grace_ms=0) as stream:
        with pytest.raises(ModelMismatchError) as caught:
            async for _ in stream:
                pass
    assert "01" * 32 in str(caught.value)
    assert client.description.model_fingerprint.hex() in str(caught.value)


async def test_a_client_refuses_a_server_with_another_model(server: Server) -> None:
    with pytest.raises(ModelMismatchError):
        await EncoderClient.connect(server.endpoint, model_fingerprint=b"\x02" * 32)


async def test_a_file_that_is_no_image_fails_at_the_client_without_its_neighbours(
    client: EncoderClient,
) -> None:
    answers = await client.submit([b"nothing", photo(64, 64, 12)])
    assert isinstance(answers[0].error, InvalidImageError)
    assert answers[1].error is None


@pytest.mark.parametrize("messages", [
    [naming(pb.ImageName(index=1, digest=bytes(32)))],
    [pb.SubmitRequest(open=pb.Caller()), pb.SubmitRequest(bytes=pb.ImageBytes(index=5, data=b"x", last=True))],
    [pb.SubmitRequest(open=pb.Caller(priority=99))],
    [pb.SubmitRequest(open=pb.Caller(request_id="x" * 200))],
])  # fmt: skip
async def test_a_call_that_breaks_the_contract_ends_with_invalid_argument(
    client: EncoderClient, messages: list[pb.SubmitRequest]
) -> None:
    import grpc

    call = (await stub(client)).Submit(timeout=10)
    for message in messages:
        with suppress(grpc.aio.AioRpcError, asyncio.InvalidStateError):  # the server may have ended the call
            await call.write(message)
    assert await call.code() is grpc.StatusCode.INVALID_ARGUMENT


async def test_clients_that_leave_in_the_middle_leave_nothing_behind(
    client: EncoderClient, server: Server, gate: Gate
) -> None:
    images = [photo(300 + n, 300, n) for n in range(12)]
    with gate.closed():
        call = (await stub(client)).Submit(timeout=20)
        await call.write(pb.SubmitRequest(open=pb.Caller()))
        for index, image in enumerate(images):
            await call.write(naming(pb.ImageName(index=index, digest=content_digest(image))))
            assert (await call.read()).state.state == pb.STATE_NEEDS_BYTES
            whole = index % 2 == 0
            piece = pb.ImageBytes(index=index, data=image if whole else image[:5000], last=whole)
            await call.write(pb.SubmitRequest(bytes=piece))
            if whole:
                assert (await call.read()).state.state == pb.STATE_QUEUED
        fetches = [client.fetch([RowRequest(content_digest(image))], timeout_s=20) for image in images]
        reading = [asyncio.create_task(anext(aiter(fetch))) for fetch in fetches]
        await asyncio.sleep(0.2)
        assert server.pipeline.queued_images == 6
        call.cancel()
        for fetch in fetches:
            fetch.close()
        await asyncio.gather(*reading, return_exceptions=True)
        for _ in range(100):
            if not server.pipeline.queued_images:
                break
            await asyncio.sleep(0.01)
        assert server.pipeline.queued_images == 0
    assert server.service.held_upload_bytes == 0
    assert server.store.stats().pins == 0


async def test_shared_rows_are_pinned_exactly_while_their_stream_is_open(
    client: EncoderClient, server: Server
) -> None:
    (image,) = await client.submit([photo(128, 128, 20)])
    async with client.fetch([RowRequest(image.digest)], timeout_s=20) as stream:
        async for _ in stream:
            pass
        assert server.store.stats().pins == 1
        assert not server.store.evict(image.address)
    for _ in range(100):
        if server.store.stats().pins == 0:
            break
        await asyncio.sleep(0.01)
    assert server.store.stats().pins == 0
    assert server.store.evict(image.address)


async def test_handles_are_for_callers_who_can_read_the_segment_and_others_get_their_rows_inline(
    client: EncoderClient, server: Server
) -> None:
    (image,) = await client.submit([photo(128, 128, 30)])
    ours = await connection(client)
    for proof, transport in (
        (server.store.segment.segment_id, "shm"),
        (bytes(16), "inline"),
        (b"", "inline"),
    ):
        ours._shm_proof = proof or b"guess"
        async with ours.fetch([RowRequest(image.digest)], pb.Caller(), grace_ms=0) as stream:
            outcome = await anext(aiter(stream))
            assert outcome.transport == transport
            assert outcome.error is None


async def test_an_evicted_image_is_made_again_without_its_sender_and_bit_for_bit(
    client: EncoderClient, server: Server
) -> None:
    (image,) = await client.submit([photo(200, 150, 21)])
    first = (await collect(client, [RowRequest(image.digest)], shm=False))[0]
    assert server.store.evict(image.address)
    second = (await collect(client, [RowRequest(image.digest)], shm=False))[0]
    assert second.source == "encoded"
    assert np.array_equal(first.array, second.array)


async def test_one_computation_serves_every_caller(client: EncoderClient, server: Server) -> None:
    image = photo(256, 256, 22)
    before = server.store.stats().tiers[-1].writes
    results = await asyncio.gather(
        *(client.submit([image]) for _ in range(8)),
        *(collect(client, [RowRequest(content_digest(image))]) for _ in range(8)),
    )
    assert all(outcome[0].error is None for outcome in results[8:])  # type: ignore[index]
    assert server.store.stats().tiers[-1].writes == before + 1


async def test_the_operators_calls_are_refused_without_the_proof(server: Server) -> None:
    import grpc

    from encoder_contract.v1 import admin_pb2
    from encoder_contract.v1.admin_pb2_grpc import AdminServiceStub

    async with grpc.aio.insecure_channel(server.endpoint) as channel:
        stub = AdminServiceStub(channel)
        for call, request in (
            (stub.Stats, admin_pb2.StatsRequest()),
            (stub.Evict, admin_pb2.EvictRequest(proof=bytes(16), address=bytes(32))),
            (stub.Flush, admin_pb2.FlushRequest(proof=b"guess")),
        ):
            with pytest.raises(grpc.aio.AioRpcError) as caught:
                await call(request, timeout=5)
            assert caught.value.code() is grpc.StatusCode.PERMISSION_DENIED


async def test_health_answers_while_the_server_works(client: EncoderClient, server: Server) -> None:
    import grpc
    from grpc_health.v1 import health_pb2, health_pb2_grpc

    images = [photo(500 + n, 400, n) for n in range(8)]
    submitted = await client.submit(images)
    fetching = asyncio.create_task(collect(client, [RowRequest(s.digest) for s in submitted]))
    async with grpc.aio.insecure_channel(server.endpoint) as channel:
        health = health_pb2_grpc.HealthStub(channel)
        while not fetching.done():
            answer = await health.Check(health_pb2.HealthCheckRequest(), timeout=1)
            assert answer.status == health_pb2.HealthCheckResponse.SERVING
            await asyncio.sleep(0.02)
    assert all(outcome.error is None for outcome in (await fetching).values())


async def test_a_submit_whose_time_runs_out_at_any_moment_ends_with_an_error_of_the_family(
    client: EncoderClient,
) -> None:
    images = [photo(400, 400, 700 + n) for n in range(4)]
    read = [image for image in read_images(images, client.description.geometry) if isinstance(image, Image)]
    ours = await connection(client)
    outcomes = set()
    for timeout_ms in (*range(1, 12), *range(12, 60, 4)):
        try:
            await ours.submit(read, pb.Caller(), timeout_s=timeout_ms / 1000)
            outcomes.add("answered")
        except EncoderError as error:
            outcomes.add("late" if isinstance(error, DeadlineError) else repr(error))
    assert "late" in outcomes
    assert outcomes <= {"answered", "late"}


async def test_a_full_queue_says_no_to_a_name_before_its_bytes_travel(
    config: Config, model: Model, gate: Gate
) -> None:
    images = [photo(300 + n, 300, 800 + n) for n in range(3)]
    server = Server(replace(config, max_queued_images=2), replace(model, decoder=cast(Decoder, gate)))
    await server.start()
    try:
        with gate.closed():
            for n in range(2):  # two clients, so that none is over its share
                async with await EncoderClient.connect(server.endpoint, client_id=f"client {n}") as client:
                    (answer,) = await client.submit([images[n]])
                    assert answer.error is None
            async with await EncoderClient.connect(server.endpoint, client_id="late") as client:
                before = server.service.held_upload_bytes
                grid = client.description.geometry.grid(302, 300)
                call = (await stub(client)).Submit(timeout=10)
                await call.write(pb.SubmitRequest(open=pb.Caller(client_id="late")))
                name = pb.ImageName(
                    index=1, digest=content_digest(images[2]), grid=pb.Grid(t=1, h=grid.h, w=grid.w)
                )
                await call.write(naming(name))
                state = (await call.read()).state
                assert (state.state, state.error.code) == (pb.STATE_FAILED, 8)
                assert state.error.retry_after_ms > 0
                assert server.service.held_upload_bytes == before
    finally:
        await server.drain()
