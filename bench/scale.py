"""Runs a fleet of real replicas and clients through kills, drains and rolls, and computes what larger fleets need.

The replicas' towers sleep instead of computing, and share the memory of one interpreter, so 20 of them and 200 clients
fit on a small machine. They run first with one Redis, then with a Redis Cluster of three. What a replica, an image and
a client cost Redis and each other is measured in processor time; the table for larger fleets multiplies it.
"""

import asyncio
import os
import random
import tempfile
import time
from argparse import Namespace
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from statistics import median
from typing import Any

import transformers

from bench.edge_parts.null_tower import installed
from bench.harness.benchmark import Benchmark, Figure, Table, command_line, print_figures, step, table
from bench.harness.timing import cpu_ms, spin_ms
from bench.scale_parts.forked import ForkedReplica
from bench.scale_parts.redis_costs import AT_A_TIME, Spent, heartbeat, image, renewal
from bench.scale_parts.watchers import CLIENTS, clients_of_one
from encoder_service.cli import raise_file_limit
from prefill_client.fleet.routing import Router
from testing.checkpoints import write_checkpoint
from testing.redis_servers import RedisServer, redis_cluster, redis_server
from testing.traffic import Supply, Traffic

LARGE = (100, 1000)
BEATS_PER_S = 2
QUEUED = 123_000  # images in the queues of a hundred replicas
RENEWALS_PER_S = 3 / 300  # of a lease
CHAT_IMAGES = 30
# 1280×720 and 256×256 images of Qwen3-VL-8B a second on one H200, by arithmetic: `python -m bench.sizing`.
RATES = {"1280×720": 84.7, "256×256": 1669.0}

BENCHMARK = Benchmark(
    "scale",
    "Do a hundred replicas and a thousand engines work?",
    (
        Figure("failed_images", "20 replicas, 200 clients; kills, drains, rolls: failed", "images", "<= 0"),
        Figure("encodes_per_image", "the same, before the faults: encodes per distinct image", target="<= 1"),
        Figure("hangs", "drains that did not end", target="<= 0"),
        Figure("clients_of_one", "clients that one replica serves", target=">= 4000"),
        Figure("beats_1000", "heartbeats of 1,000 replicas, of Redis's thread", target="<= 0.05"),
        Figure("beat_bytes", "bytes of a heartbeat among 1,000", "B"),
        Figure("redis_us_1", "Redis, an image, calls of 1, 16 at a time", "µs", "<= 20"),
        Figure("redis_us_apart", "the same calls, each at a replica of its own", "µs", "<= 20"),
        Figure("redis_us_16", "Redis, an image, calls of 16", "µs", "<= 13.5"),
        Figure("cluster_us_16", "a Redis Cluster of three, calls of 16: all threads", "µs"),
        Figure("renewals", "renewals of 123,000 queued images, threads of Redis", target="<= 0.02"),
        Figure("router_ms_100", "router, 30 images among 100 replicas", "ms", "<= 0.4"),
        Figure("router_ms_1000", "router, 30 images among 1,000 replicas", "ms", "<= 2"),
        Figure("watch_percent", "a replica, for each idle client, of a core", "%"),
        Figure("spin_ms", "a fixed piece of Python (a quiet core: 20)", "ms"),
    ),
    limit_s=600,
    dry_run=("--seconds", "5", "--replicas", "3", "--clients", "4", "--watchers", "200"),
)

# Of each tower: 0.1 s for a 256×256 image. A faster one would encode images that a peer has, instead of fetching them.
PATCHES_PER_S = 2560.0
IDLE_S, CALM_S = 5.0, 2.0
PAUSE_S = 10.0  # of a client between two prompts


