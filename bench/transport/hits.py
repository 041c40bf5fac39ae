"""A hit as a client sees it: shared memory and inline, from a real server process, beside a bare gRPC stream."""

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
ENCODE_S = 600.0  # a slow or busy machine takes minutes to encode four 2560×1440, which is not measured
Pairs = Mapping[str, Sequence[Callable[[], Awaitable[object]]]]


def wide_checkpoint(folder: Path) -> Path:
    """Write a small tower with rows as wide as Qwen3-VL-8B's: it encodes an image in a second."""
    wide = {"out_hidden_size": 4096}
    return write_checkpoint(folder, dtype=torch.bfloat16, text_layers=1, depth=3, vision=wide)


async def hit_figures(rounds: int) -> Figures:
    """Milliseconds and GB/s of hits: one 1280×720 image, and four of 2560×1440 in one call.

    A hit runs nothing of the tower. Inline and bare streams take turns, so that both see the same machine; so do
    servers with TLS and without.
    """
    with tempfile.TemporaryDirectory() as folder:
        model = wide_checkpoint(Path(folder) / "model")
        authority = Authority()
        ca = authority.write(Path(folder) / "ca.pem")
        issued = authority.issue(Path(folder), "server", HOSTS)
        settings: dict[str, Any] = {"devices": "cpu", "store_host_gib": 1}
        with (
            running(model, **settings) as server,
            running(model, **settings, tls_cert=issued.cert, tls_key=issued.key) as secure,
        ):
            async with (
                await EncoderClient.connect(server.endpoint) as client,
                await EncoderClient.connect(secure.endpoint, credentials=Credentials(ca)) as by_tls,
            ):
                figures = await _figures(client, rounds)
                return figures | await _tls_figures(client, by_tls, (Credentials(ca), issued), rounds)


async def _figures(client: EncoderClient, rounds: int) -> Figures:
    one = await _submitted(client, [photo(1280, 720, seed=0)])
    four = await _submitted(client, [photo(2560, 1440, seed=seed) for seed in range(4)])
    row_bytes = await _fetch(client, one, "inline")
    shm, shm_four, inline, bare = [], [], [], []
    with bare_server(row_bytes) as bare_endpoint:
        async with grpc.aio.insecure_channel(bare_endpoint, options=CHANNEL_OPTIONS) as channel:
            # The first of each maps the segment or warms the connection: it does not count.
            for _ in range(rounds + 1):
                shm.append(await ms_of(_fetch(client, one, "shm")))
                shm_four.append(await ms_of(_fetch(client, four, "shm")))
            for _ in range(rounds + 1):
                inline.append(await ms_of(_fetch(client, one, "inline")))
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
    plain: EncoderClient, by_tls: EncoderClient, secure: tuple[Credentials, Issued], rounds: int
) -> Figures:
    """Return the time of a hit by TLS over its time without, and the same for a bare stream: gRPC's own cost.

    `secure` are the credentials of a client of a bare stream by TLS, and the files of its server.
    """
    files = [photo(1280, 720, seed=0)]
    requests = await _submitted(plain, files)
    await _submitted(by_tls, files)
    row_bytes = await _fetch(plain, requests, "inline")
    credentials, issued = secure
    with bare_server(row_bytes) as here, bare_server(row_bytes, issued) as there:
        async with (
            Channels(Credentials()).open(here) as bare,
            Channels(credentials).open(there) as bare_by_tls,
        ):
            streams: Pairs = {
                "inline": [partial(_fetch, each, requests, "inline") for each in (plain, by_tls)],
                "bare": [partial(read_bare, each, row_bytes) for each in (bare, bare_by_tls)],
            }
            ratios = await _ratios(streams, rounds)
    shared: Pairs = {"shm": [partial(_fetch, each, requests, "shm") for each in (plain, by_tls)]}
    ratios |= await _ratios(shared, 5 * rounds)
    return {f"tls_over_plain_{name}": ratio for name, ratio in ratios.items()}


async def _ratios(pairs: Pairs, rounds: int) -> Figures:
    """Return for each pair the time of the second over that of the first; all take turns, in alternating order."""
    order = [(name, which) for name in pairs for which in (0, 1)]
    ms: dict[tuple[str, int], list[float]] = {each: [] for each in order}
    for _ in range(rounds + 1):
        for name, which in order:
            ms[name, which].append(await ms_of(pairs[name][which]()))
        order.reverse()
    return {name: median(ms[name, 1][1:]) / median(ms[name, 0][1:]) for name in pairs}


async def _submitted(client: EncoderClient, files: Sequence[bytes]) -> list[RowRequest]:
    """Submit images, wait until they are encoded, and return requests for all their rows."""
    submitted = await client.submit(files, timeout_s=ENCODE_S)
    requests = [RowRequest(image.digest) for image in submitted]
    await _fetch(client, requests, "shm", timeout_s=ENCODE_S)
    return requests


async def _fetch(
    client: EncoderClient, requests: Sequence[RowRequest], transport: str, **options: Any
) -> int:
    """Fetch rows until the last of them can be read; return their bytes."""
    size_bytes = 0
    async with client.fetch(requests, transports=[transport], **options) as stream:
        async for rows in stream:
            if rows.error is not None:
                raise rows.error
            assert rows.transport == transport
            with rows.in_place() as readable:
                size_bytes += readable.array.nbytes
    return size_bytes
