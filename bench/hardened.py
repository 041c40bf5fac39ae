"""Compares the slowest requests of a well-behaved client during each attack with its slowest without attackers.

The server is a real process with small limits, which an attacker reaches soon. In each request the victim asks for the
description and the health, submits two photos, of which one is new, and fetches their rows, those of the known one also
by the rows port. It makes requests one by one, first alone, then during the attack. Each attacker gets a new server,
and calls from another address than the victim, since the callers of one host share what it may use. A failed request
counts as failed, and its time counts as at least the victim's patience. The first
"attacker" is an honest neighbour, whose images are as large as the attackers': it shows the cost of sharing a server.
During the attack `watchers` the server is also told to stop. It must notify the victim's health watcher, and end.

Before the attack, the attacker attacks a second server on the same machine for a while. The victim of the first server
then measures the cost of sharing the processors, which no server can reduce. The processor time of the event loop,
divided by the Submits and Fetches of all callers that ended meanwhile, depends on no other load of the machine.

A run measures the attacks that were measured longest ago, as many as fit into its time. Its result has the others as
they were measured before, each with its day and commit: its ratios are to the calm and the neighbour of its own run.
"""

import asyncio
import hashlib
import itertools
import resource
import secrets
import subprocess
import tempfile
import time
import urllib.request
from collections import Counter
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import AsyncExitStack, asynccontextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median
from typing import Any, Self

import grpc
import numpy as np
import psutil
import transformers
from grpc_health.v1 import health_pb2, health_pb2_grpc

from bench.harness import results
from bench.harness.benchmark import Benchmark, Figure, command_line, print_figures, table
from bench.harness.budget import TimeBudget
from bench.harness.calls import fetch_all, submit_and_fetch
from encoder_contract.digest import content_digest
from encoder_contract.v1 import encoder_pb2 as pb
from encoder_contract.v1.encoder_pb2_grpc import EncoderServiceStub
from prefill_client import Credentials, EncoderClient
from testing.attacks import ATTACKS, attacking
from testing.checkpoints import SMALL_IMAGES, write_checkpoint
from testing.hostile_images import with_trailer
from testing.photos import photo, with_comment
from testing.server_process import HALF_THE_CORES, ServerProcess

NEIGHBOUR = "neighbour"
BENCHMARK = Benchmark(
    "hardened",
    "What does a well-behaved client feel while others attack?",
    (
        Figure(
            "victim_p99_ratio",
            "p99 of a request beside the worst attacker / with none",
            target="<= 2",
            summary="p99 of an honest client: beside the worst attacker ÷ alone",
        ),
        Figure("victim_failed", "requests failed beside all attackers", target="<= 0"),
        Figure(
            "victim_throughput_ratio",
            "requests a second beside the worst attacker / with none",
            target=">= 0.8",
        ),
        Figure(
            "grown_mib",
            "memory of the server after the worst attacker, more than before",
            "MiB",
            target="<= 512",
        ),
    ),
    limit_s=520,
    dry_run=("--attacks", "messages"),
    parts="by_attack",
)

BUDGET_S = 480.0
PATIENCE_S = 5.0  # the timeout of a request, many times its usual duration
WARM_S, CALM_S, ATTACK_S = 1.0, 3.0, 7.0
DRAIN_S, NOTIFIED_S = 3, 10.0
SETTINGS: dict[str, Any] = {
    "store_host_gib": 0.05,
    "source_gib": 0.1,
    "max_queued_gib": 0.0625,
    "max_queued_images": 256,
    "threads": HALF_THE_CORES,
    "drain_s": DRAIN_S,
    "log_level": "error",
    "rows_listen": "127.0.0.1:0",
}
# Settings of the server for one attack.
ATTACK_SETTINGS: dict[str, dict[str, Any]] = {
    "seconds": {"max_queue_s": 2.0},
    "strangers": {"tenants_file": "tenants.toml", "fleet_key_file": "fleet.key"},  # in the benchmark's folder
}
TOKEN = "of-the-victim"


@dataclass
class RequestOutcomes:
    """The outcomes of requests: the seconds of each, and the errors of those that failed."""

    seconds: list[float] = field(default_factory=list)
    errors: list[str] = field(default_factory=list)

    def add(self, other: "RequestOutcomes") -> None:
        """Add the outcomes of other requests."""
        self.seconds += other.seconds
        self.errors += other.errors

    @property
    def p99_ms(self) -> float:
        """The 99th percentile in milliseconds."""
        return float(np.percentile(self.seconds, 99)) * 1e3

    @property
    def per_s(self) -> float:
        """The rate of the requests that succeeded. Requests are made one by one."""
        return (len(self.seconds) - len(self.errors)) / sum(self.seconds)


