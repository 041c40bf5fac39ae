"""A store that engines share: towers run once for an image, what putting costs, and producers that are killed.

A real server that only stores, engines and producers as processes of their own; the towers are simulated (they wait,
and a name decides its rows), so that every row that anybody reads can be checked.
"""

import argparse
import asyncio
import json
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
import transformers

from bench.harness.benchmark import Benchmark, Figure
from bench.sharing.engine import encodes_alone, requests
from bench.sharing.producers import IMAGES_AHEAD, newest
from bench.sharing.puts import put_figures
from bench.sharing.towers import PRODUCER, image_of, request_of, rows_of
from encoder_contract.errors import EncoderError
from prefill_client import EncoderClient
from testing.checkpoints import write_checkpoint
from testing.server_process import running

LEASE_S = 3.0
BENCHMARK = Benchmark(
    "shared_store",
    "What does a store give that engines share?",
    (
        Figure(
            "encodes_per_image",
            "eight engines, 200 images, 80 % reuse, bursts on cold names: encodes per image",
            target="<= 1",
        ),
        Figure("encodes_per_image_alone", "the same, each engine alone with an LRU, of the same size in all"),
        Figure("put_inline_gbps", "28.8 MB of rows put inline", "GB/s"),
        Figure("put_bare_gbps", "a bare gRPC stream of as many bytes upwards", "GB/s"),
        Figure("put_over_bare", "inline / bare stream", target=">= 0.8"),
        Figure("put_shm_ms", "28.8 MB of rows put through shared memory, p50", "ms", "<= 8"),
        Figure("killed", "producers killed at random moments"),
        Figure("wrong_rows", "rows read that are not those of their image", target="<= 0"),
        Figure("stuck_keys", "images that nobody may compute a lease's time later", target="<= 0"),
        Figure("untyped_errors", "readers that ended in no rows and no error of ours", target="<= 0"),
        Figure(
            "slowest_reader_over_lease_s",
            "longest that a reader waited beyond the lease's time",
            "s",
            "<= 1",
        ),
        Figure("reads", "images read meanwhile, with their rows"),
    ),
    limit_s=420,
    arguments=("--producers", "1000"),
    quick=("--producers", "20", "--images", "16", "--rounds", "3"),
)

ENGINES, READERS, AT_A_TIME = 8, 4, 8
SEED = 1

Figures = dict[str, float]


@contextmanager
def store() -> Iterator[str]:
    """Run a server that only stores, with rows as wide as Qwen3-VL-8B's; give its address."""
    transformers.utils.logging.disable_progress_bar()
    with tempfile.TemporaryDirectory() as folder:
        wide = {"out_hidden_size": 4096}
        model = write_checkpoint(Path(folder), dtype=torch.bfloat16, text_layers=1, depth=3, vision=wide)
        settings: dict[str, Any] = {
            "store_only": "yes",
            "accept_put": "yes",
            "put_lease_s": LEASE_S,
            "store_host_gib": 1,
        }
        with running(model, **settings) as server:
            yield server.endpoint


