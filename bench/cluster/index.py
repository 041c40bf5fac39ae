"""What the index costs: milliseconds of a batch of addresses, microseconds of Redis itself, bytes of an entry."""

import asyncio
import random
from collections.abc import Awaitable, Callable
from contextlib import AsyncExitStack
from statistics import median
from time import perf_counter

import redis

from bench.harness.benchmark import Figure
from bench.harness.tables import table
from encoder_contract.geometry import Grid
from encoder_service.cluster.cluster import Replica
from encoder_service.cluster.redis import RedisIndex, RedisSettings, namespace
from encoder_service.cluster.redis.connection import Connection, RedisUrl
from encoder_service.cluster.redis.schema import Keys, Membership
from testing.holding import Holding
from testing.redis_servers import RedisServer, redis_cluster, redis_server

FIGURES = (
    Figure("index_ms_32", "index cost of a Submit of 32 images, p50", "ms", "<= 2"),
    Figure("index_ms_32_cluster", "the same on a Redis Cluster of three", "ms"),
    Figure("index_acquire_ms", "acquire of 32 addresses: all of it that a Submit waits for, p50", "ms"),
    Figure("index_publish_ms", "publish of 32 addresses, after encoding, p50", "ms"),
    Figure("index_locate_ms", "locate of 32 addresses, p50", "ms"),
    Figure("index_hint_ms", "from publish to waiters on another replica knowing, p50", "ms"),
    Figure("index_redis_acquire_us", "time of Redis's one thread: acquire, each address", "µs"),
    Figure("index_redis_publish_us", "publish, each address", "µs"),
    Figure("index_redis_beat_us_100", "heartbeat of one replica among 100", "µs"),
    Figure("index_location_bytes", "memory of Redis at 100 000 entries: a location, one replica", "bytes"),
    Figure("index_lease_bytes", "a lease", "bytes"),
    Figure("index_source_overhead_bytes", "an image file of 300 kB, beside its bytes", "bytes"),
)

MODEL = b"m" * 32
GRID = Grid(1, 44, 80)
NAMESPACE = namespace("encoder", MODEL)
BATCH = 32  # images of a large prompt
ROLL = 100  # replicas of a large fleet
Figures = dict[str, float]


def settings(url: str) -> RedisSettings:
    """Return the defaults, with a bound that a busy machine does not trip over."""
    return RedisSettings(url=url, namespace=NAMESPACE, call_timeout_ms=2000)


async def join(stack: AsyncExitStack, url: str, name: str) -> RedisIndex:
    """Return a registered index that the stack closes."""
    index = RedisIndex(settings(url), Holding(), ())
    await index.register(Replica(name, 1, f"{name}.encoder:50051", MODEL, b"p" * 32))
    stack.push_async_callback(index.close)
    return index


async def time_calls(url: str, rounds: int) -> Figures:
    """Return the median milliseconds of each call over 32 addresses, and of all that one Submit of 32 needs."""
    draw = random.Random(0)
    times: dict[str, list[float]] = {}

    async def timed(name: str, call: Callable[[], Awaitable[object]]) -> None:
        began = perf_counter()
        await call()
        times.setdefault(name, []).append((perf_counter() - began) * 1e3)

    async with AsyncExitStack() as stack:
        a, b = await join(stack, url, "a"), await join(stack, url, "b")
        for _ in range(rounds):
            addresses = [draw.randbytes(32) for _ in range(BATCH)]
            await timed("acquire_ms", lambda addresses=addresses: a.acquire(addresses))  # type: ignore[misc]
            await timed("publish_ms", lambda addresses=addresses: a.publish(dict.fromkeys(addresses, GRID)))  # type: ignore[misc]
            await timed("locate_ms", lambda addresses=addresses: b.locate(addresses))  # type: ignore[misc]
            await timed("hint_ms", await _handed_over(a, b, [draw.randbytes(32) for _ in range(BATCH)]))
    figures = {name: median(values) for name, values in times.items()}
    submit = [a + p for a, p in zip(times["acquire_ms"], times["publish_ms"], strict=True)]
    return figures | {"submit_ms": median(submit)}


async def _handed_over(
    holder: RedisIndex, waiter: RedisIndex, addresses: list[bytes]
) -> Callable[[], Awaitable[object]]:
    """Return a call in which `holder` publishes what `waiter` already waits for, until `waiter` knows."""
    await holder.acquire(addresses)
    waits = [asyncio.create_task(waiter.wait_published(address, 5.0)) for address in addresses]
    await asyncio.sleep(0.005)

    async def hand_over() -> None:
        await holder.publish(dict.fromkeys(addresses, GRID))
        assert all(await asyncio.gather(*waits))

    return hand_over