@dataclass(frozen=True)
class LoopWork:
    """Seconds of processor time of the server's event loop, and the Submits and Fetches that ended meanwhile."""

    cpu_s: float = 0.0
    calls: float = 0.0

    @classmethod
    def so_far(cls, server: ServerProcess) -> Self:
        """Return the work since the server's start. Its event loop runs on its main thread."""
        threads = {each.id: each for each in psutil.Process(server.process.pid).threads()}
        loop = threads[server.process.pid]
        return cls(loop.user_time + loop.system_time, server.metrics().total("calls_total"))

    def __add__(self, other: Self) -> "LoopWork":
        return LoopWork(self.cpu_s + other.cpu_s, self.calls + other.calls)

    def __sub__(self, other: Self) -> "LoopWork":
        return LoopWork(self.cpu_s - other.cpu_s, self.calls - other.calls)

    @property
    def ms_a_call(self) -> float:
        """Milliseconds for each call."""
        return self.cpu_s * 1e3 / max(1.0, self.calls)


class Victim:
    """A client that behaves well."""

    def __init__(self, client: EncoderClient, channel: grpc.aio.Channel, health_url: str) -> None:
        self._client = client
        self._metadata = (("authorization", f"Bearer {TOKEN}"),)
        self._service = EncoderServiceStub(channel)
        self._health: Any = health_pb2_grpc.HealthStub(channel)
        self._health_url = health_url
        # A JPEG is decoded in a batch with others, a PNG as a single image.
        self._jpeg, self._png = photo(320, 240, 1), photo(320, 240, 3, "PNG")
        self._known = photo(320, 240, 2)
        self._numbers = itertools.count()

    async def run_for(self, seconds: float) -> RequestOutcomes:
        """Make requests one by one for a while."""
        deadline = time.monotonic() + seconds
        requests = RequestOutcomes()
        while time.monotonic() < deadline:
            requests.add(await self._request())
        return requests

    async def _request(self) -> RequestOutcomes:
        began = time.monotonic()
        try:
            async with asyncio.timeout(PATIENCE_S):
                await self._ask()
        except TimeoutError:
            return RequestOutcomes([PATIENCE_S], ["it took too long"])
        except Exception as error:  # noqa: BLE001 - any error is a failed request
            took_s = max(PATIENCE_S, time.monotonic() - began)
            return RequestOutcomes([took_s], [f"{type(error).__name__}: {error}"[:200]])
        return RequestOutcomes([time.monotonic() - began])

    async def _ask(self) -> None:
        await self._service.Describe(pb.DescribeRequest(), metadata=self._metadata)
        await self._health.Check(health_pb2.HealthCheckRequest())
        await asyncio.to_thread(lambda: urllib.request.urlopen(self._health_url, timeout=PATIENCE_S).read())
        number = next(self._numbers)
        new = with_trailer(self._png, number) if number % 2 else with_comment(self._jpeg, number)
        await submit_and_fetch(self._client, [self._known, new], timeout_s=PATIENCE_S)
        await fetch_all(self._client, [content_digest(self._known)], transports=["tcp"], timeout_s=PATIENCE_S)

    async def watch_until_not_serving(self) -> None:
        """Watch the server's health until it is NOT_SERVING."""
        with suppress(grpc.aio.AioRpcError):
            async for answer in self._health.Watch(health_pb2.HealthCheckRequest()):
                if answer.status == health_pb2.HealthCheckResponse.NOT_SERVING:
                    return
        raise AssertionError("its watch ended without NOT_SERVING")


@dataclass
class Measured:
    """The victim's requests to one server, in the order in which they were made.

    `elsewhere`: while the attacker attacked another server; `calm`: with no attacker; `attacked`: beside the attacker.
    `calm_work` and `attacked_work` are the event loop's meanwhile, for all callers. `grown_mib` is the growth of the
    server's own memory during the attack, and of the kernel's for its connections.
    """

    elsewhere: RequestOutcomes
    calm: RequestOutcomes
    attacked: RequestOutcomes
    calm_work: LoopWork
    attacked_work: LoopWork
    grown_mib: float


@asynccontextmanager
async def serving(name: str, model: Path) -> AsyncIterator[ServerProcess]:
    """Run a server with the settings of an attack."""
    settings = ATTACK_SETTINGS.get(name, {})
    files = {key: model.parent / value for key, value in settings.items() if isinstance(value, str)}
    server = ServerProcess(model, **SETTINGS | settings | files)
    try:
        await asyncio.to_thread(server.wait_until_it_listens)
        yield server
    finally:
        server.kill()


