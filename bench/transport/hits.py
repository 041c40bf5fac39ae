"""Times hits at a client, from a real server process: shared memory, and inline against a bare gRPC stream."""

import tempfile
from collections.abc import Awaitable, Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any

import grpc
import torch

from bench.harness.calls import ms_of
from bench.transport.bare import bare_server, read_bare
from prefill_client import Credentials, EncoderClient, RowRequest
from prefill_client.transport.channels import CHANNEL_OPTIONS, Channels
from testing.certificates import HOSTS, Authority, Issued
from testing.checkpoints import write_checkpoint
from testing.photos import photo
from testing.server_process import running

Figures = dict[str, float]
ENCODE_S = 600.0  # not measured: a slow machine takes minutes to encode four images of 2560×1440
Pairs = Mapping[str, Sequence[Callable[[], Awaitable[object]]]]


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
                return figures | await _tls_figures(client, tls_client, (Credentials(ca), issued), rounds)


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
        "hit_shm_first_ms": shm[0],
        "hit_shm_four_1440p_ms": median(shm_four[1:]),
        "inline_gbps": row_bytes / inline_ms / 1e6,
        "bare_gbps": row_bytes / bare_ms / 1e6,
        "inline_over_bare": bare_ms / inline_ms,
    }


async def _tls_figures(
    plain: EncoderClient, tls_client: EncoderClient, tls: tuple[Credentials, Issued], rounds: int
) -> Figures:
    """Return the ratio of a hit's time with TLS to its time without, and the same for a bare stream (gRPC's own cost).

    `tls` has the client's credentials and the server's files for the bare stream with TLS.
    """
    files = [photo(1280, 720, seed=0)]
    requests = await submitted(plain, files)
    await submitted(tls_client, files)
    row_bytes = await fetch(plain, requests, "inline")
    credentials, issued = tls
    with bare_server(row_bytes) as plain_bare, bare_server(row_bytes, issued) as tls_bare:
        async with (
            Channels(Credentials()).open(plain_bare.endpoint) as bare,
            Channels(credentials).open(tls_bare.endpoint) as bare_tls,
        ):
            streams: Pairs = {
                "inline": [partial(fetch, each, requests, "inline") for each in (plain, tls_client)],
                "bare": [partial(read_bare, each, row_bytes) for each in (bare, bare_tls)],
            }
            ratios = await _ratios(streams, rounds)
    shared: Pairs = {"shm": [partial(fetch, each, requests, "shm") for each in (plain, tls_client)]}
    ratios |= await _ratios(shared, 5 * rounds)
    return {f"tls_over_plain_{name}": ratio for name, ratio in ratios.items()}


async def _ratios(pairs: Pairs, rounds: int) -> Figures:
    """Return for each pair the ratio of the second call's time to the first's. All calls alternate."""
    order = [(name, which) for name in pairs for which in (0, 1)]
    ms: dict[tuple[str, int], list[float]] = {each: [] for each in order}
    for _ in range(rounds + 1):
        for name, which in order:
            ms[name, which].append(await ms_of(pairs[name][which]()))
        order.reverse()
    return {name: median(ms[name, 1][1:]) / median(ms[name, 0][1:]) for name in pairs}


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
