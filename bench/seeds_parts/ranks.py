"""Rows of 32 images of 1280×720 for four tensor-parallel ranks: by handle, or the rows themselves; and hits by key."""

import asyncio
import hashlib
import multiprocessing
import time
from collections.abc import Awaitable, Callable
from contextlib import ExitStack
from io import BytesIO
from multiprocessing.connection import Connection
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np
from PIL import Image

from bench.harness.benchmark import table
from bench.harness.calls import fetch_all
from bench.transport.hits import submitted, wide_checkpoint
from encoder_contract.digest import content_digest
from prefill_client import EncoderClient, FetchedRows, RowRequest, SharedRows
from testing.photos import photo
from testing.server_process import running

SIZE = (1280, 720)
IMAGES, RANKS = 32, 4
CALLERS = 8
ROUNDS = 5
READY = b"ready"
Figures = dict[str, Any]


def rank(pipe: Connection, width: int, dtype: str) -> None:
    """Be a rank other than the first: take handles and map their rows, or take the rows; say when all are there."""
    pipe.send_bytes(READY)
    while (kind := pipe.recv()) != "end":
        if kind == "handles":
            held = [SharedRows(handle, width, dtype) for handle in pipe.recv()]
            assert all(rows.shape[1] == width for rows in held)
        else:
            copies = [np.frombuffer(pipe.recv_bytes(), np.uint8) for _ in range(pipe.recv())]
            assert all(len(copy) for copy in copies)
        pipe.send_bytes(READY)


async def ranks(folder: Path, images: int, seconds: float) -> Figures:
    """Measure the hand-off to the ranks, and hits by three keys, on one server."""
    with running(
        wide_checkpoint(folder / "wide"), devices="cpu", store_host_gib=2, max_queue_s=3600
    ) as server:
        async with await EncoderClient.connect(server.endpoint) as client:
            files = [photo(*SIZE, seed) for seed in range(images)]
            requests = await submitted(client, files)
            figures = await hand_off(client, requests)
            return figures | await keys(client, files, seconds)


async def hand_off(client: EncoderClient, requests: list[RowRequest]) -> Figures:
    """Return the times until all ranks have the rows, as medians, and the bytes that a rank gets."""
    description = client.description
    context = multiprocessing.get_context("spawn")
    with ExitStack() as held:
        pipes = []
        for _ in range(RANKS - 1):
            ours, theirs = context.Pipe()
            process = context.Process(target=rank, args=(theirs, description.width, description.dtype))
            process.start()
            held.callback(process.join)
            held.callback(ours.send, "end")
            pipes.append(ours)
        for pipe in pipes:
            await asyncio.to_thread(pipe.recv_bytes)
        async with client.fetch(requests, transports=["shm"]) as stream:
            rows = [outcome async for outcome in stream]
            by_handle = [await asyncio.to_thread(send_handles, pipes, rows) for _ in range(ROUNDS)]
            by_rows = [await asyncio.to_thread(send_rows, pipes, rows) for _ in range(2)]
            handle_bytes = len(multiprocessing.reduction.ForkingPickler.dumps([each.handle for each in rows]))
            row_bytes = sum(each.handle.row_bytes for each in rows if each.handle)
    handles_ms, rows_ms = median(by_handle), median(by_rows)
    title = f"{len(requests)} images of 1280×720 for {RANKS} ranks"
    found = [("handles", handles_ms, handle_bytes / 1e6), ("rows", rows_ms, row_bytes / 1e6)]
    return {
        "ranks_handles_ms": handles_ms,
        "ranks_rows_ms": rows_ms,
        "ranks_rows_over_handles": rows_ms / handles_ms,
        "ranks_handle_bytes": handle_bytes,
        "ranks_tables": [table(title, ("a rank gets", "ms", "MB"), found)],
    }


def send_handles(pipes: list[Connection], rows: list[FetchedRows]) -> float:
    """Send the handles to all ranks; return the milliseconds until each has mapped the rows."""

    def send(pipe: Connection) -> None:
        pipe.send("handles")
        pipe.send([each.handle for each in rows])

    return _sent_ms(pipes, send)


def send_rows(pipes: list[Connection], rows: list[FetchedRows]) -> float:
    """Send the rows to all ranks; return the milliseconds until each has them."""

    def send(pipe: Connection) -> None:
        pipe.send("rows")
        pipe.send(len(rows))
        for each in rows:
            with each.in_place() as readable:
                pipe.send_bytes(readable.array.tobytes())

    return _sent_ms(pipes, send)


def _sent_ms(pipes: list[Connection], send: Callable[[Connection], object]) -> float:
    began = time.perf_counter()
    for pipe in pipes:
        send(pipe)
    for pipe in pipes:
        pipe.recv_bytes()
    return 1000 * (time.perf_counter() - began)


async def keys(client: EncoderClient, files: list[bytes], seconds: float) -> Figures:
    """Return the hits a second of eight callers: by a known digest, hashing the file, and hashing its pixels.

    The first keeps hashing off the path of the request. The last is what engines do, which know an image by its pixels.
    """
    digests = [content_digest(file) for file in files]

    async def known(number: int) -> None:
        await fetch_all(client, [digests[number]])

    async def file_hash(number: int) -> None:
        await fetch_all(client, [content_digest(files[number])])

    async def pixel_hash(number: int) -> None:
        await asyncio.to_thread(hash_of_pixels, files[number])
        await fetch_all(client, [digests[number]])

    ways = {"known digest": known, "hash of the file": file_hash, "hash of the pixels": pixel_hash}
    rates: dict[str, list[float]] = {name: [] for name in ways}
    for _ in range(2):
        for name, call in ways.items():
            rates[name].append(await _rate(call, len(files), seconds))
    found = {name: max(rate) for name, rate in rates.items()}
    return {
        "hits_known_per_s": found["known digest"],
        "hits_hashed_per_s": found["hash of the file"],
        "hits_hashed_over_known": found["hash of the file"] / found["known digest"],
        "hits_pixels_per_s": found["hash of the pixels"],
        "hits_hashed_over_pixels": found["hash of the file"] / found["hash of the pixels"],
        "key_tables": [table("Hits on 1280×720 photos", ("key", "requests/s"), list(found.items()))],
    }


def hash_of_pixels(file: bytes) -> bytes:
    """Return the SHA-256 of an image's pixels, decoded."""
    with Image.open(BytesIO(file)) as image:
        return hashlib.sha256(image.convert("RGB").tobytes()).digest()


async def _rate(call: Callable[[int], Awaitable[None]], images: int, seconds: float) -> float:
    """Return the calls a second of several callers."""
    until, done = time.monotonic() + seconds, 0

    async def caller(number: int) -> None:
        nonlocal done
        while time.monotonic() < until:
            await call(number % images)
            number += CALLERS
            done += 1

    began = time.monotonic()
    await asyncio.gather(*map(caller, range(CALLERS)))
    return done / (time.monotonic() - began)
