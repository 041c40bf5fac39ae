"""Replicas over a real Redis: one encode per image, rows from peers, and takeover of a dead replica's work."""

import asyncio
import socket
from dataclasses import replace
from typing import Any

import grpc
import numpy as np
import pytest

from encoder_contract.digest import content_digest
from encoder_contract.errors import Status, UnknownImageError
from encoder_contract.v1 import encoder_pb2 as pb
from encoder_contract.v1.encoder_pb2_grpc import EncoderServiceStub
from encoder_service.app import Server
from encoder_service.cluster.peers import SILENCE_S
from encoder_service.config import Config, ConfigError
from encoder_service.devices.model import Model
from encoder_service.metrics import scrape
from prefill_client import EncoderClient, RowRequest, read_images
from tests.calls import begin_submit, next_state
from tests.cluster_replica import (
    PATIENCE,
    PROMPTLY,
    Replica,
    Start,
    at_slow_peer,
    held_by,
    new_photo,
    through_peer,
)
from tests.index_replicas import grids
from tests.scripted_device import ScriptedDevice
from tests.waiting import PATIENCE_S, soon


async def test_images_are_fetched_through_any_replica_and_encoded_once(start: Start) -> None:
    a, b = await start(), await start()
    fetched = await through_peer(a, b, new_photo())
    assert (await b.fetch(fetched.digest)).source == "host"
    assert await a.encodes() + await b.encodes() == 1


async def test_bytes_of_an_image_that_a_peer_holds_are_not_requested(start: Start) -> None:
    a, b = await start(), await start()
    (known,) = await b.client.submit([await held_by(a, seen_by=b)])
    assert known.cached
    found = await asyncio.to_thread(scrape, b.server.watch.endpoint, PATIENCE_S)
    assert found.total("uploaded_bytes_total") == 0


async def test_an_image_sent_to_two_replicas_at_once_is_encoded_by_one(start: Start) -> None:
    a, b = await start(), await start()
    file = new_photo()
    with a.gate.closed():
        (first,) = await a.client.submit([file])
        (second,) = await b.client.submit([file])
        assert not second.cached
        waiting = asyncio.create_task(b.fetch(second.digest))
        await asyncio.sleep(0.3)
        assert not waiting.done(), "the other replica has the lease"
    assert (await waiting).source == "peer"
    assert (await a.fetch(first.digest)).error is None
    assert (await a.encodes(), await b.encodes()) == (1, 0)


async def test_another_replica_encodes_the_kept_images_of_a_killed_one(start: Start) -> None:
    a, b = await start(patience=PROMPTLY), await start()
    files = [new_photo() for _ in range(8)]
    async with await EncoderClient.connect([a.endpoint, b.endpoint]) as sender:
        with a.gate.closed(), b.gate.closed():
            kept = await sender.keep(files)
            await a.die()
        async with kept:
            # The caller of B knows only the digests.
            finished = [await b.fetch(image.digest, kept=True) for image in kept.answers]
    assert {(outcome.error, outcome.source) for outcome in finished} <= {(None, "encoded"), (None, "host")}
    assert await b.encodes() == len(files)


async def test_a_fetch_waits_beyond_its_grace_for_the_replica_that_encodes(start: Start) -> None:
    a, b = await start(), await start()
    with a.gate.closed():
        (image,) = await a.client.submit([new_photo()])
        fetching = asyncio.create_task(b.fetch(image.digest, grace_ms=0))
        await soon(lambda: image.address in b.cluster._waiters._waiters or fetching.done())
    assert (await fetching).source == "peer"
    assert (await a.encodes(), await b.encodes()) == (1, 0)


async def test_a_fetch_ends_as_unknown_when_the_replica_that_encodes_dies(start: Start) -> None:
    a, b = await start(patience=PROMPTLY), await start()
    with a.gate.closed():
        (image,) = await a.client.submit([new_photo()])
        fetching = asyncio.create_task(b.fetch(image.digest, grace_ms=500))
        await soon(lambda: image.address in b.cluster._waiters._waiters or fetching.done())
        await a.die()
        outcome = await asyncio.wait_for(fetching, 60)
    assert isinstance(outcome.error, UnknownImageError)


