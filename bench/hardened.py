"""What a well-behaved client feels while others attack: its slowest calls beside each attacker, over those with none.

A real server process has small limits, so that an attacker soon reaches them. The victim asks for its description and
health, submits two photos of which one is new, and fetches their rows, again and again: first alone, then beside an
attacker, each attacker on a server of its own. Each request counts as a whole. One that fails, or takes longer than the
victim's patience, counts as failed and as slow as that. An honest neighbour, whose images are as large as those of the
attackers, comes first: its effect is the price of sharing a server, not of attacks. Beside the watchers the server is
also told to stop: the victim's own watcher must be told, and the server must end.

Each attacker also attacks a second server on the machine for a while. What the victim of the first feels of that is the
price of sharing the processors, which no server can lower.
"""

import asyncio
import itertools
import subprocess
import tempfile
import time
import urllib.request
from collections import Counter
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median
from typing import Any

import grpc
import numpy as np
import psutil
import transformers
from grpc_health.v1 import health_pb2, health_pb2_grpc

from bench.harness.benchmark import Benchmark, Figure, command_line, tell
from bench.harness.budget import Budget
from bench.harness.calls import submit_and_fetch
from bench.harness.tables import table
from encoder_contract.v1 import encoder_pb2 as pb
from encoder_contract.v1.encoder_pb2_grpc import EncoderServiceStub
from prefill_client import EncoderClient
from testing.attackers import attacking
from testing.attacks import ATTACKS, Target
from testing.checkpoints import write_checkpoint
from testing.hostile_images import again
from testing.photos import photo
from testing.server_process import HALF_THE_CORES, ServerProcess
from testing.traffic import marked

NEIGHBOUR = "neighbour"
BENCHMARK = Benchmark(
    "hardened",
    "What does a well-behaved client feel while others attack?",
    (
        Figure(
            "victim_p99_ratio",
            "p99 of a request beside the worst attacker / with none",
            target="<= 2",
            summary="p99 of a client beside the worst attacker / with none",
        ),
        Figure(
            "victim_failed",
            "requests failed beside all attackers",
            target="<= 0",
        ),
        Figure(
            "victim_throughput_ratio",
            "requests a second beside the worst attacker / with none",
            target=">= 0.8",
        ),
        Figure("victim_p99_over_neighbour", "p99 beside the worst attacker / beside an honest neighbour"),
        Figure(
            "grown_mib",
            "memory of the server after the worst attacker, more than before",
            "MiB",
            target="<= 512",
        ),
        Figure("calm_p99_ms", "p99 of a request with none", "ms"),
        *(
            figure
            for name, says in (
                (NEIGHBOUR, "an honest client with images as large"),
                ("headers", "files with headers that are long to read"),
                ("uploads", "uploads that never end"),
                ("readers", "Fetches that are never read"),
                ("decoders", "images of endless scans, or of many pixels in few bytes"),
                ("messages", "kilobytes that unpack into millions of messages"),
                ("unknown", "Fetches of images that nobody has"),
                ("partial", "messages that are begun and not ended"),
                ("claims", "many Fetches of few images"),
                ("dripping", "HTTP connections that drip"),
                ("watchers", "watchers of health that take no answer; and the server is told to stop"),
                ("refusals", "messages of 50,000 empty sub-messages, which are refused"),
                ("priority", "images of the highest priority, without an end"),
                ("seconds", "images that fill the seconds of the queue"),
                ("large", "images of more pixels than are decoded at a time"),
            )
            for figure in (
                Figure(f"p99_ratio_{name}", f"{says}: p99 / with none"),
                Figure(f"p99_elsewhere_{name}", f"{says}, at another server of the machine: p99 / with none"),
                Figure(f"failed_{name}", f"{says}: failed", "requests"),
            )
        ),
    ),
    limit_s=520,
    quick=("--attacks", "messages"),
)

BUDGET_S = 480.0
PATIENCE_S = 5.0  # of a request; many times what one takes
WARM_S, CALM_S, ATTACK_S = 1.0, 3.0, 7.0
DRAIN_S, HEARD_S = 3, 10.0
SETTINGS: dict[str, Any] = {
    "store_host_gib": 0.05,
    "source_gib": 0.1,
    "max_queued_gib": 0.0625,
    "max_queued_images": 256,
    "threads": HALF_THE_CORES,
    "drain_s": DRAIN_S,
    "log_level": "error",
}
# Of the server that an attacker is alone with.
OWN_SETTINGS: dict[str, dict[str, Any]] = {"seconds": {"max_queue_s": 2.0}}
# Images are resized to a quarter of a megapixel at most: the tiny tower takes milliseconds for each.
PREPROCESSOR = {"size": {"shortest_edge": 65536, "longest_edge": 262144}}


