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
from encoder_service.devices.job_queue import Job
from encoder_service.devices.model import Model
from encoder_service.limits import Caller
from prefill_client import EncoderClient
from testing.photos import photo
from tests.calls import collect, stub, submitted
from tests.servers import client_elsewhere, server_and_client, server_of
from tests.waiting import PATIENCE_S, soon

MIB = 1 << 20
GRACE_MS = 600_000  # longer than a test
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


async def test_an_unread_fetch_pins_two_images_and_delays_no_other_call(small: Server) -> None:
    async with await EncoderClient.connect(small.endpoint) as client, client_elsewhere(small) as other:
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
        assert [error.message for message in messages for error in message.errors] == []
        ready = [ready.index for message in messages for ready in message.ready]
        assert sorted(ready) == list(range(8))


async def test_one_host_that_holds_all_it_can_leaves_room_for_others(small: Server) -> None:
    async with await EncoderClient.connect(small.endpoint) as greedy, client_elsewhere(small) as other:
        requests = await submitted(greedy, PHOTOS[:8])
        held: list[int] = []
        transports: set[str] = set()

        async def hold_all() -> None:
            async with greedy.fetch(requests, timeout_s=PATIENCE_S) as stream:
                async for outcome in stream:
                    assert outcome.error is None
                    held.append(outcome.index)
                    transports.add(outcome.transport)
                await asyncio.Event().wait()

        holding = asyncio.create_task(hold_all())
        await soon(lambda: bool(held) and small.budgets.pinned_bytes.held > 0)
        for image in PHOTOS[8:]:
            outcomes = await collect(other, await submitted(other, [image]))
            assert outcomes[0].error is None
            pinned, size = host_bytes(small)
            assert 0 < pinned <= 0.9 * size
        await soon(lambda: len(held) == len(requests))
        holding.cancel()
        await asyncio.gather(holding, return_exceptions=True)
        assert transports == {"shm", "inline"}, "rows beyond its share are sent"
        await soon(lambda: host_bytes(small)[0] == 0)


async def test_a_fetch_that_holds_rows_keeps_no_image_file(server: Server, client: EncoderClient) -> None:
    requests = await submitted(client, PHOTOS[:2])
    async with client.fetch(requests, timeout_s=PATIENCE_S) as stream:
        async for outcome in stream:
            assert outcome.error is None
        gc.collect()
        assert not [thing for thing in gc.get_objects() if type(thing) is Job]


@pytest.mark.attack("a caller that fetches and does not read")
async def test_a_call_that_is_not_read_ends_and_releases_its_pins(config: Config, model: Model) -> None:
    async with server_and_client(config, model, drain_s=1) as (server, client):
        requests = await submitted(client, PHOTOS[:8])
        server._listener._gate._reader_idle_s = 2.0  # not before: the other calls read, however slowly
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


async def test_a_fetch_over_the_callers_share_is_refused_as_a_whole(config: Config, model: Model) -> None:
    async with (
        server_and_client(
            config, model, limits={"max_grace_ms": GRACE_MS}, max_queued_images=64, drain_s=1
        ) as (server, client),
        client_elsewhere(server) as other,
    ):
        images = [pb.FetchImage(index=n, digest=content_digest(n.to_bytes(2, "big"))) for n in range(128)]
        request, service = pb.FetchRequest(images=images, grace_ms=GRACE_MS), await stub(client)
        # Half of 16 claims for each of 64 images, four of which count as a message.
        waiting = service.Fetch(request)
        await soon(lambda: server.budgets.fetched_messages.held == 128)
        with pytest.raises(grpc.aio.AioRpcError) as refusal:
            await service.Fetch(request).read()
        assert refusal.value.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
        assert "share of messages of Fetch calls" in str(refusal.value.details())
        outcomes = await collect(other, await submitted(other, PHOTOS[:2]), transports=("inline",))
        assert [outcomes[n].error for n in range(2)] == [None] * 2
        assert not waiting.done()


async def test_fetches_that_hold_rows_never_wait_for_each_others_rows(small: Server) -> None:
    """Together they want four times what the store holds. Each gets all its rows, those without a place inline."""
    wanted = [PHOTOS[n : n + 8] for n in range(4)]
    transports: set[str] = set()
    everybody_has_rows = asyncio.Barrier(len(wanted))

    async def fetch(client: EncoderClient, images: list[bytes]) -> int:
        requests = await submitted(client, images)
        got = 0
        async with client.fetch(requests, timeout_s=PATIENCE_S) as stream:
            async for outcome in stream:
                assert outcome.error is None, outcome.error
                transports.add(outcome.transport)
                got += 1
            await everybody_has_rows.wait()  # all calls are open, with what they hold
        return got

    clients = [await EncoderClient.connect(small.endpoint) for _ in wanted]
    try:
        assert await asyncio.gather(*map(fetch, clients, wanted)) == [8] * 4
    finally:
        for client in clients:
            await client.close()
    assert transports == {"shm", "inline"}
    await soon(lambda: small.store.stats().pins == 0)
    assert small.budgets.pinned_bytes.held == small.budgets.lent_bytes.held == 0


async def test_rows_that_are_read_in_place_leave_room_for_rows_that_are_sent(small: Server) -> None:
    size = small.budgets.pinned_bytes.size
    assert small.budgets.lent_bytes.size < size
    caller = Caller("host", "host")
    with small.budgets.lent_bytes.hold(caller, small.budgets.lent_bytes.size):
        assert small.budgets.pinned_bytes.held == small.budgets.lent_bytes.size
        with small.budgets.pinned_bytes.hold(caller, size - small.budgets.lent_bytes.size):
            assert small.budgets.pinned_bytes.held == size
    assert small.budgets.pinned_bytes.held == 0


async def test_a_caller_that_takes_rows_only_in_place_is_refused_beyond_its_share(small: Server) -> None:
    async with await EncoderClient.connect(small.endpoint) as client:
        requests = await submitted(client, PHOTOS[:8])
        names = [pb.FetchImage(index=n, digest=each.digest) for n, each in enumerate(requests)]
        fetch = pb.FetchRequest(
            images=names, transports=[pb.TRANSPORT_SHM], shm_proof=small.store.segment.segment_id
        )
        call = (await stub(client)).Fetch(fetch)
        ready, errors = 0, []
        while ready + len(errors) < 8:
            message = await call.read()
            ready += len(message.ready)
            errors += message.errors
        assert 0 < ready < 8
        assert {error.code for error in errors} == {grpc.StatusCode.RESOURCE_EXHAUSTED.value[0]}
        await soon(lambda: small.budgets.fetched_messages.held == 0)  # it is owed no message any more
        call.cancel()
