"""Redis's clock set forward or back: the tests write the resulting deadlines, as they cannot set the clock."""

from encoder_service.cluster.cluster import IndexState
from encoder_service.cluster.redis.schema import Keys
from testing.redis_servers import redis_server
from tests.index_replicas import SHORT_TTL_MS, JoinWatched, new_addresses
from tests.waiting import soon

REPLICAS, DEADLINES, _ = Keys("faults").membership
HOUR_MS = 3_600_000


async def test_dead_replicas_expire_when_the_clock_is_set_back(join_watched: JoinWatched) -> None:
    with redis_server() as server:
        a, dead = [await join_watched(server.url, name, ttl_ms=SHORT_TTL_MS) for name in ("a", "dead")]
        await soon(lambda: [peer.replica_id for peer in a.index.peers()] == ["dead"])
        with server.client() as client:
            await dead.index.close()
            client.zincrby(DEADLINES, HOUR_MS, "dead")
        await soon(lambda: a.index.peers() == ())
        assert a.index.state is IndexState.JOINED


async def test_a_fleet_recovers_when_redis_sets_its_clock_forward(join_watched: JoinWatched) -> None:
    with redis_server() as server:
        a, b = await join_watched(server.url, "a"), await join_watched(server.url, "b")
        held, leased = new_addresses(4), new_addresses(4)
        await a.hold(held)
        assert (await a.cluster.acquire(leased)).granted == set(leased)
        with server.client() as client:
            for name in client.hkeys(REPLICAS):
                client.zadd(DEADLINES, {name: 1})
            for address in held + leased:  # their times to live use the same clock of Redis
                client.delete(Keys("faults").location(address), Keys("faults").lease(address))

        async def whole() -> bool:
            seen = [peer.replica_id for each in (a, b) for peer in each.index.peers()]
            located = await b.index.locate(held)
            return sorted(seen) == ["a", "b"] and set(located) == set(held)

        await soon(whole)

        async def leases_are_back() -> bool:
            with server.client() as client:
                return all(client.exists(Keys("faults").lease(address)) for address in leased)

        await soon(leases_are_back)
        assert {each.index.state for each in (a, b)} == {IndexState.JOINED}
