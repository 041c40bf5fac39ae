"""A client and a real server: submit, fetch, and what a call holds while it runs."""

import asyncio
from typing import Any

import numpy as np
import pytest
import torch

from encoder_contract.digest import content_digest
from encoder_contract.errors import UnknownImageError
from encoder_contract.v1 import encoder_pb2 as pb
from encoder_service.app import Server
from encoder_service.devices.model import Model
from prefill_client import EncoderClient, RowRequest
from testing.decoding import decode_files
from testing.photos import photo
from testing.tcp_proxy import TcpProxy
from tests.calls import begin_submit, collect, naming, next_state, stub
from tests.gate import Gate
from tests.waiting import PATIENCE_S, soon

TRANSPORTS = ["shm", "inline"]  # of a server without a rows port
SIZES = [(320, 200), (64, 64), (200, 331), (97, 640)]


def expected_rows(model: Model, image: bytes) -> torch.Tensor:
    """The rows as the rooms make them, called directly."""
    (pixels,) = decode_files(model.decoder, [image])
    assert isinstance(pixels, torch.Tensor)
    grid = model.tower.geometry.grid(pixels.shape[1], pixels.shape[0])
    (patches,) = model.tower.inputs([pixels], [grid])
    return model.tower.encode([patches], [grid])[0]


async def test_describe_tells_model_geometry_and_limits(client: EncoderClient, model: Model) -> None:
    description = client.description
    assert description.model_type == "qwen3_vl"
    assert description.model_fingerprint == model.recipe.model
    assert description.geometry == model.tower.geometry
    assert (description.width, description.hidden) == (model.tower.width, model.tower.hidden)
    assert description.max_image_bytes == 32 << 20


@pytest.mark.parametrize("transport", TRANSPORTS)
async def test_fetched_rows_are_those_of_the_tower(
    client: EncoderClient, model: Model, transport: str
) -> None:
    images = [photo(width, height, seed) for seed, (width, height) in enumerate(SIZES)]
    images += [photo(180, 120, 9, orientation=orientation) for orientation in (3, 6, 8)]
    submitted = await client.submit(images)
    assert [s.error for s in submitted] == [None] * len(images)
    requests = [RowRequest(s.digest) for s in submitted]
    async with client.fetch(requests, transports=[transport], timeout_s=PATIENCE_S) as stream:
        seen = 0
        async for rows in stream:
            seen += 1
            assert rows.transport == transport
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
    whole = (await collect(client, [RowRequest(image.digest)], transports=["inline"]))[0].array
    windows = [(0, 1), (3, 17), (image.tokens - 1, image.tokens), (5, 0)]
    outcomes = await collect(
        client, [RowRequest(image.digest, a, b) for a, b in windows], transports=["inline"]
    )
    for index, (begin, end) in enumerate(windows):
        assert np.array_equal(outcomes[index].array, whole[begin : end or None])


@pytest.mark.parametrize("transport", TRANSPORTS)
async def test_an_image_named_many_times_in_a_call_is_pinned_once(
    server: Server, client: EncoderClient, gate: Gate, transport: str
) -> None:
    with gate.closed():
        (image,) = await client.submit([photo(320, 240, 40 + TRANSPORTS.index(transport))])
        named = [RowRequest(image.digest, row, row + 1) for row in range(image.tokens)]
        waiting = asyncio.create_task(collect(client, named, transports=[transport]))
        await soon(
            lambda: any(
                jobs for (_, demanded), jobs in server.jobs.scheduler.snapshot().images.items() if demanded
            )
        )
        assert server.jobs.scheduler.snapshot().claims == 2, "that of the Submit, and one of the Fetch"
    assert [outcome.error for outcome in (await waiting).values()] == [None] * len(named)
    [before] = server.store.stats().tiers
    outcomes = await collect(client, named, transports=[transport])
    [after] = server.store.stats().tiers
    assert after.hits - before.hits == 1
    whole = (await collect(client, [RowRequest(image.digest)]))[0].array
    assert np.array_equal(np.concatenate([outcomes[row].array for row in range(image.tokens)]), whole)


async def test_fetch_waits_for_an_image_that_is_submitted_later(client: EncoderClient) -> None:
    image = photo(96, 96, 5)
    fetching = asyncio.create_task(collect(client, [RowRequest(content_digest(image))], grace_ms=20_000))
    await asyncio.sleep(0.2)
    assert not fetching.done()
    await client.submit([image])
    assert (await fetching)[0].error is None


async def test_a_fetch_of_an_unsubmitted_image_is_not_found_after_its_grace(client: EncoderClient) -> None:
    (known,) = await client.submit([photo(64, 64, 6)])
    outcomes = await collect(client, [RowRequest(bytes(32)), RowRequest(known.digest)], grace_ms=100)
    assert isinstance(outcomes[0].error, UnknownImageError)
    assert outcomes[1].error is None


