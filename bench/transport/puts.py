"""Times Puts: rows inline against a bare gRPC stream, and rows through shared memory."""

import itertools
import tempfile
import time
from pathlib import Path
from statistics import median
from typing import Any

import grpc
import numpy as np

from bench.harness.calls import ms_of
from bench.transport.bare import bare_server, write_bare
from bench.transport.hits import wide_checkpoint
from encoder_contract.framing import MESSAGE_BYTES
from prefill_client import EncoderClient, EngineKey, Grid, Producer, PutImage, PutSession
from prefill_client.transport.channels import CHANNEL_OPTIONS
from testing.server_process import running

PRODUCER = Producer(b"bench", b"bench", b"bench", "bfloat16", "bench.store")
GRID, TOKENS = Grid(1, 44, 80), 880  # of a 1280×720 image: 28.8 MB in rows as wide as Qwen3-VL-8B's
numbers = itertools.count()


async def put_figures(rounds: int) -> dict[str, float]:
    """Return milliseconds and GB/s of putting an image into a store-only server.

    Inline, shared memory and the bare stream alternate, so that all three see the same load of the machine.
    """
    with tempfile.TemporaryDirectory() as folder:
        model = wide_checkpoint(Path(folder))
        with running(model, store_only="yes", accept_put="yes", store_host_gib=1) as server:
            return await _figures(server.endpoint, rounds)


async def _figures(endpoint: str, rounds: int) -> dict[str, float]:
    async with await EncoderClient.connect(endpoint) as client:
        rows = np.random.default_rng(0).integers(0, 2**16, (TOKENS, client.description.width), np.uint16)
        rows &= 0xBFFF  # rows must be finite as bfloat16
        data = rows.tobytes()
        messages = [data[begin : begin + MESSAGE_BYTES] for begin in range(0, len(data), MESSAGE_BYTES)]
        inline, shared, bare = [], [], []
        with bare_server() as bare_endpoint:
            async with (
                client.put(PRODUCER, transports=["inline"]) as inline_session,
                client.put(PRODUCER, transports=["shm"]) as shm_session,
                grpc.aio.insecure_channel(bare_endpoint, options=CHANNEL_OPTIONS) as channel,
            ):
                # The first call of each kind warms up the connection or touches new memory, so it is not counted.
                for _ in range(rounds + 1):
                    inline.append(await _put_ms(inline_session, rows))
                    bare.append(await ms_of(write_bare(channel, messages)))
                    shared.append(await _put_ms(shm_session, rows))
    inline_ms, bare_ms = median(inline[1:]), median(bare[1:])
    return {
        "put_inline_gbps": rows.nbytes / inline_ms / 1e6,
        "put_bare_gbps": rows.nbytes / bare_ms / 1e6,
        "put_over_bare": bare_ms / inline_ms,
        "put_shm_ms": median(shared[1:]),
    }


async def _put_ms(session: PutSession, rows: Any) -> float:
    """Return the milliseconds from the start of putting rows to the answer that they are held."""
    name = EngineKey("bench puts", next(numbers).to_bytes(8, "big"))
    (answer,) = await session.name([PutImage(GRID, engine_key=name)])
    began = time.perf_counter()
    answer = await session.put(answer, rows)
    assert answer.state == "held", answer.error
    return (time.perf_counter() - began) * 1e3