@dataclass
class Felt:
    """What became of requests: seconds of each, and how those that failed did."""

    seconds: list[float] = field(default_factory=list)
    failed: list[str] = field(default_factory=list)

    def add(self, other: "Felt") -> None:
        """Count another round."""
        self.seconds += other.seconds
        self.failed += other.failed

    @property
    def p99_ms(self) -> float:
        """The 99th percentile, milliseconds."""
        return float(np.percentile(self.seconds, 99)) * 1e3

    @property
    def per_s(self) -> float:
        """Requests that succeeded, one after the other, per second."""
        return (len(self.seconds) - len(self.failed)) / sum(self.seconds)


class Victim:
    """A client that does nothing unusual."""

    def __init__(self, client: EncoderClient, channel: grpc.aio.Channel, health_url: str) -> None:
        self._client = client
        self._service = EncoderServiceStub(channel)
        self._health: Any = health_pb2_grpc.HealthStub(channel)
        self._health_url = health_url
        # A JPEG is decoded in batches with others, a PNG by itself.
        self._jpeg, self._png = photo(320, 240, 1), photo(320, 240, 3, "PNG")
        self._known = photo(320, 240, 2)
        self._numbers = itertools.count()

    async def until(self, deadline: float) -> Felt:
        """Make requests one after the other until then."""
        felt = Felt()
        while time.monotonic() < deadline:
            felt.add(await self.request())
        return felt

    async def request(self) -> Felt:
        """Make one request."""
        began = time.monotonic()
        try:
            async with asyncio.timeout(PATIENCE_S):
                await self._ask()
        except TimeoutError:
            return Felt([PATIENCE_S], ["it took too long"])
        except Exception as error:  # noqa: BLE001 - any error is a failed request
            return Felt(
                [max(PATIENCE_S, time.monotonic() - began)], [f"{type(error).__name__}: {error}"[:200]]
            )
        return Felt([time.monotonic() - began])

    async def _ask(self) -> None:
        await self._service.Describe(pb.DescribeRequest())
        await self._health.Check(health_pb2.HealthCheckRequest())
        await asyncio.to_thread(lambda: urllib.request.urlopen(self._health_url, timeout=PATIENCE_S).read())
        number = next(self._numbers)
        photos = [self._known, again(self._png, number) if number % 2 else marked(self._jpeg, number)]
        await submit_and_fetch(self._client, photos, timeout_s=PATIENCE_S)

    async def hear_of_the_end(self) -> None:
        """Watch the server's health until it serves no more."""
        with suppress(grpc.aio.AioRpcError):
            async for answer in self._health.Watch(health_pb2.HealthCheckRequest()):
                if answer.status == health_pb2.HealthCheckResponse.NOT_SERVING:
                    return
        raise AssertionError("its watch ended without a word")


@dataclass
class Beside:
    """What a victim felt of one server: alone, then beside an attacker.

    `grown_mib` is how much larger the server's own memory became beside the attacker.
    `elsewhere` is what the victim felt while the attacker was at another server.
    """

    calm: Felt
    attacked: Felt
    grown_mib: float
    elsewhere: Felt


@asynccontextmanager
async def serving(name: str, model: Path) -> AsyncIterator[tuple[ServerProcess, Target]]:
    """Run a server with the settings of an attack."""
    server = ServerProcess(model, **SETTINGS | OWN_SETTINGS.get(name, {}))
    try:
        await asyncio.to_thread(server.wait_until_it_listens)
        http = server.metrics_url.removeprefix("http://").partition("/")[0]
        yield server, Target(server.endpoint, http)
    finally:
        server.kill()


@asynccontextmanager
async def victim_of(target: Target) -> AsyncIterator[Victim]:
    """Connect a victim."""
    async with (
        await EncoderClient.connect(target.grpc, client_id="victim") as client,
        grpc.aio.insecure_channel(target.grpc) as channel,
    ):
        yield Victim(client, channel, f"http://{target.http}/healthz")


async def beside(name: str, model: Path) -> Beside:
    """Run a server, a victim, and after a while an attacker."""
    async with serving(name, model) as (server, target), victim_of(target) as victim:
        async with serving(name, model) as (_, other):
            with attacking(name, other) as go:
                await victim.until(time.monotonic() + WARM_S)
                go()
                elsewhere = await victim.until(time.monotonic() + ATTACK_S)
        with attacking(name, target) as go:
            await victim.until(time.monotonic() + WARM_S)
            calm = await victim.until(time.monotonic() + CALM_S)
            before_mib = own_mib(server)
            go()
            attacked = await victim.until(time.monotonic() + ATTACK_S)
            grown_mib = max(0.0, own_mib(server) - before_mib)
            if name == "watchers":
                attacked.failed += await end_of(server, victim)
        return Beside(calm, attacked, grown_mib, elsewhere)