async def test_clients_that_leave_in_the_middle_leave_nothing_behind(
    client: EncoderClient, server: Server, gate: Gate
) -> None:
    images = [photo(300 + n, 300, n) for n in range(12)]
    with gate.closed():
        call = await begin_submit(client)
        for index, image in enumerate(images):
            await call.write(naming(pb.ImageName(index=index, digest=content_digest(image))))
            assert (await next_state(call)).state == pb.STATE_NEEDS_BYTES
            whole = index % 2 == 0
            piece = pb.ImageBytes(index=index, data=image if whole else image[:5000], last=whole)
            await call.write(pb.SubmitRequest(bytes=[piece]))
            if whole:
                assert (await next_state(call)).state == pb.STATE_QUEUED
        fetches = [
            client.fetch([RowRequest(content_digest(image))], timeout_s=PATIENCE_S) for image in images
        ]
        reading = [asyncio.create_task(anext(aiter(fetch))) for fetch in fetches]
        await asyncio.sleep(0.2)
        assert len(server.jobs) == 6
        call.cancel()
        for fetch in fetches:
            fetch.close()
        await asyncio.gather(*reading, return_exceptions=True)
        await soon(lambda: not server.jobs)
    await soon(lambda: server.budgets.upload_bytes.held == 0)
    assert server.store.stats().pins == 0


async def test_shared_rows_are_pinned_while_a_stream_is_open(client: EncoderClient, server: Server) -> None:
    (image,) = await client.submit([photo(128, 128, 20)])
    async with client.fetch([RowRequest(image.digest)], timeout_s=PATIENCE_S) as stream:
        async for _ in stream:
            pass
        assert server.store.stats().pins == 1
        assert not server.store.evict(image.address)
    await soon(lambda: server.store.stats().pins == 0)
    assert server.store.evict(image.address)


async def test_a_caller_whose_machine_falls_silent_holds_no_pins_for_long(server: Server) -> None:
    proxy = await TcpProxy(int(server.endpoint.rpartition(":")[2])).start()
    async with await EncoderClient.connect(f"127.0.0.1:{proxy.port}") as far:
        (image,) = await far.submit([photo(128, 128, 21)])
        async with far.fetch([RowRequest(image.digest)], timeout_s=600) as stream:
            await anext(aiter(stream))
            assert server.store.stats().pins == 1
            proxy.fall_silent()
            await soon(lambda: server.store.stats().pins == 0)  # without keepalives it would be two hours
    await proxy.stop()


async def test_only_callers_that_read_the_segment_get_handles(client: EncoderClient, server: Server) -> None:
    (image,) = await client.submit([photo(128, 128, 30)])
    proof = server.store.segment.segment_id
    for shown, has_handle in ((proof, True), (bytes(16), False), (proof[:-1], False), (b"", False)):
        request = pb.FetchRequest(
            images=[pb.FetchImage(digest=image.digest)],
            transports=[pb.TRANSPORT_SHM, pb.TRANSPORT_INLINE],
            grace_ms=30_000,
            shm_proof=shown,
        )
        call = (await stub(client)).Fetch(request, timeout=PATIENCE_S)
        assert (await call.read()).ready[0].HasField("handle") == has_handle, shown
        assert has_handle or (await call.read()).rows.data, shown
        call.cancel()


async def test_an_evicted_image_is_made_again_without_its_sender_and_bit_for_bit(
    client: EncoderClient, server: Server
) -> None:
    (image,) = await client.submit([photo(200, 150, 21)])
    first = (await collect(client, [RowRequest(image.digest)], transports=["inline"]))[0]
    await soon(lambda: server.store.stats().pins == 0)
    assert server.store.evict(image.address)
    second = (await collect(client, [RowRequest(image.digest)], transports=["inline"]))[0]
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


async def test_health_answers_while_the_server_works(client: EncoderClient, server: Server) -> None:
    import grpc
    from grpc_health.v1 import health_pb2, health_pb2_grpc

    images = [photo(500 + n, 400, n) for n in range(8)]
    submitted = await client.submit(images)
    fetching = asyncio.create_task(collect(client, [RowRequest(s.digest) for s in submitted]))
    async with grpc.aio.insecure_channel(server.endpoint) as channel:
        health: Any = health_pb2_grpc.HealthStub(channel)
        while not fetching.done():
            answer = await health.Check(health_pb2.HealthCheckRequest(), timeout=PATIENCE_S)
            assert answer.status == health_pb2.HealthCheckResponse.SERVING
            await asyncio.sleep(0.02)
    assert all(outcome.error is None for outcome in (await fetching).values())
