"""Measures what OpenTelemetry spans cost the server's process, with a collector that receives them.

Calls whose `traceparent` is sampled and calls without one alternate at one server, beside a tower that costs nothing.
Processor time stands for throughput: one core hands out all images of a server.
"""

import asyncio
import os
import secrets
import tempfile
from collections.abc import Awaitable, Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from statistics import median
from typing import Any

import grpc

from bench.edge import CALLERS, SMALL, TOGETHER, EdgeCaller, measure, server_of
from bench.harness.benchmark import Benchmark, Figure, command_line, print_figures
from encoder_contract.spans import ENDPOINTS
from prefill_client import EncoderClient, traceparent
from testing.checkpoints import write_checkpoint

BENCHMARK = Benchmark(
    "spans",
    "What do spans cost?",
    (
        Figure("call_ms", "a sampled call, processor time of the server", "ms", "<= 0.3"),
        Figure("sampled_5_over_none", "an image, 5 % of calls sampled / none", target="<= 1.01"),
        Figure("sampled_over_none", "an image in calls of 16, all sampled / none", shown=True),
        Figure("spans", "spans that the collector received"),
    ),
    limit_s=240,
    quick=("--ops", "2", "--rounds", "1"),
    why_not=lambda: "" if find_spec("opentelemetry.exporter") else "needs the extra otel",
)
EXPORT_S = 0.2
CALLS_OF_AN_IMAGE = 2  # a Submit and a Fetch
EXPORT = "/opentelemetry.proto.collector.trace.v1.TraceService/Export"


class Collector(grpc.GenericRpcHandler):
    """Receives spans over OTLP, as a collector does, and counts them."""

    def __init__(self) -> None:
        self.spans = 0

    def service(
        self, handler_call_details: grpc.HandlerCallDetails
    ) -> "grpc.RpcMethodHandler[Any, Any] | None":
        """Return the handler of the one call of OTLP's trace service."""
        from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import (
            ExportTraceServiceRequest,
            ExportTraceServiceResponse,
        )

        if handler_call_details.method != EXPORT:
            return None

        def received(request: ExportTraceServiceRequest, _: object) -> ExportTraceServiceResponse:
            self.spans += sum(
                len(scope.spans) for resource in request.resource_spans for scope in resource.scope_spans
            )
            return ExportTraceServiceResponse()

        return grpc.unary_unary_rpc_method_handler(
            received, ExportTraceServiceRequest.FromString, ExportTraceServiceResponse.SerializeToString
        )


@contextmanager
def collecting() -> Iterator[Collector]:
    """Run a collector to which servers that are started meanwhile export their spans."""
    collector = Collector()
    server = grpc.server(ThreadPoolExecutor(2), handlers=[collector])
    port = server.add_insecure_port("127.0.0.1:0")
    # By default, the spans of one measurement are exported during the next.
    settings = {ENDPOINTS[0]: f"http://127.0.0.1:{port}", "OTEL_BSP_SCHEDULE_DELAY": f"{EXPORT_S * 1000:.0f}"}
    os.environ.update(settings)
    server.start()
    try:
        yield collector
    finally:
        for name in settings:
            del os.environ[name]
        server.stop(1).wait()


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
    """Return the processor time of `process` for an image, milliseconds, and wait until its spans were exported."""
    spent_ms, _ = await measure(process, operation, ops, images)
    await asyncio.sleep(2 * EXPORT_S)
    return spent_ms


async def figures_of(model: Path, ops: int, rounds: int) -> dict[str, float]:
    """Measure one server, `rounds` times each way."""
    one: dict[int, list[float]] = {0: [], 1: []}
    together: dict[int, list[float]] = {0: [], 1: [], 20: []}
    with collecting() as collector, server_of(model, 1, 0.0) as server:
        async with await EncoderClient.connect(server.endpoint) as client:
            images, process = EdgeCaller(client, *SMALL), server.process.pid
            for _ in range(rounds):
                for every, found in one.items():
                    encode = sampling(partial(images.encode, 1), every)
                    found.append(await cost(process, encode, 4 * ops, 1))
                for every, found in together.items():
                    encode = sampling(partial(images.encode, TOGETHER), every)
                    found.append(await cost(process, encode, ops, TOGETHER))
    plain, sampled = median(one[0]), median(one[1])
    base = median(together[0])
    return {
        "call_ms": (sampled - plain) / CALLS_OF_AN_IMAGE,
        "one_plain_ms": plain,
        "one_sampled_ms": sampled,
        "together_plain_ms": base,
        "sampled_5_over_none": median(together[20]) / base,
        "sampled_over_none": median(together[1]) / base,
        "spans": collector.spans,
    }


def main() -> None:
    parser = command_line(__doc__)
    parser.add_argument("--ops", type=int, default=20, help=f"operations of each of {CALLERS} callers")
    parser.add_argument("--rounds", type=int, default=5, help="measurements of each kind, in turn")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        model = write_checkpoint(folder)
        print_figures(asyncio.run(figures_of(model, args.ops, args.rounds)), args)


if __name__ == "__main__":
    main()
