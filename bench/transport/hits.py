"""A hit as a client sees it: shared memory and inline, from a real server process, beside a bare gRPC stream."""

import subprocess
import sys
import tempfile
import time
from collections.abc import Awaitable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from statistics import median
from typing import Any

import grpc
import torch

from bench.transport.bare_stream import METHOD
from encoder_contract.framing import MESSAGE_BYTES
from prefill_client import EncoderClient, RowRequest
from prefill_client.transport.connection import CHANNEL_OPTIONS
from testing.checkpoints import write_checkpoint
from testing.photos import photo
from testing.server_process import running


async def serving_figures(rounds: int) -> dict[str, float]:
    """Milliseconds and GB/s of hits: one 1280×720 image, and four of 2560×1440 in one call.

    The tower is a small one with rows as wide as Qwen3-VL-8B's, so that it encodes them once in seconds; a hit
    runs none of it. Inline and bare streams take turns, so that both see the same machine.
    """
    with tempfile.TemporaryDirectory() as folder:
        wide = {"out_hidden_size": 4096}
        model = write_checkpoint(
            Path(folder) / "model", dtype=torch.bfloat16, text_layers=1, depth=3, vision=wide
        )
        with running(model, device="cpu", store_host_gib=1) as server:
            async with await EncoderClient.connect(server.endpoint) as client:
                return await _figures(client, rounds)


async def _figures(client: EncoderClient, rounds: int) -> dict[str, float]:
    one = await _submitted(client, [photo(1280, 720, seed=0)])
    four = await _submitted(client, [photo(2560, 1440, seed=seed) for seed in range(4)])
    row_bytes = await _fetch(client, one, "inline")
    shm, shm_four, inline, bare = [], [], [], []
    with bare_server(row_bytes) as bare_endpoint:
        async with grpc.aio.insecure_channel(bare_endpoint, options=CHANNEL_OPTIONS) as channel:
            # The first of each maps the segment or warms the connection: it does not count.
            for _ in range(rounds + 1):
                shm.append(await _seconds(_fetch(client, one, "shm")))
                shm_four.append(await _seconds(_fetch(client, four, "shm")))
            for _ in range(rounds + 1):
                inline.append(await _seconds(_fetch(client, one, "inline")))
                bare.append(await _seconds(_read_bare(channel, row_bytes)))
    inline_s, bare_s = median(inline[1:]), median(bare[1:])
    return {
        "hit_shm_ms": median(shm[1:]) * 1e3,
        "hit_shm_first_ms": shm[0] * 1e3,
        "hit_shm_four_1440p_ms": median(shm_four[1:]) * 1e3,
        "inline_gbps": row_bytes / inline_s / 1e9,
        "bare_gbps": row_bytes / bare_s / 1e9,
        "inline_over_bare": bare_s / inline_s,
    }


async def _submitted(client: EncoderClient, files: Sequence[bytes]) -> list[RowRequest]:
    """Submit images, wait until they are encoded, and return requests for all their rows."""
    requests = [RowRequest(image.digest) for image in await client.submit(files)]
    await _fetch(client, requests, "shm")
    return requests


async def _fetch(client: EncoderClient, requests: Sequence[RowRequest], transport: str) -> int:
    """Fetch rows until the last of them can be read; return their bytes."""
    size_bytes = 0
    async with client.fetch(requests, transports=[transport]) as stream:
        async for rows in stream:
            if rows.error is not None:
                raise rows.error
            assert rows.transport == transport
            with rows.in_place() as readable:
                size_bytes += readable.array.nbytes
    return size_bytes


async def _read_bare(channel: grpc.aio.Channel, size_bytes: int) -> None:
    received = 0
    stream: Any = channel.unary_stream(METHOD)  # bytes as they are
    async for message in stream(b""):
        received += len(message)
    assert received == size_bytes


async def _seconds(call: Awaitable[object]) -> float:
    begin = time.perf_counter()
    await call
    return time.perf_counter() - begin


@contextmanager
def bare_server(row_bytes: int) -> Iterator[str]:
    """Run the bare stream's server and give its address."""
    command = [sys.executable, "-m", "bench.transport.bare_stream", str(row_bytes), str(MESSAGE_BYTES)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        try:
            yield f"127.0.0.1:{process.stdout.readline().strip()}"
        finally:
            process.kill()
