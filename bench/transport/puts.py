"""What a Put costs: rows inline beside a bare gRPC stream, and rows through shared memory."""

import itertools
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from statistics import median
from typing import Any

import grpc
import numpy as np
import torch

from bench.transport.bare_sink import METHOD
from encoder_contract.framing import MESSAGE_BYTES
from prefill_client import EncoderClient, EngineKey, Grid, Producer, PutImage, PutSession
from prefill_client.transport.channels import CHANNEL_OPTIONS
from testing.checkpoints import write_checkpoint
from testing.server_process import running

PRODUCER = Producer(b"bench", b"bench", b"bench", "bfloat16", "bench.store")
GRID, TOKENS = Grid(1, 44, 80), 880  # of a 1280×720 image: 28.8 MB in rows as wide as Qwen3-VL-8B's
numbers = itertools.count()


async def put_figures(rounds: int) -> dict[str, float]:
    """Return milliseconds and GB/s of an image put into a server that only stores.

    Inline, shared memory and the bare stream take turns, so that all three see the same machine.
    """
    with tempfile.TemporaryDirectory() as folder:
        wide = {"out_hidden_size": 4096}
        model = write_checkpoint(Path(folder), dtype=torch.bfloat16, text_layers=1, depth=3, vision=wide)
        settings: dict[str, Any] = {"store_only": "yes", "accept_put": "yes", "store_host_gib": 1}
        with running(model, **settings) as server:
            return await _figures(server.endpoint, rounds)


async def _figures(endpoint: str, rounds: int) -> dict[str, float]:
    async with await EncoderClient.connect(endpoint) as client:
        rows = np.random.default_rng(0).integers(0, 2**16, (TOKENS, client.description.width), np.uint16)
        rows &= 0xBFFF  # as bfloat16 finite, which rows have to be
        messages = list(_pieces(rows.tobytes()))
        inline, shared, bare = [], [], []
        with bare_sink() as bare_endpoint:
            async with (
                client.put(PRODUCER, transports=["inline"]) as by_stream,
                client.put(PRODUCER, transports=["shm"]) as by_memory,
                grpc.aio.insecure_channel(bare_endpoint, options=CHANNEL_OPTIONS) as channel,
            ):
                # The first of each warms the connection or takes fresh memory: it does not count.
                for _ in range(rounds + 1):
                    inline.append(await _put_s(by_stream, rows))
                    bare.append(await _bare_s(channel, messages))
                    shared.append(await _put_s(by_memory, rows))
    inline_s, bare_s = median(inline[1:]), median(bare[1:])
    return {
        "put_inline_gbps": rows.nbytes / inline_s / 1e9,
        "put_bare_gbps": rows.nbytes / bare_s / 1e9,
        "put_over_bare": bare_s / inline_s,
        "put_shm_ms": median(shared[1:]) * 1e3,
    }


def _pieces(data: bytes) -> Iterator[bytes]:
    for begin in range(0, len(data), MESSAGE_BYTES):
        yield data[begin : begin + MESSAGE_BYTES]


async def _put_s(session: PutSession, rows: Any) -> float:
    """Return how long a caller waits from having rows to knowing that they are held."""
    name = EngineKey("bench puts", next(numbers).to_bytes(8, "big"))
    (answer,) = await session.name([PutImage(GRID, engine_key=name)])
    began = time.perf_counter()
    answer = await session.put(answer, rows)
    assert answer.state == "held", answer.error
    return time.perf_counter() - began


async def _bare_s(channel: grpc.aio.Channel, messages: list[bytes]) -> float:
    began = time.perf_counter()
    call: Any = channel.stream_unary(METHOD)()
    for message in messages:
        await call.write(message)
    await call.done_writing()
    await call
    return time.perf_counter() - began


@contextmanager
def bare_sink() -> Iterator[str]:
    """Run the bare stream's server and give its address."""
    command = [sys.executable, "-m", "bench.transport.bare_sink"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        try:
            yield f"127.0.0.1:{process.stdout.readline().strip()}"
        finally:
            process.kill()