async def weigh_entries(server: RedisServer, entries: int) -> Figures:
    """Return the bytes of an entry in Redis: as it says of one key, and by the growth of all its memory."""
    draw = random.Random(1)
    held, leased = ([draw.randbytes(32) for _ in range(entries)] for _ in range(2))
    image, keys = draw.randbytes(300_000), Keys(NAMESPACE)
    async with AsyncExitStack() as stack:
        client = stack.enter_context(server.client())
        index = await join(stack, server.url, "a")
        used = [used_bytes(client)]
        await index.publish(dict.fromkeys(held, GRID))
        used.append(used_bytes(client))
        await index.acquire(leased)
        used.append(used_bytes(client))
        await index.sources.put(b"d" * 32, image)
        return {
            "location_bytes": (used[1] - used[0]) / entries,
            "location_usage_bytes": usage(client, keys.location(held[0])),
            "lease_bytes": (used[2] - used[1]) / entries,
            "lease_usage_bytes": usage(client, keys.lease(leased[0])),
            "source_overhead_bytes": usage(client, keys.source(b"d" * 32)) - len(image),
            "replica_usage_bytes": usage(client, keys.roll),
        }


def used_bytes(client: redis.Redis) -> int:
    """Return all the memory that Redis has taken."""
    return int(client.info("memory")["used_memory"])


def usage(client: redis.Redis, key: bytes) -> float:
    """Return what Redis says that a key takes."""
    return float(client.memory_usage(key) or 0)


async def load_of_redis(server: RedisServer, rounds: int) -> Figures:
    """Return the microseconds of Redis's one thread that each address takes, and each heartbeat."""
    draw = random.Random(2)
    figures: Figures = {}
    async with AsyncExitStack() as stack:
        client = stack.enter_context(server.client())
        index = await join(stack, server.url, "a")
        calls: dict[str, Callable[[list[bytes]], Awaitable[object]]] = {
            "acquire": index.acquire,
            "publish": lambda addresses: index.publish(dict.fromkeys(addresses, GRID)),
        }
        for name, call in calls.items():
            client.config_resetstat()
            for _ in range(rounds):
                await call([draw.randbytes(32) for _ in range(BATCH)])
            spent = client.info("commandstats")["cmdstat_evalsha"]["usec"]
            figures[f"redis_{name}_us"] = spent / rounds / BATCH
        figures[f"redis_beat_us_{ROLL}"] = await _time_beats(stack, server, rounds)
    return figures


async def _time_beats(stack: AsyncExitStack, server: RedisServer, rounds: int) -> float:
    """Return the microseconds of Redis that one heartbeat takes when `ROLL` replicas are alive."""
    membership = [
        Membership(Replica(f"r{n}", 1, f"r{n}.encoder:50051", MODEL, b"p" * 32), b"{roll}", 60_000, ())
        for n in range(ROLL)
    ]
    link = await Connection.open(RedisUrl(server.url), timeout_s=1.0)
    stack.push_async_callback(link.close)
    for member in membership:
        await member.heartbeat(link, "join")
    client = stack.enter_context(server.client())
    client.config_resetstat()
    for _ in range(rounds):
        await membership[0].heartbeat(link, "beat")
    return float(client.info("commandstats")["cmdstat_evalsha"]["usec"]) / rounds


async def measure(rounds: int, entries: int) -> dict[str, Figures]:
    """Return the figures of every kind of server that runs here."""
    figures: dict[str, Figures] = {}
    with redis_server() as server:
        figures["redis"] = await time_calls(server.url, rounds)
        figures["redis"] |= await load_of_redis(server, rounds)
    with redis_server() as server:
        figures["redis"] |= await weigh_entries(server, entries)
    with redis_cluster() as cluster:
        figures["cluster of 3"] = await time_calls(cluster.url, rounds)
    return figures


def report(rounds: int = 300, entries: int = 100_000) -> Figures:
    """Measure, print the tables, and return what the JSON line holds."""
    figures = asyncio.run(measure(rounds, entries))
    calls = ["acquire_ms", "publish_ms", "locate_ms", "hint_ms", "submit_ms"]
    rows: list[list[str | float]] = [[kind, *(of[call] for call in calls)] for kind, of in figures.items()]
    heads = ["server", "acquire", "publish", "locate", "published to known", "acquire + publish"]
    table(f"{BATCH} addresses, milliseconds (p50 of {rounds})", heads, rows)
    single = figures["redis"]
    rest: list[list[str | float]] = [[name, value] for name, value in single.items() if name not in calls]
    table(f"Redis itself, {entries:,} entries", ["figure", "value"], rest)
    return {
        "index_ms_32": single["submit_ms"],
        "index_ms_32_cluster": figures["cluster of 3"]["submit_ms"],
        **{f"index_{name}": value for name, value in single.items() if name != "submit_ms"},
    }
