"""Slow readers and readers that hold rows: their pins are bounded, and other callers are served."""

import asyncio
import gc
from collections.abc import AsyncIterator

import grpc
import pytest

from encoder_contract.digest import content_digest
from encoder_contract.v1 import encoder_pb2 as pb
from encoder_service.api.fetch import PINNED_AHEAD
from encoder_service.app import Server
from encoder_service.config import Config
from encoder_service.engine.job_queue import Job
from encoder_service.engine.model import Model
from prefill_client import EncoderClient, RowRequest
from testing.photos import photo
from tests.calls import collect, stub
from tests.servers import server_of
from tests.waiting import soon

MIB = 1 << 20
PHOTOS = [photo(1024, 800, n) for n in range(12)]


@pytest.fixture
async def small(config: Config, model: Model) -> AsyncIterator[Server]:
    """A server whose store holds a few of the photos. It never ends a call because its reader is idle."""
    limits = {"reader_idle_s": 3600.0}
    async with server_of(config, model, store_host_gib=6 / 1024, limits=limits, drain_s=1) as server:
        yield server


def host_bytes(server: Server) -> tuple[int, int]:
    """Return how many bytes are pinned, and of how many."""
    (tier,) = server.store.stats().tiers
    return tier.pinned_bytes, tier.size_bytes


async def submitted(client: EncoderClient, images: list[bytes]) -> list[RowRequest]:
    for image in await client.submit(images):
        assert image.error is None
    return [RowRequest(content_digest(image)) for image in images]


async def test_an_unread_fetch_pins_two_images_and_delays_no_other_call(small: Server) -> None:
    async with (
        await EncoderClient.connect(small.endpoint) as client,
        await EncoderClient.connect(small.endpoint, client_id="other") as other,
    ):
        await submitted(client, PHOTOS[:8])
        names = [pb.FetchImage(index=n, digest=content_digest(image)) for n, image in enumerate(PHOTOS[:8])]
        unread = (await stub(client)).Fetch(pb.FetchRequest(images=names))
        await soon(lambda: small.store.stats().misses > 0 and not small.jobs)
        await soon(lambda: small.store.stats().pins == PINNED_AHEAD)
        outcomes = await collect(other, await submitted(other, PHOTOS[8:]), transports=["inline"])
        assert [outcomes[n].error for n in range(4)] == [None] * 4
        await soon(lambda: small.store.stats().pins <= PINNED_AHEAD)
        # If the caller reads later, it gets every image, also those that were evicted while they waited.
        messages = [message async for message in unread]
        ready = [ready.index for message in messages for ready in message.ready]
        assert sorted(ready) == list(range(8))


async def test_one_client_that_holds_all_it_can_leaves_room_for_others(small: Server) -> None:
    async with (
        await EncoderClient.connect(small.endpoint, client_id="greedy") as greedy,
        await EncoderClient.connect(small.endpoint, client_id="other") as other,
    ):
        requests = await submitted(greedy, PHOTOS[:8])
        held: list[int] = []

        async def hold_all() -> None:
            async with greedy.fetch(requests, timeout_s=60) as stream:
                async for outcome in stream:
                    assert outcome.error is None
                    held.append(outcome.index)

        holding = asyncio.create_task(hold_all())
        await soon(lambda: bool(held) and small.budgets.pinned_bytes.held > 0)
        for image in PHOTOS[8:]:
            outcomes = await collect(other, await submitted(other, [image]))
            assert outcomes[0].error is None
            pinned, size = host_bytes(small)
            assert 0 < pinned <= 0.9 * size
        holding.cancel()
        await asyncio.gather(holding, return_exceptions=True)
        assert 0 < len(held) < len(requests)
        await soon(lambda: host_bytes(small)[0] == 0)


async def test_a_fetch_that_holds_rows_keeps_no_image_file(server: Server, client: EncoderClient) -> None:
    requests = await submitted(client, PHOTOS[:2])
    async with client.fetch(requests, timeout_s=30) as stream:
        async for outcome in stream:
            assert outcome.error is None
        gc.collect()
        assert not [thing for thing in gc.get_objects() if type(thing) is Job]


async def test_a_call_that_is_not_read_ends_and_releases_its_pins(config: Config, model: Model) -> None:
    async with (
        server_of(config, model, limits={"reader_idle_s": 0.5}, drain_s=1) as server,
        await EncoderClient.connect(server.endpoint) as client,
    ):
        requests = await submitted(client, PHOTOS[:8])
        # 100 MB: more than gRPC buffers for an unread call, with any window size.
        names = [pb.FetchImage(index=n, digest=requests[n % 8].digest) for n in range(128)]
        unread = (await stub(client)).Fetch(pb.FetchRequest(images=names))
        await soon(lambda: server.budgets.pinned_bytes.held > 0)
        await soon(lambda: server.budgets.pinned_bytes.held == 0)
        assert server.store.stats().pins == 0
        with pytest.raises(grpc.aio.AioRpcError) as ended:
            async for _ in unread:
                pass
        assert ended.value.code() is grpc.StatusCode.DEADLINE_EXCEEDED


async def test_a_fetch_over_the_clients_share_is_refused_as_a_whole(config: Config, model: Model) -> None:
    async with (
        server_of(config, model, max_queued_images=16, drain_s=1) as server,
        await EncoderClient.connect(server.endpoint) as client,
        await EncoderClient.connect(server.endpoint, client_id="other") as other,
    ):
        digests = [content_digest(n.to_bytes(2, "big")) for n in range(128)]
        request = pb.FetchRequest(
            images=[pb.FetchImage(index=n, digest=digest) for n, digest in enumerate(digests)],
            grace_ms=120_000,  # longer than the test
        )
        service = await stub(client)
        waiting = service.Fetch(request)  # half of 16 claims for each of 16 images
        await soon(lambda: server.budgets.fetched_images.held == 128)
        with pytest.raises(grpc.aio.AioRpcError) as refusal:
            await service.Fetch(request).read()
        assert refusal.value.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
        assert "share of images in Fetch calls" in str(refusal.value.details())
        outcomes = await collect(other, await submitted(other, PHOTOS[:2]), transports=("inline",))
        assert [outcomes[n].error for n in range(2)] == [None] * 2
        assert not waiting.done()