class FleetFaults:
    """What happens to the replicas of a fleet, drawn from a seed, and how often it has happened."""

    def __init__(self, replicas: Sequence[ForkedReplica], seed: int) -> None:
        self._replicas = replicas
        self._random = random.Random(seed)
        self.counts: Counter[str] = Counter()
        self.hangs = 0

    async def go_on(self, seconds: float) -> None:
        """Cause faults for some seconds, each kind at least once."""
        until = time.monotonic() + seconds
        kinds = {"kill": self.kill, "drain": self.drain, "roll": self.roll}
        left = self._random.sample(sorted(kinds), len(kinds))
        while left or time.monotonic() < until:
            name = left.pop() if left else self._random.choice(sorted(kinds))
            self.counts[name] += 1
            await kinds[name]()
            await asyncio.sleep(CALM_S)

    async def kill(self) -> None:
        """Kill a replica without a warning; its successor comes a moment later."""
        victim = self._random.choice(self._replicas)
        await asyncio.to_thread(victim.kill)
        await asyncio.sleep(CALM_S)
        await self._start(victim)

    async def drain(self) -> None:
        """Drain a replica; its successor comes a moment later."""
        victim = self._random.choice(self._replicas)
        await self._drain(victim)
        await asyncio.sleep(CALM_S)
        await self._start(victim)

    async def roll(self) -> None:
        """Replace a quarter of the fleet, one after the other, as a rolling update does."""
        for replica in self._random.sample(self._replicas, -(-len(self._replicas) // 4)):
            await self._drain(replica)
            await self._start(replica)

    async def _drain(self, replica: ForkedReplica) -> None:
        self.hangs += not await asyncio.to_thread(replica.drain)

    async def _start(self, replica: ForkedReplica) -> None:
        replica.start()
        await asyncio.to_thread(replica.wait)


@contextmanager
def fleet_of(model: Path, replicas: int, url: str) -> Iterator[list[ForkedReplica]]:
    """Run replicas that share an index for the length of a `with` block."""
    fleet: list[ForkedReplica] = []
    try:
        for number in range(replicas):
            fleet.append(ForkedReplica(model, number, index=url))
            fleet[-1].start()
        for replica in fleet:
            replica.wait()
        yield fleet
    finally:
        for replica in fleet:
            replica.close()


COUNTED = {
    "encodes": ("encoded_images_total", "kept"),
    "index_failures": ("index_call_seconds_count", "failed"),
    "peer_failures": ("peer_fetch_seconds_count", "failed"),
}


async def counts(fleet: Sequence[ForkedReplica]) -> Counter[str]:
    """Return how many images all replicas have encoded, and what may be why they encoded one twice."""
    found = [await asyncio.to_thread(replica.metrics) for replica in fleet]
    return Counter(
        {
            what: sum(int(each.total(name, outcome=outcome)) for each in found)
            for what, (name, outcome) in COUNTED.items()
        }
    )


async def watch_percent(fleet: Sequence[ForkedReplica], clients: int) -> float:
    """Return what one idle client costs one replica, in percent of a core: pings, and a health watch."""
    before = await _busy(fleet)
    async with Traffic([replica.endpoint for replica in fleet], Supply(), workers=0, clients=clients):
        return 100 * (await _busy(fleet) - before) / (len(fleet) * clients)


async def _busy(fleet: Sequence[ForkedReplica]) -> float:
    """Return how many cores the replicas use."""
    processes = [replica.process.pid for replica in fleet if replica.process.pid]
    before = sum(map(cpu_ms, processes))
    await asyncio.sleep(IDLE_S)
    return (sum(map(cpu_ms, processes)) - before) / 1e3 / IDLE_S


async def run(
    fleet: Sequence[ForkedReplica], servers: Sequence[RedisServer], clients: int, seconds: float, seed: int
) -> dict[str, float]:
    """Load a fleet without faults, then with faults; return its figures."""
    endpoints, errors = [replica.endpoint for replica in fleet], []

    def traffic(number: int) -> Traffic:
        supply = Supply(seed=2 * seed + number)
        return Traffic(endpoints, supply, workers=clients, clients=clients, pause_s=PAUSE_S)

    before, spent = await counts(fleet), Spent.by(servers)
    with step("without faults"):
        async with traffic(0) as load:
            await load.more(2 * clients, within_s=300)
    spent = Spent.by(servers).each(spent, len(load.served))
    counted = await counts(fleet)
    counted.subtract(before)
    errors += load.errors
    steady, faults = load, FleetFaults(fleet, seed)
    with step("with faults"):
        async with traffic(1) as load:
            await faults.go_on(seconds)
    errors += load.errors
    for error, times in Counter(errors).most_common(5):
        print(f"{times} times: {error}")
    return {
        "failed_images": len(errors),
        "encodes_per_image": counted["encodes"] / steady.distinct,
        **{f"{what}_before": float(times) for what, times in counted.items()},
        "hangs": faults.hangs,
        "redis_us_load": spent.us,
        "images": len(steady.served) + len(load.served),
        "p50_s": median(each.seconds for each in load.served),
        "worst_s": max(each.seconds for each in load.served),
        **{f"{name}s": float(times) for name, times in faults.counts.items()},
    }


async def costs() -> dict[str, float]:
    """Return what heartbeats, images and renewals cost Redis."""
    with redis_server() as server:
        beats = {replicas: await heartbeat(server, replicas) for replicas in LARGE}
        single = {together: await image([server], server.url, together) for together in (1, 16)}
        apart = await image([server], server.url, 1, replicas=AT_A_TIME)
        renewed = await renewal(server)
    with redis_cluster() as cluster:
        clustered = await image(cluster.nodes, cluster.url, 16)
    return {
        "beat_us_100": beats[100].us,
        "beat_us_1000": beats[1000].us,
        "beats_1000": 1000 * BEATS_PER_S * beats[1000].us / 1e6,
        "beat_bytes": beats[1000].bytes,
        "redis_us_1": single[1].us,
        "redis_us_apart": apart.us,
        "redis_us_16": single[16].us,
        "redis_bytes_16": single[16].bytes,
        "cluster_us_16": clustered.us,
        "renewal_us": renewed.us,
        "renewals": QUEUED * RENEWALS_PER_S * renewed.us / 1e6,
    }


def router_ms(replicas: int, requests: int = 50) -> float:
    """Return the processor time of a client for placing the images of a request, the least of some rounds."""
    router = Router(f"10.0.{n // 250}.{n % 250}:50051" for n in range(replicas))
    draw, found = random.Random(replicas), []
    for _ in range(8):
        chats = [[draw.randbytes(32) for _ in range(CHAT_IMAGES)] for _ in range(requests)]
        began = time.process_time()
        for chat in chats:
            for endpoint in router.place(chat):
                router.end(endpoint)
        found.append((time.process_time() - began) * 1e3 / requests)
    return min(found)


def larger(figures: dict[str, float]) -> Table:
    """Print what larger fleets need, by arithmetic from the measured costs."""
    rows: list[list[str | float]] = []
    for replicas in LARGE:
        beats = replicas * BEATS_PER_S
        images = [replicas * rate / 1e6 for rate in RATES.values()]
        threads = [rate * figures[cost] for rate in images for cost in ("redis_us_apart", "redis_us_16")]
        leases = QUEUED / 100 * replicas * RENEWALS_PER_S * figures["renewal_us"] / 1e6
        rows.append(
            [
                f"{replicas:,}",
                beats * figures[f"beat_us_{replicas}"] / 1e6,
                beats * figures["beat_bytes"] / 1e6,
                leases,
                *threads,
                figures[f"router_ms_{replicas}"],
            ]
        )
    heads = [
        "replicas",
        "heartbeats, threads of Redis",
        "heartbeats, MB/s",
        "renewals of full queues, threads",
    ]
    heads += [
        f"{size} at an H200's pace{calls}, threads"
        for size in RATES
        for calls in (", one a call", ", 16 a call")
    ]
    heads.append("router, 30 images, ms")
    return table("Larger fleets, by arithmetic", heads, rows)


async def figures_of(model: Path, args: Namespace) -> dict[str, Any]:
    """Run everything; return the figures."""
    with step("what the index costs Redis, and routers their clients"):
        figures = {"spin_ms": spin_ms(), **await costs()}
        figures |= {f"router_ms_{replicas}": router_ms(replicas) for replicas in LARGE}
    with (
        step("clients of one replica"),
        redis_server() as server,
        fleet_of(model, 1, server.url) as (replica,),
    ):
        figures["clients_of_one"] = await clients_of_one(replica.endpoint, args.watchers)
    runs = []
    replicas, clients, seconds = args.replicas, args.clients, args.seconds / 2
    with (
        step("a fleet with one Redis"),
        redis_server() as server,
        fleet_of(model, replicas, server.url) as fleet,
    ):
        figures["watch_percent"] = await watch_percent(fleet, clients)
        runs.append(await run(fleet, [server], clients, seconds, args.seed))
    with (
        step("a fleet with a Redis Cluster"),
        redis_cluster() as cluster,
        fleet_of(model, replicas, cluster.url) as fleet,
    ):
        runs.append(await run(fleet, cluster.nodes, clients, seconds, args.seed + 1))
    rows: list[list[str | float]] = [[name, *(found[name] for found in runs)] for name in runs[0]]
    table(f"{replicas} replicas, {clients} clients", ["", "one Redis", "cluster of 3"], rows)
    for name in ("failed_images", "hangs", "images"):
        figures[name] = sum(found[name] for found in runs)
    figures["encodes_per_image"] = max(found["encodes_per_image"] for found in runs)
    return figures | {"tables": [larger(figures)], "runs": runs}


def main() -> None:
    parser = command_line(__doc__)
    parser.add_argument("--seconds", type=float, default=300, help="of faults, half of them with each index")
    parser.add_argument("--replicas", type=int, default=20)
    parser.add_argument("--clients", type=int, default=200)
    parser.add_argument("--watchers", type=int, default=CLIENTS, help="clients of the one replica")
    parser.add_argument("--seed", type=int, default=0, help="of images and faults")
    args = parser.parse_args()
    transformers.utils.logging.disable_progress_bar()
    raise_file_limit()
    os.environ["OMP_NUM_THREADS"] = "1"
    with tempfile.TemporaryDirectory() as folder, installed("qwen3_vl", PATCHES_PER_S):
        print_figures(asyncio.run(figures_of(write_checkpoint(folder), args)), args)


if __name__ == "__main__":
    main()
