"""What a fleet of three replicas saves, and what clients see when one of them is killed: real servers, a real Redis.

It also times the index: each call that a Submit makes, on one Redis and on a Redis Cluster of three.
"""

import asyncio
import random
import tempfile
from collections import Counter
from collections.abc import Awaitable, Callable, Iterator, Sequence
from contextlib import AsyncExitStack, contextmanager
from pathlib import Path
from statistics import median
from time import monotonic

import numpy as np
import transformers

from bench.harness.benchmark import Benchmark, Figure, command_line, print_figures, table
from bench.harness.calls import ms_of
from encoder_contract.geometry import Grid
from encoder_service.cluster.cluster import Replica
from encoder_service.cluster.redis import RedisSettings, namespace
from encoder_service.cluster.redis_cluster import RedisCluster
from testing.checkpoints import write_checkpoint
from testing.holding import cluster_of
from testing.redis_servers import redis_cluster, redis_server
from testing.replicas import ReplicaProcess, fleet_of
from testing.traffic import Served, Supply, Traffic

BENCHMARK = Benchmark(
    "fleet",
    "How does it scale over replicas, and what do faults cost?",
    (
        Figure(
            "encodes_per_image",
            "encodes per distinct image, 3 replicas, half of the images shared",
            target="<= 1",
        ),
        Figure("failed_images", "one of three replicas killed under load: failed images", target="<= 0"),
        Figure("kill_latency_s", "one of three replicas killed under load: higher latency for", "s", "<= 3"),
        Figure("index_ms_32", "index cost of a Submit of 32 images, p50", "ms", "<= 2"),
    ),
    limit_s=240,
    dry_run=("--index-only", "--rounds", "20"),
)

PROMPT = 32  # images of a large prompt, half of which another client has sent before
BEFORE_S, AFTER_S = 6.0, 10.0
# An image is late if it takes this much longer than the p99 before the kill. Other work on the machine delays some
# images by a quarter of a second even without a kill.
LATE_S = 0.5


@contextmanager
def three_replicas() -> Iterator[Sequence[ReplicaProcess]]:
    """Run three replicas of a tiny checkpoint with a Redis."""
    transformers.utils.logging.disable_progress_bar()
    with tempfile.TemporaryDirectory() as folder, redis_server() as redis:
        model = write_checkpoint(Path(folder))
        with fleet_of([ReplicaProcess(model, n, index=redis.url) for n in range(3)]) as replicas:
            yield replicas


async def count_encodes(replicas: Sequence[ReplicaProcess], prompts: int) -> dict[str, float]:
    """Return encodes per distinct image if each client knows only one replica, and if each knows the whole fleet."""
    endpoints = [replica.endpoint for replica in replicas]
    figures, rows = {}, []
    kinds = {
        "each client knows one replica": ("unknown", [[endpoint] for endpoint in endpoints]),
        "clients route by content": ("routed", [endpoints] * 3),
    }
    for seed, (title, (name, known)) in enumerate(kinds.items()):
        supply = Supply(seed=seed)
        before = await _encodes(replicas)
        async with AsyncExitStack() as stack:
            loads = [
                await stack.enter_async_context(
                    Traffic(names, supply, workers=1, clients=1, images=PROMPT, timeout_s=120)
                )
                for names in known
            ]
            await asyncio.gather(*(load.more(prompts) for load in loads))
        encodes = await _encodes(replicas) - before
        served = [served for load in loads for served in load.served]
        assert not any(end.error for end in served), [end.error for end in served if end.error][:3]
        distinct = len({end.digest for end in served})
        sources = Counter(end.source for end in served)
        figures[f"encodes_per_image_{name}"] = encodes / distinct
        rows.append(
            [title, str(len(served)), str(distinct), str(encodes), *(str(sources[s]) for s in SOURCES)]
        )
    table(
        f"3 replicas, prompts of {PROMPT} images, half of them shared",
        ["", "images fetched", "distinct", "encodes", *SOURCES],
        rows,
    )
    return figures | {"encodes_per_image": max(figures.values())}


SOURCES = ("encoded", "host", "peer")


async def kill_one(replicas: Sequence[ReplicaProcess]) -> dict[str, float]:
    """Kill one of the replicas under a steady load; return the failures and delays that clients see."""
    supply = Supply(seed=100)
    load = Traffic([r.endpoint for r in replicas], supply, workers=3, images=4, pause_s=0.05, timeout_s=60)
    async with load:
        await load.more(10)  # warm up: connections, first batches
        began = monotonic()
        await asyncio.sleep(BEFORE_S)
        await asyncio.to_thread(_wait_until_it_encodes, replicas[0])
        killed = monotonic()
        await asyncio.to_thread(replicas[0].kill)
        await asyncio.sleep(AFTER_S)
    before = [end.seconds for end in load.served if began < end.began_s and _ended_s(end) < killed]
    after = list(load.since(killed))
    p50, p99 = float(np.percentile(before, 50)), float(np.percentile(before, 99))
    late = [end for end in after if end.seconds > p99 + LATE_S]
    figures = {
        "failed_images": float(len(load.errors)),
        "kill_latency_s": max((_ended_s(end) - killed for end in late), default=0.0),
        "kill_worst_s": max(end.seconds for end in after) - p50,
        "kill_late_images": float(len(late)),
    }
    table(
        "One of three killed under load",
        ["images before", "p50 s", "p99 s", "images after", "failed", "late", "worst s more", "late for s"],
        [[str(len(before)), p50, p99, str(len(after)), str(len(load.errors)), str(len(late)),
          figures["kill_worst_s"], figures["kill_latency_s"]]],
    )  # fmt: skip
    return figures