def own_mib(server: ServerProcess) -> float:
    """Return a server's memory without what it shares, in MiB."""
    memory = psutil.Process(server.process.pid).memory_info()
    return float(memory.rss - memory.shared) / (1 << 20)


async def end_of(server: ServerProcess, victim: Victim) -> list[str]:
    """Tell the server to stop; return the complaints of its victim and its operator."""
    hearing = asyncio.create_task(victim.hear_of_the_end())
    await asyncio.sleep(0.5)  # until it watches
    server.process.terminate()
    complaints = []
    try:
        async with asyncio.timeout(HEARD_S):
            await hearing
    except (TimeoutError, AssertionError) as error:
        complaints.append(f"its watcher was not told that the server stops ({type(error).__name__})")
    try:
        await asyncio.to_thread(server.process.wait, DRAIN_S + HEARD_S)
    except subprocess.TimeoutExpired:
        complaints.append("the drain did not end")
    return complaints


async def measure(names: Sequence[str], budget: Budget) -> dict[str, Beside]:
    """Go through attacks while there is time; return what was felt beside each."""
    found: dict[str, Beside] = {}
    slowest_s = 0.0
    with tempfile.TemporaryDirectory() as folder:
        model = write_checkpoint(folder, preprocessor=PREPROCESSOR)
        for name in (NEIGHBOUR, *names):
            if not budget.affords(name, slowest_s):
                continue
            began = time.monotonic()
            found[name] = await beside(name, model)
            slowest_s = max(slowest_s, time.monotonic() - began)
            says = f"{len(found[name].attacked.failed)} of {len(found[name].attacked.seconds)} failed"
            print(f"{name}: {time.monotonic() - began:.0f} s, {says}", flush=True)
    return found


def report(found: dict[str, Beside], left_out: list[str]) -> dict[str, Any]:
    """Print the table; return the figures."""
    calm = Felt()
    for each in found.values():
        calm.add(each.calm)
    rows: list[list[str | float]] = [[*_row("no attacker", calm, calm), ""]]
    for name, each in found.items():
        rows.append([*_row(name, each.attacked, calm), each.grown_mib])
        rows.append([*_row(f"{name}, at another server", each.elsewhere, calm), ""])
    rows += [[name, "left out: no time", "", "", "", "", "", ""] for name in left_out]
    heads = ["attack", "requests", "failed", "p50 ms", "p99 ms", "p99 / calm", "per s / calm", "MiB more"]
    table("One well-behaved client beside each attacker", heads, rows)
    for name, each in found.items():
        for complaint, times in Counter(each.attacked.failed).most_common(3):
            print(f"{name}: {times} times: {complaint}")
    ratios = {name: each.attacked.p99_ms / calm.p99_ms for name, each in found.items()}
    worst = max(ratio for name, ratio in ratios.items() if name != NEIGHBOUR)
    speeds = [each.attacked.per_s / calm.per_s for name, each in found.items() if name != NEIGHBOUR]
    return {
        "victim_p99_ratio": worst,
        "victim_throughput_ratio": min(speeds),
        "victim_p99_over_neighbour": worst / ratios[NEIGHBOUR],
        "victim_failed": sum(len(each.attacked.failed) for each in found.values()),
        "grown_mib": max(each.grown_mib for each in found.values()),
        "calm_failed": len(calm.failed),
        "calm_p99_ms": calm.p99_ms,
        "attacks": len(found) - 1,
        "left_out": left_out,
        **{f"p99_ratio_{name}": ratio for name, ratio in ratios.items()},
        **{f"p99_elsewhere_{name}": each.elsewhere.p99_ms / calm.p99_ms for name, each in found.items()},
        **{f"failed_{name}": len(each.attacked.failed) for name, each in found.items()},
    }


def _row(name: str, felt: Felt, calm: Felt) -> list[str | float]:
    counts = [str(len(felt.seconds)), str(len(felt.failed))]
    ratios = [felt.p99_ms / calm.p99_ms, felt.per_s / calm.per_s]
    return [name, *counts, median(felt.seconds) * 1e3, felt.p99_ms, *ratios]


def main() -> None:
    parser = command_line(__doc__)
    parser.add_argument("--attacks", nargs="+", default=list(ATTACKS), choices=list(ATTACKS))
    parser.add_argument(
        "--budget-s", type=float, default=BUDGET_S, help="for all attacks (default %(default)s)"
    )
    given = parser.parse_args()
    transformers.utils.logging.disable_progress_bar()
    budget = Budget(given.budget_s)
    found = asyncio.run(measure(given.attacks, budget))
    tell(report(found, budget.left_out), given)


if __name__ == "__main__":
    main()
