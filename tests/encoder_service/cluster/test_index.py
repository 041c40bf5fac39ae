"""Locations and sources: the contract of the index, over Redis and over Redis Cluster."""

import pytest

from encoder_contract.errors import InvalidRequestError, ModelMismatchError
from encoder_contract.geometry import Grid
from encoder_service.cluster.cluster import Acquired, IndexState, Location, Replica
from testing.holding import cluster_of
from tests.index_replicas import (
    MODEL,
    PROCESSOR,
    Join,
    grids,
    joined,
    new_addresses,
    numbers,
    publish,
    redis_settings,
)
from tests.waiting import soon


async def test_a_publication_is_located_by_all_other_replicas(join: Join) -> None:
    a, b, c = await join("a"), await join("b"), await join("c")
    held, other = new_addresses(40), new_addresses(1)
    of = {address: Grid(1, 2 * n, 70_000) for n, address in enumerate(held)}
    await publish(a, of)
    expected = {address: (Location("a", "a.example:50051", of[address]),) for address in held}
    assert await b.index.locate(held + other) == expected
    assert await c.index.locate(held + held) == expected
    assert await a.index.locate(held) == {}


async def test_publishing_again_changes_nothing_and_retracting_ends_it(join: Join) -> None:
    a, b, c = await join("a"), await join("b"), await join("c")
    (address,) = new_addresses(1)
    await publish(a, grids([address]))
    await publish(b, grids([address]))
    await publish(a, grids([address]))
    assert sorted(place.replica_id for place in (await c.index.locate([address]))[address]) == ["a", "b"]
    await a.index.retract([address])
    assert [place.replica_id for place in (await c.index.locate([address]))[address]] == ["b"]
    await b.index.retract([address])
    assert await c.index.locate([address]) == {}


async def test_any_replica_can_retract_a_stale_location(join: Join) -> None:
    a, b = await join("a"), await join("b")
    (address,) = new_addresses(1)
    await publish(a, grids([address]))
    assert address in await b.index.locate([address])
    await b.index.retract([address], replica_id="a")
    assert await b.index.locate([address]) == {}
    await b.index.retract([address], replica_id="nobody")


async def test_publications_of_an_earlier_start_are_ignored(join: Join) -> None:
    a, b = await join("a", epoch=1), await join("b")
    addresses = new_addresses(2)
    await publish(a, grids(addresses))
    assert set(await b.index.locate(addresses)) == set(addresses)
    await a.close()
    await join("a", epoch=2)
    await soon(lambda: [peer.epoch for peer in b.index.peers()] == [2])
    assert await b.index.locate(addresses) == {}


async def test_replicas_see_each_other_until_one_leaves(join: Join) -> None:
    a, b = await join("a"), await join("b")
    for one, other in ((a, "b"), (b, "a")):
        await soon(lambda one=one, other=other: [p.replica_id for p in one.index.peers()] == [other])
    assert a.index.peers()[0].endpoint == "b.example:50051"
    held, working = new_addresses(2)
    await publish(b, grids([held]))
    await b.acquire([working])
    await b.leave()  # seen at once, whereas a death takes a minute
    assert b.index.state is IndexState.LEFT
    await soon(lambda: a.index.peers() == ())
    assert await a.index.locate([held]) == {}
    assert (await a.acquire([working])).granted == {working}


async def test_the_index_acts_as_empty_for_a_replica_that_left(join: Join) -> None:
    a, b = await join("a"), await join("b")
    addresses = new_addresses(2)
    await publish(a, grids(addresses))
    await b.leave()
    assert await b.index.locate(addresses) == {}
    assert (await b.acquire(addresses)).granted == frozenset(addresses)
    assert await b.wait_published(addresses[0], 5.0) == ()
    assert await b.index.find(addresses) == {}
    await publish(b, grids(addresses))
    assert [place.replica_id for place in (await a.acquire(addresses)).located.get(addresses[0], ())] == []


@pytest.mark.parametrize("other", [{"model": b"x" * 32}, {"processor": b"x" * 32}])
async def test_a_replica_with_another_model_is_refused(join: Join, other: dict[str, bytes]) -> None:
    a = await join("a")
    with pytest.raises(ModelMismatchError, match=r"a serves|b serves"):
        await join("b", **other)
    assert a.index.state is IndexState.JOINED
    assert a.index.peers() == ()


async def test_an_address_is_found_while_a_live_peer_encodes_it(join: Join) -> None:
    a, b = await join("a"), await join("b")
    held, encoded, ours, unknown = new_addresses(4)
    await publish(a, grids([held]))
    await a.acquire([encoded])
    await b.acquire([ours])
    found = await b.index.find([held, encoded, ours, unknown])
    assert {address: [at.replica_id for at in locations] for address, locations in found.items()} == {
        held: ["a"],
        encoded: [],
    }
    await a.index.release([encoded])
    assert await b.index.find([encoded]) == {}


async def test_an_empty_batch_has_an_empty_answer(join: Join) -> None:
    a = await join("a")
    assert await a.index.locate([]) == {}
    assert await a.acquire([]) == Acquired(frozenset(), {})
    assert await a.index.renew([]) == frozenset()


async def test_an_empty_batch_makes_no_call(redis_url: str) -> None:
    calls: list[str] = []
    settings = redis_settings(redis_url, f"empty{next(numbers)}")
    cluster = cluster_of(settings, on_call=lambda name, *_: calls.append(name))
    all_calls = {"locate", "acquire", "publish", "renew", "retract", "release"}
    async with joined(cluster) as [replica]:
        index = replica.index
        for addresses, called in (([], set()), (new_addresses(1), all_calls)):
            await index.locate(addresses)
            await index.acquire(addresses)
            await index.renew(addresses)
            await index.release(addresses)
            await index.publish(grids(addresses))
            await index.retract(addresses)
            assert set(calls) - {"beat"} == called


async def test_a_batch_larger_than_a_script_takes_is_split(join: Join) -> None:
    a, b = await join("a"), await join("b")
    addresses = new_addresses(700)
    assert len((await a.acquire(addresses)).granted) == 700
    await publish(a, grids(addresses))
    assert len(await b.index.locate(addresses)) == 700


def test_an_invalid_replica_description_is_refused() -> None:
    with pytest.raises(InvalidRequestError):
        Replica("a", 1, "two words", MODEL, PROCESSOR)


async def test_a_single_server_url_to_a_cluster_node_says_so_and_stays_alone(cluster_url: str) -> None:
    node = "redis://" + cluster_url.removeprefix("redis+cluster://").split(",")[0]
    async with joined(cluster_of(redis_settings(node, "wrong"))) as [replica]:
        # The replica list may be on this very node; the addresses of a batch are not all on it.
        answer = await replica.acquire(new_addresses(32))
        assert len(answer.granted) == 32
        assert replica.index.state is IndexState.ALONE