def sharing_figures(endpoint: str, images: int) -> Figures:
    """Eight engines take turns with the requests; each is a process of its own."""
    command = [sys.executable, "-m", "bench.sharing.engine", endpoint]
    engines = [
        subprocess.Popen(
            [*command, *map(str, (number, ENGINES, images, SEED))],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        for number in range(ENGINES)
    ]
    try:
        for engine in engines:
            assert engine.stdout is not None
            assert engine.stdout.readline() == "ready\n"
        said = [engine.stdin for engine in engines if engine.stdin is not None]
        for pipe in said:
            pipe.write("\n")
            pipe.flush()
        counts = [json.loads(engine.communicate()[0]) for engine in engines]
    finally:
        for engine in engines:
            engine.kill()
    assert sum(count["failed"] for count in counts) == 0, counts
    order = requests(images, SEED)
    return {
        "encodes_per_image": sum(count["encodes"] for count in counts) / images,
        "encodes_per_image_alone": encodes_alone(order, ENGINES, images) / images,
        "wrong_rows": sum(count["wrong"] for count in counts),
    }


@dataclass
class Readers:
    """Callers that read what the producers put, while these are killed."""

    client: EncoderClient
    wrong: int = 0
    untyped: int = 0
    reads: int = 0
    slowest_s: float = 0.0
    seen: set[int] = field(default_factory=set)
    killed: int = 0
    ended: bool = False

    async def read_on(self, reader: int) -> None:
        """Read one image after the other, the newest ones, until producers are no more."""
        place = reader
        while not self.ended:
            await self.read(newest(self.killed) - place % (2 * IMAGES_AHEAD), LEASE_S)
            place += READERS

    async def read(self, number: int, grace_s: float) -> bool:
        """Read one image; return whether its rows came."""
        if number < 0:
            return False
        began = time.monotonic()
        try:
            async with self.client.fetch(
                [request_of(number)], producer=PRODUCER, grace_ms=round(grace_s * 1000), timeout_s=60
            ) as stream:
                outcome = await anext(aiter(stream))
                self.slowest_s = max(self.slowest_s, time.monotonic() - began)
                if outcome.error is not None:
                    return False
                self.reads += 1
                right = rows_of(number, self.client.description.width)
                self.wrong += not np.array_equal(outcome.array, right)
                return True
        except EncoderError:
            return False
        except Exception:  # noqa: BLE001 - counting them is what this is for
            self.untyped += 1
            return False


async def killing_figures(endpoint: str, producers: int) -> Figures:
    """Producers are killed at random moments under load; then every image can be read or computed."""
    async with await EncoderClient.connect(endpoint, client_id="reader") as client:
        readers = Readers(client)
        command = [sys.executable, "-m", "bench.sharing.producers", endpoint]
        process = await asyncio.create_subprocess_exec(
            *command, *map(str, (producers, AT_A_TIME, SEED)), stdout=asyncio.subprocess.PIPE
        )
        assert process.stdout is not None
        reading = [asyncio.create_task(readers.read_on(reader)) for reader in range(READERS)]
        async for line in process.stdout:
            readers.killed = int(line.split()[1])
            if line.startswith(b"done"):
                break
        readers.ended = True
        await asyncio.gather(*reading)
        await process.wait()
        await asyncio.sleep(LEASE_S + 1)
        stuck = 0
        async with client.put(PRODUCER) as session:
            for number in range(1, newest(producers) + 1):
                (answer,) = await session.name([image_of(number)])
                if answer.state == "yours":
                    await session.abandon(answer)
                stuck += answer.state in ("wait", "failed")
                if answer.state == "held":
                    await readers.read(number, 0.0)
    return {
        "killed": readers.killed,
        "wrong_rows": readers.wrong,
        "stuck_keys": stuck,
        "untyped_errors": readers.untyped,
        "reads": readers.reads,
        "slowest_reader_over_lease_s": readers.slowest_s - LEASE_S,
    }


def main(arguments: Sequence[str] | None = None) -> None:
    """Run everything and print it; the JSON object is the last line."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--json", action="store_true", help="print a JSON object as the last line")
    parser.add_argument("--images", type=int, default=200, help="images that the engines are asked for")
    parser.add_argument("--producers", type=int, default=1000, help="producers that are killed")
    parser.add_argument("--rounds", type=int, default=40, help="images put by each way")
    options = parser.parse_args(arguments)
    figures: Figures = {}
    with store() as endpoint:
        found = sharing_figures(endpoint, options.images)
        figures |= found | asyncio.run(put_figures(endpoint, options.rounds))
        figures |= asyncio.run(killing_figures(endpoint, options.producers))
        figures["wrong_rows"] += found["wrong_rows"]
    for name, figure in figures.items():
        print(f"  {name:<32}{figure:>12,.3f}")
    if options.json:
        print(json.dumps({name: round(figure, 4) for name, figure in figures.items()}))


if __name__ == "__main__":
    main()