@asynccontextmanager
async def victim_of(server: ServerProcess, folder: Path) -> AsyncIterator[Victim]:
    """Connect a victim, with its token in the benchmark's folder."""
    credentials = Credentials(token_file=str(folder / "token"))
    async with (
        await EncoderClient.connect(server.endpoint, credentials=credentials) as client,
        grpc.aio.insecure_channel(server.endpoint) as channel,
    ):
        yield Victim(client, channel, f"http://{server.http_endpoint}/healthz")


async def measure_attack(name: str, model: Path) -> Measured:
    """Run a server, a victim and an attacker, which first attacks another server, then this one."""
    async with AsyncExitStack() as stack, AsyncExitStack() as elsewhere_stack:
        server, other = await asyncio.gather(  # the start of a server takes seconds
            stack.enter_async_context(serving(name, model)),
            elsewhere_stack.enter_async_context(serving(name, model)),
        )
        victim = await stack.enter_async_context(victim_of(server, model.parent))
        with attacking(name, other) as go:
            await victim.run_for(WARM_S)
            go()
            elsewhere = await victim.run_for(ATTACK_S)
        await elsewhere_stack.aclose()  # it would go on with what the attacker has sent
        with attacking(name, server) as go:
            await victim.run_for(WARM_S)
            began = await work_of(server)
            calm = await victim.run_for(CALM_S)
            before, before_mib = await work_of(server), unshared_mib(server)
            go()
            attacked = await victim.run_for(ATTACK_S)
            after, grown_mib = await work_of(server), max(0.0, unshared_mib(server) - before_mib)
            if name == "watchers":
                attacked.errors += await stop(server, victim)
        return Measured(elsewhere, calm, attacked, before - began, after - before, grown_mib)


async def work_of(server: ServerProcess) -> LoopWork:
    """Return the work of a server's event loop so far."""
    return await asyncio.to_thread(LoopWork.so_far, server)


def write_tenant(folder: Path) -> None:
    """Write the victim's token, and the files of a server whose only tenant is the victim."""
    hashed = hashlib.sha256(TOKEN.encode()).hexdigest()
    (folder / "token").write_text(TOKEN)
    (folder / "tenants.toml").write_text(f'[victim]\ntokens = ["{hashed}"]\nrights = ["submit", "fetch"]\n')
    (folder / "fleet.key").write_text(secrets.token_hex(16))


def unshared_mib(server: ServerProcess) -> float:
    """Return the memory of a server without shared memory, in MiB, and that of the kernel for its connections."""
    memory = psutil.Process(server.process.pid).memory_info()
    return float(memory.rss - memory.shared) / (1 << 20) + tcp_mib()


def tcp_mib() -> float:
    """Return the kernel's memory for the TCP connections of this machine, in MiB: most are the server's."""
    (line,) = [
        line for line in Path("/proc/net/sockstat").read_text().splitlines() if line.startswith("TCP:")
    ]
    words = line.split()
    return int(words[words.index("mem") + 1]) * resource.getpagesize() / (1 << 20)


async def stop(server: ServerProcess, victim: Victim) -> list[str]:
    """Stop the server; return an error if it does not notify the victim's watcher or does not end."""
    watching = asyncio.create_task(victim.watch_until_not_serving())
    await asyncio.sleep(0.5)  # until the watch has started
    server.process.terminate()
    errors = []
    try:
        async with asyncio.timeout(NOTIFIED_S):
            await watching
    except (TimeoutError, AssertionError) as error:
        errors.append(f"its watcher was not told that the server stops ({type(error).__name__})")
    try:
        await asyncio.to_thread(server.process.wait, DRAIN_S + NOTIFIED_S)
    except subprocess.TimeoutExpired:
        errors.append("the drain did not end")
    return errors


async def measure(names: Sequence[str], budget: TimeBudget) -> dict[str, Measured]:
    """Measure the neighbour, then as many attacks as there is time for."""
    found: dict[str, Measured] = {}
    slowest_s = 0.0
    with tempfile.TemporaryDirectory() as folder:
        resizing = write_checkpoint(Path(folder) / "resizing", preprocessor=SMALL_IMAGES)
        as_they_are = write_checkpoint(Path(folder) / "as they are")
        write_tenant(Path(folder))
        for name in (NEIGHBOUR, *names):
            if not budget.affords(name, slowest_s):
                continue
            began = time.monotonic()
            found[name] = await measure_attack(name, as_they_are if name == "towers" else resizing)
            took_s, attacked = time.monotonic() - began, found[name].attacked
            slowest_s = max(slowest_s, took_s)
            print(
                f"{name}: {took_s:.0f} s, {len(attacked.errors)} of {len(attacked.seconds)} failed",
                flush=True,
            )
    return found