async def test_a_second_replica_encodes_uploaded_bytes_when_the_first_dies(start: Start) -> None:
    a, b = await start(patience=PROMPTLY), await start()
    file = new_photo()
    call = await _named_only(a, file)
    (image,) = await b.client.submit([file])
    assert image.error is None
    await a.die()
    assert (await b.fetch(image.digest)).source == "encoded"
    call.cancel()


async def test_a_caller_that_leaves_before_its_bytes_releases_the_lease(start: Start) -> None:
    a, b = await start(), await start()
    file = new_photo()
    call = await _named_only(a, file)
    (image,) = await b.client.submit([file])
    call.cancel()
    async with asyncio.timeout(PATIENCE_S):  # an unreleased lease would last five times as long
        assert (await b.fetch(image.digest)).source == "encoded"


async def test_a_stalled_uploader_delays_nobody_else(start: Start, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("encoder_service.images.UPLOAD_WAIT_S", 0.5)
    a, b = await start(), await start()
    file = new_photo()
    call = await _named_only(a, file)
    (image,) = await b.client.submit([file])
    assert (await b.fetch(image.digest)).source == "encoded"
    call.cancel()
    assert (await a.encodes(), await b.encodes()) == (0, 1)


async def test_a_stale_location_costs_one_try(start: Start) -> None:
    a, b = await start(), await start()
    file = new_photo()
    (image,) = read_images([file], b.client.description.geometry)
    address = b.server.model.facts.recipe.key(image.digest).address
    await a.index.publish(grids([address]))  # a stale location
    (submitted,) = await b.client.submit([file])
    assert submitted.cached
    await b.fetch_own(image.digest)
    assert not await b.index.locate([address]), "the location was retracted"


async def test_an_unreachable_peer_is_avoided_not_retracted(
    start: Start, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Only this timeout is that of production.
    monkeypatch.setattr("encoder_service.serving.SILENCE_S", SILENCE_S / PATIENCE)
    with socket.create_server(("127.0.0.1", 0)) as hole:  # accepts connections, never answers
        a = await start(advertise=f"127.0.0.1:{hole.getsockname()[1]}")
        b, c = await start(), await start()
        files = [new_photo() for _ in range(6)]
        images = await a.client.submit(files)
        assert [(await a.fetch(image.digest)).error for image in images] == [None] * 6
        await soon(lambda: c.locates(images[-1].digest))
        assert all(image.cached for image in await b.client.submit(files))
        async with asyncio.timeout(2 * PATIENCE_S):
            found = [await b.fetch_own(image.digest, n) for n, image in enumerate(images, 1)]
        # The image is now at two replicas: B must not retract A's location, as others may reach A.
        address = found[0].address

        async def still_there() -> bool:
            located = await c.index.locate([address])
            return a.server.replica_id in {location.replica_id for location in located.get(address, ())}

        await soon(still_there)


async def test_encoding_is_chosen_over_a_slow_peer(start: Start) -> None:
    a, b = await start(), await start()
    digest = await at_slow_peer(a, b, new_photo(), new_photo())
    async with asyncio.timeout(PATIENCE_S):
        assert (await b.fetch(digest)).source == "encoded"


async def test_stale_locations_do_not_make_replicas_call_each_other_in_a_loop(start: Start) -> None:
    a, b = await start(), await start()
    image = read_images([new_photo()], a.client.description.geometry)[0]
    address = a.server.model.facts.recipe.key(image.digest).address
    for replica in (a, b):
        await replica.index.publish(grids([address]))
    async with asyncio.timeout(PATIENCE_S):
        outcomes = await asyncio.gather(*(r.fetch(image.digest, grace_ms=500) for r in (a, b)))
    assert [type(outcome.error) for outcome in outcomes] == [UnknownImageError] * 2


async def test_a_client_fails_over_when_a_replica_dies(start: Start) -> None:
    replicas = [await start(patience=PROMPTLY), await start(), await start()]
    files = [new_photo(200, 200) for _ in range(12)]
    async with await EncoderClient.connect([replica.endpoint for replica in replicas]) as client:
        with replicas[0].gate.closed():
            images = await client.submit(files)
            assert [image.error for image in images] == [None] * len(files)
            await replicas[0].die()
            async with asyncio.timeout(PATIENCE_S):
                async with client.fetch(
                    [RowRequest(i.digest) for i in images], transports=["inline"]
                ) as stream:
                    outcomes = [outcome async for outcome in stream]
    assert [outcome.error for outcome in outcomes] == [None] * len(files)
    assert sorted(outcome.index for outcome in outcomes) == list(range(len(files)))
    assert sum([await replica.encodes() for replica in replicas[1:]]) <= len(files)


async def test_images_of_a_drained_replica_are_served_by_the_others(start: Start) -> None:
    a, b = await start(), await start()
    async with await EncoderClient.connect([a.endpoint, b.endpoint]) as client:
        images = await client.submit([new_photo(200, 200) for _ in range(8)])
        await a.server.drain()
        async with client.fetch(
            [RowRequest(i.digest) for i in images], transports=["inline"], timeout_s=60
        ) as stream:
            assert [outcome.error async for outcome in stream] == [None] * len(images)


async def test_a_drained_replica_hands_over_requested_images_with_hand_over_s(start: Start) -> None:
    a, b, c = await start(hand_over_s=PATIENCE_S), await start(), await start()
    images = await a.client.submit([new_photo(200, 200) for _ in range(4)])
    made = [await a.fetch(image.digest) for image in images]
    await soon(lambda: b.locates(images[-1].digest))
    await b.fetch(images[0].digest)  # which a peer holds already
    await soon(lambda: len(a.index.peers()) == 2)
    await a.server.drain()
    await soon(lambda: not any(r.index.peers()[1:] for r in (b, c)))  # they have seen that A left
    for image, before in zip(images, made, strict=True):
        after = await c.fetch(image.digest)
        assert after.source in ("host", "peer")
        assert np.array_equal(after.array, before.array)
    assert (await b.encodes(), await c.encodes()) == (0, 0)


async def test_another_processor_in_a_namespace_is_refused_with_fingerprints(
    start: Start, config: Config, model: Model
) -> None:
    a = await start()
    recipe = replace(model.recipe, processor=bytes(32))
    settings = replace(a.server._config, listen="127.0.0.1:0")
    device = ScriptedDevice(settings, replace(model, recipe=recipe))
    other = Server(settings, [device], model.decoder.files)
    with pytest.raises(ConfigError, match=r"another model or processor") as refusal:
        await other.start()
    for processor in (model.recipe.processor, recipe.processor):
        assert processor[:8].hex() in str(refusal.value)


async def _named_only(replica: Replica, file: bytes) -> Any:
    """Name an image to a replica and send no bytes; cancel the returned call to leave."""
    call = await begin_submit(replica.client, pb.ImageName(digest=content_digest(file)))
    assert (await next_state(call)).state == pb.STATE_NEEDS_BYTES
    return call


async def test_many_waiting_fetches_cost_the_index_few_calls(start: Start) -> None:
    a, b = await start(), await start()
    await soon(lambda: bool(a.index.peers()))
    before = await _index_calls(a)
    images = [pb.FetchImage(index=n, digest=n.to_bytes(32, "big")) for n in range(200)]
    async with grpc.aio.insecure_channel(a.server.endpoint) as channel:
        call = EncoderServiceStub(channel).Fetch(pb.FetchRequest(images=images, grace_ms=1500))
        outcomes = [error.code async for message in call for error in message.errors]
    assert outcomes == [Status.NOT_FOUND.value] * 200
    # One for the Fetch and one for each lookup of all images; one lookup per image would need a thousand calls.
    assert 0 < await _index_calls(a) - before < 50
    assert await b.encodes() == 0


async def _index_calls(replica: Replica) -> float:
    found = await asyncio.to_thread(scrape, replica.server.watch.endpoint, PATIENCE_S)
    return sum(found.total("index_call_seconds_count", call=name) for name in ("locate", "find", "wait"))
