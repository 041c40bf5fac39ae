"""Rows at a peer that cannot be fetched at once: the fallbacks, and their cost."""

import asyncio
from collections.abc import Collection, Sequence
from typing import Any

import pytest

from encoder_contract.digest import content_digest
from encoder_contract.errors import UnavailableError
from encoder_service.cluster import peers
from encoder_service.cluster.cluster import Acquired
from encoder_service.images import LEASE_WAIT_S
from tests.cluster_replica import Start, at_slow_peer, held_by, new_photo
from tests.index_replicas import grids
from tests.waiting import PATIENCE_S, soon


async def fails(*_: object) -> None:
    raise UnavailableError("the peer has no room for this reader")


async def test_waiting_beside_a_failed_peer_asks_seldom(
    start: Start, monkeypatch: pytest.MonkeyPatch
) -> None:
    ours, holder, encoder = [await start() for _ in range(3)]
    file, calls, acquire = new_photo(), 0, ours.index.acquire

    async def counted(addresses: Sequence[bytes], without: Collection[str] = ()) -> Acquired:
        nonlocal calls
        calls += 1
        return await acquire(addresses, without)

    digest = content_digest(file)
    address = ours.address(digest)
    assert (await encoder.index.acquire([address])).granted == {address}
    await ours.client.submit([file])
    await holder.index.publish(grids([address]))
    monkeypatch.setattr(ours.index, "acquire", counted)
    monkeypatch.setattr(ours.cluster._peers, "fetch", fails)
    began = asyncio.get_running_loop().time()
    fetching = asyncio.create_task(ours.fetch(digest))
    await soon(lambda: calls > 0)
    await asyncio.sleep(2 * LEASE_WAIT_S)
    assert not fetching.done()
    assert calls <= 3 + (asyncio.get_running_loop().time() - began) / LEASE_WAIT_S
    await encoder.index.release([address])
    assert (await asyncio.wait_for(fetching, PATIENCE_S)).source == "encoded"


async def test_a_full_queue_refuses_no_image_that_a_peer_holds(start: Start) -> None:
    a, b = await start(), await start(max_queued_images=1)
    digest = await at_slow_peer(a, b, new_photo(), new_photo())
    with b.gate.closed():
        await b.client.submit([new_photo()])
        assert (await b.fetch(digest)).source == "peer"


async def test_a_connection_closed_during_a_transfer_ends_no_waiting_call(
    start: Start, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Happens when the certificates change, or when a 257th peer needs the channel."""
    a, b = await start(), await start()
    digest = content_digest(await held_by(a, seen_by=b))
    monkeypatch.setattr(peers, "CLOSE_S", 0.0)
    reading, receive = asyncio.Event(), b.cluster._peers._receive

    async def held(endpoint: str, call: Any, *image: Any) -> Any:
        reading.set()
        await soon(call.done)  # the closed channel cancels it
        return await receive(endpoint, call, *image)

    monkeypatch.setattr(b.cluster._peers, "_receive", held)
    fetching = asyncio.create_task(b.fetch(digest, grace_ms=30_000))
    await asyncio.wait_for(reading.wait(), PATIENCE_S)
    monkeypatch.setattr(b.cluster._peers, "_receive", receive)
    b.cluster._peers._channels.popitem()
    outcome = await asyncio.wait_for(fetching, PATIENCE_S)
    assert (outcome.error, outcome.source) == (None, "peer"), "in the second attempt"
