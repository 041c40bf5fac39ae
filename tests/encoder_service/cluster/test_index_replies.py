"""A Redis that answers, but is empty, too slow, or sends invalid replies."""

import asyncio

import pytest

from encoder_service.cluster.cluster import IndexState
from encoder_service.cluster.redis.schema import Keys
from encoder_service.cluster.redis.session import FAILURES_TO_OPEN
from testing.redis_servers import RedisServer
from testing.tcp_proxy import TcpProxy
from tests.index_replicas import CALL_TIMEOUT_S, NAMESPACE, JoinWatched, new_addresses
from tests.waiting import PATIENCE_S, soon


async def test_replicas_publish_again_after_a_flush(redis: RedisServer, join_watched: JoinWatched) -> None:
    a, b = [await join_watched(redis.url, name) for name in "ab"]
    held, working = new_addresses(150), new_addresses(2)
    await a.hold(held)
    await a.cluster.acquire(working)
    with redis.client() as admin:
        admin.flushall()

        async def published_again() -> bool:
            leased = all(admin.exists(Keys(NAMESPACE).lease(address)) for address in working)
            return leased and len(await b.index.locate(held)) == len(held)

        await soon(published_again)
    for replica in (a, b):
        assert [state for state, _ in replica.state_changes] == [IndexState.JOINED]
        await soon(lambda replica=replica: len(replica.index.peers()) == 1)


async def test_a_slow_redis_costs_three_timeouts_and_is_rejoined_when_fast(
    redis: RedisServer, join_watched: JoinWatched
) -> None:
    # Heartbeats and probes always succeed: their timeout is longer.
    proxy = await TcpProxy(redis.port).start()
    url = f"redis://127.0.0.1:{proxy.port}"
    a, b = await join_watched(redis.url, "a"), await join_watched(url, "b", timeout_s=CALL_TIMEOUT_S)
    held = new_addresses(40)
    await a.hold(held)
    await soon(lambda: b.locates(held, "a"))
    await b.until(IndexState.JOINED)
    proxy.delay(2 * CALL_TIMEOUT_S)
    assert await b.acquires_until_alone(held) <= FAILURES_TO_OPEN
    proxy.mend()
    await b.until(IndexState.JOINED)
    await soon(lambda: b.locates(held, "a"))
    await proxy.stop()


@pytest.mark.attack("a Redis with invalid answers")
@pytest.mark.parametrize(
    "answer",
    [b":7\r\n", b"$-1\r\n", b"*0\r\n", b"*1\r\n:7\r\n", b"*3\r\n$2\r\nok\r\n:1\r\n:2\r\n", b"!\0\r\n"],
    ids=["number", "nothing", "empty list", "short list", "numbers for names", "no protocol"],
)
async def test_a_redis_with_invalid_replies_is_avoided_until_it_recovers(
    redis: RedisServer, join_watched: JoinWatched, answer: bytes
) -> None:
    proxy = await TcpProxy(redis.port).start()
    a, b = await join_watched(redis.url, "a"), await join_watched(f"redis://127.0.0.1:{proxy.port}", "b")
    held = new_addresses(3)
    await a.hold(held)
    proxy.answer_nonsense(answer)
    async with asyncio.timeout(PATIENCE_S):
        while b.index.state is IndexState.JOINED:
            assert (await b.index.acquire(held)).granted <= frozenset(held)
            assert await b.index.locate(held) == {}
            assert await b.index.find(held) == {}
    proxy.mend()
    await b.until(IndexState.JOINED)
    await soon(lambda: b.locates(held, "a"))
    await proxy.stop()


@pytest.mark.parametrize("answer", [b":7\r\n", b"*1\r\n:7\r\n"], ids=["number", "short list"])
async def test_an_invalid_notification_ends_the_subscription_and_nothing_else(
    redis: RedisServer, join_watched: JoinWatched, answer: bytes
) -> None:
    errors: list[str] = []
    asyncio.get_running_loop().set_exception_handler(lambda _, context: errors.append(context["message"]))
    proxy = await TcpProxy(redis.port).start()
    a, b = await join_watched(redis.url, "a"), await join_watched(f"redis://127.0.0.1:{proxy.port}", "b")
    (address,) = new_addresses(1)
    await a.cluster.acquire([address])
    waiting = asyncio.create_task(b.cluster.wait_published(address, PATIENCE_S))
    with redis.client() as admin:
        channel = Keys(NAMESPACE).location(address)
        await soon(lambda: dict(admin.pubsub_numsub(channel))[channel] == 1)
        proxy.answer_nonsense(answer)
        admin.publish(channel, b"")
        await soon(lambda: dict(admin.pubsub_numsub(channel))[channel] == 0)
    proxy.mend()
    await b.until(IndexState.JOINED)
    await a.hold([address])
    await waiting
    assert not errors
    await proxy.stop()
