"""What a fleet of three replicas saves, and what clients see when one of them is killed: real servers, a real Redis.

It also times the calls to the index that a Submit makes.
"""

import asyncio
import random
import tempfile
from collections import Counter
from collections.abc import Iterator, Sequence
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
from testing.checkpoints import write_checkpoint
from testing.holding import cluster_of
from testing.redis_servers import redis_server
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


async def index_ms(url: str, rounds: int) -> float:
    """Return the median milliseconds that the index takes for a Submit of 32 images: to acquire, and later to publish.

    Its timeout is long enough for a busy machine.
    """
    settings = RedisSettings(url=url, namespace=namespace("encoder", MODEL), call_timeout_ms=2000)
    draw, cluster, found = random.Random(0), cluster_of(settings), list[float]()
    await cluster.join(Replica("a", 1, "a.encoder:50051", MODEL, b"p" * 32))
    for _ in range(rounds):
        addresses = [draw.randbytes(32) for _ in range(BATCH)]
        acquire_ms = await ms_of(cluster.index.acquire(addresses))
        found.append(acquire_ms + await ms_of(cluster.index.publish(dict.fromkeys(addresses, GRID))))
    await cluster.close()
    return median(found)


def main() -> None:
    parser = command_line(__doc__)
    parser.add_argument("--index-only", action="store_true", help="leave out what needs replicas")
    parser.add_argument("--rounds", type=int, default=300, help="batches of 32 addresses timed")
    parser.add_argument(
        "--prompts", type=int, default=6, help="prompts of 32 images of each of three clients"
    )
    args = parser.parse_args()
    with redis_server() as server:
        figures = {"index_ms_32": asyncio.run(index_ms(server.url, args.rounds))}
    if not args.index_only:
        with three_replicas() as replicas:
            figures |= asyncio.run(count_encodes(replicas, args.prompts))
            figures |= asyncio.run(kill_one(replicas))
    print_figures(figures, args)


if __name__ == "__main__":
    main()
