"""Measures what OpenTelemetry spans cost the server's process, with a collector that receives them.

Calls whose `traceparent` is sampled and calls without one alternate at one server. Its tower sleeps as long as an H200
is expected to take, so that a Fetch waits for its images, whose stages have spans of their own. Processor time stands
for throughput: one core hands out all images of a server. Spans are exported every five seconds, as by default.
`spin_ms` is as in bench.edge.
"""

import asyncio
import os
import secrets
import tempfile
from collections.abc import Awaitable, Callable
from functools import partial
from importlib.util import find_spec
from operator import sub, truediv
from pathlib import Path
from statistics import median

from bench.edge import CALLERS, H200_PATCHES_PER_S, SMALL, TOGETHER, EdgeCaller, repeat, server_of
from bench.harness.benchmark import Benchmark, Figure, command_line, print_figures
from bench.harness.timing import cpu_ms, spin_ms
from prefill_client import EncoderClient, traceparent
from testing.checkpoints import write_checkpoint
from testing.collector import collecting

BENCHMARK = Benchmark(
    "spans",
    "What do spans cost?",
    (
        Figure("call_ms", "a sampled call", "ms", "<= 0.3"),
        Figure("sampled_5_over_none", "an image in calls of 16, 5 % sampled / none", target="<= 1.01"),
        Figure("sampled_over_none", "the same, all sampled / none"),
        Figure("spin_ms", "a fixed piece of Python (a quiet core: 20)", "ms"),
    ),
    limit_s=540,
    dry_run=("--ops", "2", "--rounds", "1"),
    why_not=lambda: "" if find_spec("rotel") else "needs the collector Rotel, which is for Linux",
)
EXPORT_S = 5.0  # the default of OTEL_BSP_SCHEDULE_DELAY
SPINS = 10
CALLS_OF_AN_IMAGE = 2  # a Submit and a Fetch


def sampling(operation: Callable[[], Awaitable[None]], every: int) -> Callable[[], Awaitable[None]]:
    """Return an operation whose calls are sampled every so many times; 0: never."""
    count = 0

    async def run() -> None:
        nonlocal count
        count += 1
        if every and count % every == 0:
            token = traceparent.set(f"00-{secrets.token_hex(16)}-{secrets.token_hex(8)}-01")
            try:
                await operation()
            finally:
                traceparent.reset(token)
        else:
            await operation()

    return run


async def cost(process: int, operation: Callable[[], Awaitable[None]], ops: int, images: int) -> float:
    """Return the processor time of `process` for an image, milliseconds, including the export of its spans."""
    before = cpu_ms(process)
    await repeat(operation, ops)
    await asyncio.sleep(EXPORT_S + 0.5)
    return (cpu_ms(process) - before) / (ops * CALLERS * images)


async def figures_of(model: Path, ops: int, rounds: int) -> dict[str, float]:
    """Measure one server, `rounds` times each way."""
    one: dict[int, list[float]] = {0: [], 1: []}
    together: dict[int, list[float]] = {0: [], 1: [], 20: []}
    spins: list[float] = []
    with collecting() as collector:
        os.environ.update(collector.environment)
        with server_of(model, 1, H200_PATCHES_PER_S) as server:
            async with await EncoderClient.connect(server.endpoint) as client:
                images, process = EdgeCaller(client, *SMALL), server.process.pid
                await repeat(partial(images.encode, TOGETHER), 2)  # warm up
                for _ in range(rounds):
                    spins += [spin_ms() for _ in range(SPINS)]
                    for every, found in one.items():
                        encode = sampling(partial(images.encode, 1), every)
                        found.append(await cost(process, encode, 4 * ops, 1))
                    for every, found in together.items():
                        encode = sampling(partial(images.encode, TOGETHER), every)
                        found.append(await cost(process, encode, ops, TOGETHER))
        received = len(collector.spans())
    added_ms = median(map(sub, one[1], one[0]))
    # A core's speed changes from minute to minute, so each round is compared with itself.
    over_none = {every: median(map(truediv, found, together[0])) for every, found in together.items()}
    return {
        "call_ms": added_ms / CALLS_OF_AN_IMAGE,
        "one_plain_ms": median(one[0]),
        "one_sampled_ms": median(one[1]),
        "together_plain_ms": median(together[0]),
        "sampled_5_over_none": over_none[20],
        "sampled_over_none": over_none[1],
        "twentieth_of_sampled": 1 + (over_none[1] - 1) / 20,
        "spin_ms": median(spins),
        "spans": received,
    }


def main() -> None:
    parser = command_line(__doc__)
    parser.add_argument("--ops", type=int, default=20, help=f"operations of each of {CALLERS} callers")
    parser.add_argument("--rounds", type=int, default=9, help="measurements of each kind, in turn")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        model = write_checkpoint(folder)
        print_figures(asyncio.run(figures_of(model, args.ops, args.rounds)), args)


if __name__ == "__main__":
    main()
