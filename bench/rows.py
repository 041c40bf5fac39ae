"""Measures rows that go to another host: over the rows port, inline, and over a bare gRPC stream, in turn.

All run over the loopback of one machine, so a network's own limits are not in the figures. Processor time is that of
the server's and the client's process together.
"""

import asyncio
import tempfile
import time
from collections import defaultdict
from collections.abc import Awaitable, Callable, Mapping, Sequence
from functools import partial
from os import getpid
from pathlib import Path
from statistics import median, quantiles
from typing import Any, NamedTuple

import grpc

from bench.harness.benchmark import Benchmark, Figure, command_line, print_figures
from bench.harness.timing import cpu_ms
from bench.serving import lag_p99_s
from bench.transport.bare import Bare, bare_server, read_bare
from bench.transport.hits import fetch, submitted, wide_checkpoint
from encoder_service.metrics import ScrapeDelta
from prefill_client import Credentials, EncoderClient, RowRequest
from prefill_client.transport.channels import Channels
from testing.certificates import HOSTS, Authority
from testing.photos import photo
from testing.server_process import ServerProcess, running

BENCHMARK = Benchmark(
    "rows",
    "What do rows cost on their way to another host?",
    (
        Figure("cpu_over_bare", "processor time", target="<= 0.4"),
        Figure("rate_over_bare", "GB/s, one image", target=">= 1.5"),
        Figure("four_over_bare", "GB/s, four at once", target=">= 2"),
        Figure("tls_cpu_over_bare", "processor time, TLS", target="<= 0.9"),
        Figure("small_over_inline", "2.1 MB hit over inline, p50", target="<= 1"),
        Figure("client_late_ms", "client's loop late at 1 GB/s, p99", "ms", "<= 5"),
        Figure("server_late_ms", "server's loop late at 1 GB/s, p99", "ms", "<= 5"),
    ),
    limit_s=240,
    dry_run=("--rounds", "1", "--seconds", "0.5"),
)

Figures = dict[str, float]
Read = Callable[[], Awaitable[object]]


class Way(NamedTuple):
    """One way of rows to this process: how to read an image, and the process that sends it."""

    read: Read
    sender: int


class Cost(NamedTuple):
    """What one reading took: seconds, and processor seconds of both processes."""

    s: float
    cpu_s: float


async def cost(way: Way, at_once: int) -> Cost:
    """Read an image `at_once` times together."""
    began, cpu = time.perf_counter(), cpu_ms(getpid()) + cpu_ms(way.sender)
    await asyncio.gather(*(way.read() for _ in range(at_once)))
    return Cost(time.perf_counter() - began, (cpu_ms(getpid()) + cpu_ms(way.sender) - cpu) / 1e3)


async def costs(ways: Mapping[str, Way], rounds: int, at_once: int = 1) -> dict[str, list[Cost]]:
    """Return the costs of each way; the ways alternate. The first round warms them up and is not counted."""
    found: defaultdict[str, list[Cost]] = defaultdict(list)
    for _ in range(rounds + 1):
        for name, way in ways.items():
            found[name].append(await cost(way, at_once))
    return {name: each[1:] for name, each in found.items()}