def _wait_until_it_encodes(replica: ReplicaProcess) -> None:
    deadline = monotonic() + 5
    while not replica.metrics().total("queue_images") and monotonic() < deadline:
        pass


def _ended_s(end: Served) -> float:
    return end.began_s + end.seconds


async def _encodes(replicas: Sequence[ReplicaProcess]) -> int:
    return sum([await asyncio.to_thread(replica.encodes) for replica in replicas])


# The index

MODEL = b"m" * 32
GRID = Grid(1, 44, 80)
BATCH = 32  # images of a large prompt


async def join(stack: AsyncExitStack, url: str, name: str) -> RedisCluster:
    """Return a joined cluster that the stack closes. Its timeout is long enough for a busy machine."""
    settings = RedisSettings(url=url, namespace=namespace("encoder", MODEL), call_timeout_ms=2000)
    cluster = cluster_of(settings)
    await cluster.join(Replica(name, 1, f"{name}.encoder:50051", MODEL, b"p" * 32))
    stack.push_async_callback(cluster.close)
    return cluster


async def time_index(url: str, rounds: int) -> dict[str, float]:
    """Return the median milliseconds of each call for 32 addresses, and of all calls of a Submit of 32 images."""
    draw = random.Random(0)
    times: dict[str, list[float]] = {name: [] for name in ("acquire", "publish", "locate", "hint")}
    async with AsyncExitStack() as stack:
        holder, waiter = await join(stack, url, "a"), await join(stack, url, "b")
        a, b = holder.index, waiter.index
        for _ in range(rounds):
            addresses = [draw.randbytes(32) for _ in range(BATCH)]
            times["acquire"].append(await ms_of(a.acquire(addresses)))
            times["publish"].append(await ms_of(a.publish(dict.fromkeys(addresses, GRID))))
            times["locate"].append(await ms_of(b.locate(addresses)))
            hand_over = await _prepare_hand_over(holder, waiter, [draw.randbytes(32) for _ in range(BATCH)])
            times["hint"].append(await ms_of(hand_over()))
    submit = [a + p for a, p in zip(times["acquire"], times["publish"], strict=True)]
    return {"submit": median(submit), **{name: median(values) for name, values in times.items()}}


async def _prepare_hand_over(
    holder: RedisCluster, waiter: RedisCluster, addresses: list[bytes]
) -> Callable[[], Awaitable[object]]:
    """Let `waiter` wait for addresses; return a call that publishes them and returns once `waiter` knows."""
    await holder.acquire(addresses)
    waits = [asyncio.create_task(waiter.wait_published(address, 5.0)) for address in addresses]
    await asyncio.sleep(0.005)

    async def hand_over() -> None:
        await holder.index.publish(dict.fromkeys(addresses, GRID))
        assert all(await asyncio.gather(*waits))

    return hand_over


def index_figures(rounds: int) -> dict[str, float]:
    """Time the index on one Redis and on a cluster of three, and print the tables."""
    with redis_server() as server:
        single = asyncio.run(time_index(server.url, rounds))
    with redis_cluster() as cluster:
        clustered = asyncio.run(time_index(cluster.url, rounds))
    rows: list[list[str | float]] = [["one Redis", *single.values()], ["cluster of 3", *clustered.values()]]
    heads = ["server", "acquire + publish", "acquire", "publish", "locate", "published to known"]
    table(f"{BATCH} addresses, milliseconds (p50 of {rounds})", heads, rows)
    calls = {f"index_{name}_ms": value for name, value in single.items() if name != "submit"}
    return {"index_ms_32": single["submit"], "index_ms_32_cluster": clustered["submit"], **calls}


def main() -> None:
    parser = command_line(__doc__)
    parser.add_argument("--index-only", action="store_true", help="leave out what needs replicas")
    parser.add_argument("--rounds", type=int, default=300, help="batches of 32 addresses timed")
    parser.add_argument(
        "--prompts", type=int, default=6, help="prompts of 32 images of each of three clients"
    )
    args = parser.parse_args()
    figures = index_figures(args.rounds)
    if not args.index_only:
        with three_replicas() as replicas:
            figures |= asyncio.run(count_encodes(replicas, args.prompts))
            figures |= asyncio.run(kill_one(replicas))
    print_figures(figures, args)


if __name__ == "__main__":
    main()