def report(found: dict[str, Measured]) -> dict[str, Any]:
    """Print the table of this run; return its figures of each attack, by name."""
    calm, calm_work = RequestOutcomes(), LoopWork()
    for each in found.values():
        calm.add(each.calm)
        calm_work += each.calm_work
    neighbour = found[NEIGHBOUR].attacked
    rows: list[list[str | float]] = [[*_row("no attacker", calm, calm, neighbour), calm_work.ms_a_call, ""]]
    for name, each in found.items():
        beside = _row(name, each.attacked, calm, neighbour)
        rows.append([*beside, each.attacked_work.ms_a_call, each.grown_mib])
        rows.append([*_row(f"{name}, at another server", each.elsewhere, calm, neighbour), "", ""])
    table("One well-behaved client beside each attacker", HEADS, rows)
    for name, each in found.items():
        for error, times in Counter(each.attacked.errors).most_common(3):
            print(f"{name}: {times} times: {error}")
    return {
        name: {
            "p99_ratio": each.attacked.p99_ms / calm.p99_ms,
            "p99_over_neighbour": each.attacked.p99_ms / neighbour.p99_ms,
            "p99_elsewhere": each.elsewhere.p99_ms / calm.p99_ms,
            "throughput_ratio": each.attacked.per_s / calm.per_s,
            "throughput_over_neighbour": each.attacked.per_s / neighbour.per_s,
            "loop_ms": each.attacked_work.ms_a_call,
            "grown_mib": each.grown_mib,
            "failed": len(each.attacked.errors),
            "calm_p99_ms": calm.p99_ms,
            "calm_loop_ms": calm_work.ms_a_call,
            "measured_at": results.now(),
            "commit": results.versions()["commit"],
        }
        for name, each in found.items()
    }


def figures_of(by_attack: Mapping[str, Mapping[str, Any]]) -> dict[str, Any]:
    """Return the figures of a result: the worst of all attacks, and those of each."""
    attacks = [each for name, each in by_attack.items() if name != NEIGHBOUR]
    return {
        "victim_p99_ratio": max(each["p99_ratio"] for each in attacks),
        "victim_throughput_ratio": min(each["throughput_ratio"] for each in attacks),
        "victim_p99_over_neighbour": max(each["p99_over_neighbour"] for each in attacks),
        "victim_throughput_over_neighbour": min(each["throughput_over_neighbour"] for each in attacks),
        "victim_failed": sum(each["failed"] for each in by_attack.values()),
        "grown_mib": max(each["grown_mib"] for each in by_attack.values()),
        "calm_p99_ms": by_attack[NEIGHBOUR]["calm_p99_ms"],
        "calm_loop_ms": by_attack[NEIGHBOUR]["calm_loop_ms"],
        "attacks": len(attacks),
        "by_attack": by_attack,
    }


HEADS = (
    *("attack", "requests", "failed", "p50 ms", "p99 ms", "p99 / calm", "p99 / neighbour", "per s / calm"),
    *("loop ms / call", "MiB more"),
)


def _row(
    name: str, requests: RequestOutcomes, calm: RequestOutcomes, neighbour: RequestOutcomes
) -> list[str | float]:
    counts = [str(len(requests.seconds)), str(len(requests.errors))]
    p99_ms = requests.p99_ms
    ratios = [p99_ms / calm.p99_ms, p99_ms / neighbour.p99_ms, requests.per_s / calm.per_s]
    return [name, *counts, median(requests.seconds) * 1e3, p99_ms, *ratios]


def main() -> None:
    parser = command_line(__doc__, budget_s=BUDGET_S)
    parser.add_argument("--attacks", nargs="+", choices=list(ATTACKS), help="only these")
    args = parser.parse_args()
    transformers.utils.logging.disable_progress_bar()
    earlier = results.earlier_figures("hardened").get("by_attack", {})
    known = {name: figures for name, figures in earlier.items() if name in (NEIGHBOUR, *ATTACKS)}
    oldest_first = sorted(ATTACKS, key=lambda name: known[name]["measured_at"] if name in known else "")
    found = asyncio.run(measure(args.attacks or oldest_first, TimeBudget(args.budget_s)))
    print_figures(figures_of(known | report(found)), args)


if __name__ == "__main__":
    main()