async def plain_figures(server: ServerProcess, rounds: int, seconds: float) -> Figures:
    """Compare the rows port with inline rows and a bare stream, without TLS."""
    async with await EncoderClient.connect(server.endpoint) as client:
        large = await submitted(client, [photo(1280, 720, seed=0)])
        small = await submitted(client, [photo(256, 256, seed=0)])
        size = await fetch(client, large, "inline")
        with bare_server(size) as bare:
            async with Channels(Credentials()).open(bare.endpoint) as channel:
                ways = _ways(client, large, server, bare, channel)
                one = await costs(ways, rounds)
                four = await costs(ways, max(1, rounds // 4), at_once=4)
        smalls = {
            name: Way(partial(fetch, client, small, name), server.process.pid) for name in ("tcp", "inline")
        }
        hits = await costs(smalls, 4 * rounds)
        late = await _lateness(client, large, size, server, seconds)
    gb = size / 1e9
    s = {name: median(each.s for each in found) for name, found in one.items()}
    cpu = {name: median(each.cpu_s for each in found) / gb for name, found in one.items()}
    four_s = {name: median(each.s for each in found) for name, found in four.items()}
    small_s = {name: median(each.s for each in found) for name, found in hits.items()}
    return {
        **{f"{name}_gbps": gb / each for name, each in s.items()},
        **{f"{name}_four_gbps": 4 * gb / each for name, each in four_s.items()},
        **{f"{name}_cpu_s_per_gb": each for name, each in cpu.items()},
        "cpu_over_bare": cpu["tcp"] / cpu["bare"],
        "inline_cpu_over_bare": cpu["inline"] / cpu["bare"],
        "rate_over_bare": s["bare"] / s["tcp"],
        "four_over_bare": four_s["bare"] / four_s["tcp"],
        "small_ms": small_s["tcp"] * 1e3,
        "small_over_inline": small_s["tcp"] / small_s["inline"],
        **late,
    }


def _ways(
    client: EncoderClient,
    requests: Sequence[RowRequest],
    server: ServerProcess,
    bare: Bare,
    channel: grpc.aio.Channel,
) -> dict[str, Way]:
    ours = {
        name: Way(partial(fetch, client, requests, name), server.process.pid) for name in ("tcp", "inline")
    }
    into = memoryview(bytearray(bare.size_bytes))
    return {**ours, "bare": Way(partial(read_bare, channel, bare.size_bytes, into), bare.process_id)}


async def tls_figures(
    server: ServerProcess, credentials: Credentials, issued: Sequence[str], rounds: int
) -> Figures:
    """Compare the rows port with inline rows and a bare stream, all with TLS."""
    async with await EncoderClient.connect(server.endpoint, credentials=credentials) as client:
        requests = await submitted(client, [photo(1280, 720, seed=0)])
        size = await fetch(client, requests, "inline")
        with bare_server(size, issued) as bare:
            async with Channels(credentials).open(bare.endpoint) as channel:
                found = await costs(_ways(client, requests, server, bare, channel), rounds)
    gb = size / 1e9
    cpu = {name: median(each.cpu_s for each in one) / gb for name, one in found.items()}
    s = {name: median(each.s for each in one) for name, one in found.items()}
    return {
        **{f"tls_{name}_cpu_s_per_gb": each for name, each in cpu.items()},
        "tls_cpu_over_bare": cpu["tcp"] / cpu["bare"],
        "tls_gbps": gb / s["tcp"],
        "tls_rate_over_bare": s["bare"] / s["tcp"],
    }


async def _lateness(
    client: EncoderClient, requests: Sequence[RowRequest], size: int, server: ServerProcess, seconds: float
) -> Figures:
    """Move about 1 GB/s by the rows port, and measure how late both event loops are meanwhile."""
    late_ms: list[float] = []

    async def sample() -> None:
        while True:
            due = time.perf_counter() + 0.001
            await asyncio.sleep(0.001)
            late_ms.append((time.perf_counter() - due) * 1e3)

    before, sampling = server.metrics(), asyncio.create_task(sample())
    began, fetched = time.perf_counter(), 0
    while (passed := time.perf_counter() - began) < seconds:
        await fetch(client, requests, "tcp")
        fetched += 1
        await asyncio.sleep(fetched * size / 1e9 - passed)
    sampling.cancel()
    moved = fetched * size / 1e9 / (time.perf_counter() - began)
    late_s = lag_p99_s(ScrapeDelta(before, server.metrics(), seconds))
    return {
        "client_late_ms": quantiles(late_ms, n=100)[98],
        "server_late_ms": late_s * 1e3,
        "moved_gbps": moved,
    }


async def measure(rounds: int, seconds: float) -> Figures:
    """Return all figures, from two servers."""
    with tempfile.TemporaryDirectory() as folder:
        model = wide_checkpoint(Path(folder) / "model")
        authority = Authority()
        credentials = Credentials(authority.write(Path(folder) / "ca.pem"))
        issued = authority.issue(Path(folder), "server", HOSTS)
        settings: dict[str, Any] = {"devices": "cpu", "store_host_gib": 0.5, "rows_listen": "127.0.0.1:0"}
        with running(model, **settings) as server:
            figures = await plain_figures(server, rounds, seconds)
        with running(model, **settings, tls_cert=issued.cert, tls_key=issued.key) as server:
            return figures | await tls_figures(server, credentials, issued, rounds)


def main() -> None:
    parser = command_line(__doc__)
    parser.add_argument("--rounds", type=int, default=20, help="images by each way")
    parser.add_argument("--seconds", type=float, default=10.0, help="how long 1 GB/s moves")
    args = parser.parse_args()
    print_figures(asyncio.run(measure(args.rounds, args.seconds)), args)


if __name__ == "__main__":
    main()
