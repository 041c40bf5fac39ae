"""Times hits at a client, from a real server process: shared memory, and inline against a bare gRPC stream."""

import tempfile
from collections.abc import Sequence
from pathlib import Path
from statistics import median
from typing import Any

import grpc
import torch

from bench.harness.calls import ms_of
from bench.transport.bare import bare_server, read_bare
from prefill_client import Credentials, EncoderClient, RowRequest
from prefill_client.transport.channels import CHANNEL_OPTIONS
from testing.certificates import HOSTS, Authority
from testing.checkpoints import write_checkpoint
from testing.photos import photo
from testing.server_process import running

Figures = dict[str, float]
ENCODE_S = 600.0  # not measured: a slow machine takes minutes to encode four images of 2560×1440


def wide_checkpoint(folder: Path) -> Path:
    """Write a small tower with rows as wide as Qwen3-VL-8B's. It encodes an image in a second."""
    wide = {"out_hidden_size": 4096}
    return write_checkpoint(folder, dtype=torch.bfloat16, text_layers=1, depth=3, vision=wide)


async def hit_figures(rounds: int) -> Figures:
    """Return milliseconds and GB/s of hits: one image of 1280×720, and four of 2560×1440 in one call.

    A hit does not run the tower. Inline and bare streams alternate, so that both see the same load of the machine; so
    do servers with and without TLS.
    """
    with tempfile.TemporaryDirectory() as folder:
        model = wide_checkpoint(Path(folder) / "model")
        authority = Authority()
        ca = authority.write(Path(folder) / "ca.pem")
        issued = authority.issue(Path(folder), "server", HOSTS)
        settings: dict[str, Any] = {"devices": "cpu", "store_host_gib": 1}
        with (
            running(model, **settings) as server,
            running(model, **settings, tls_cert=issued.cert, tls_key=issued.key) as tls,
        ):
            async with (
                await EncoderClient.connect(server.endpoint) as client,
                await EncoderClient.connect(tls.endpoint, credentials=Credentials(ca)) as tls_client,
            ):
                figures = await _figures(client, rounds)
                return figures | await _tls_figures(client, tls_client, rounds)


async def _figures(client: EncoderClient, rounds: int) -> Figures:
    one = await submitted(client, [photo(1280, 720, seed=0)])
    four = await submitted(client, [photo(2560, 1440, seed=seed) for seed in range(4)])
    row_bytes = await fetch(client, one, "inline")
    shm, shm_four, inline, bare = [], [], [], []
    with bare_server(row_bytes) as bare_process:
        async with grpc.aio.insecure_channel(bare_process.endpoint, options=CHANNEL_OPTIONS) as channel:
            # The first call of each kind maps the segment or warms up the connection, so it is not counted.
            for _ in range(rounds + 1):
                shm.append(await ms_of(fetch(client, one, "shm")))
                shm_four.append(await ms_of(fetch(client, four, "shm")))
            for _ in range(rounds + 1):
                inline.append(await ms_of(fetch(client, one, "inline")))
                bare.append(await ms_of(read_bare(channel, row_bytes)))
    inline_ms, bare_ms = median(inline[1:]), median(bare[1:])
    return {
        "hit_shm_ms": median(shm[1:]),
        "hit_shm_four_1440p_ms": median(shm_four[1:]),
        "inline_gbps": row_bytes / inline_ms / 1e6,
        "inline_over_bare": bare_ms / inline_ms,
    }


async def _tls_figures(plain: EncoderClient, tls: EncoderClient, rounds: int) -> Figures:
    """Return the ratio of a hit's time with TLS to its time without, by each transport. The calls alternate."""
    files = [photo(1280, 720, seed=0)]
    requests = await submitted(plain, files)
    await submitted(tls, files)
    figures = {}
    for transport, times in {"inline": rounds, "shm": 5 * rounds}.items():
        order, ms = [plain, tls], {plain: list[float](), tls: list[float]()}
        for _ in range(times + 1):
            for client in order:
                ms[client].append(await ms_of(fetch(client, requests, transport)))
            order.reverse()
        figures[f"tls_over_plain_{transport}"] = median(ms[tls][1:]) / median(ms[plain][1:])
    return figures


async def submitted(client: EncoderClient, files: Sequence[bytes]) -> list[RowRequest]:
    """Submit images, wait until they are encoded, and return the requests for all their rows."""
    submitted = await client.submit(files, timeout_s=ENCODE_S)
    requests = [RowRequest(image.digest) for image in submitted]
    await fetch(client, requests, "shm", timeout_s=ENCODE_S)
    return requests


async def fetch(client: EncoderClient, requests: Sequence[RowRequest], transport: str, **options: Any) -> int:
    """Fetch rows until all can be read; return their size in bytes."""
    size_bytes = 0
    async with client.fetch(requests, transports=[transport], **options) as stream:
        async for rows in stream:
            if rows.error is not None:
                raise rows.error
            assert rows.transport == transport
            with rows.in_place() as readable:
                size_bytes += readable.array.nbytes
    return size_bytes
