"""The operator's view of a server in this process: its HTTP port and its metrics."""

import asyncio
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from encoder_contract.digest import content_digest
from encoder_service.api import admin_client
from encoder_service.app import Server
from encoder_service.http import HttpPort
from encoder_service.metrics import Metrics, Scrape, scrape
from prefill_client import EncoderClient, RowRequest
from testing.photos import photo
from tests.waiting import PATIENCE_S, soon


@contextmanager
def http_port(listen: str = "127.0.0.1:0", **changes: Any) -> Iterator[HttpPort]:
    """Run the operator's port without a server; `changes` are arguments of `HttpPort`."""
    given = {"title": "t", "facts": dict, "metrics": Metrics().exposition, "last_tick": time.monotonic}
    http = HttpPort(listen, **given | {"not_ready": lambda: ""} | changes)
    http.start()
    try:
        yield http
    finally:
        http.stop()


def answer_of(url: str) -> tuple[int, str]:
    """Return the status and text of the answer to a GET."""
    try:
        with urllib.request.urlopen(url, timeout=PATIENCE_S) as answer:
            return answer.status, answer.read().decode()
    except urllib.error.HTTPError as error:
        return error.code, error.read().decode()


async def get(server: Server, path: str) -> tuple[int, str]:
    """GET a path of the operator's port, without blocking the server's loop."""
    return await asyncio.to_thread(answer_of, f"http://{server.watch.endpoint}{path}")


async def numbers(server: Server) -> Scrape:
    return await asyncio.to_thread(scrape, server.watch.endpoint, PATIENCE_S)


async def use(client: EncoderClient) -> list[bytes]:
    """Submit two images and a broken one, and fetch them inline, then again by handle."""
    torn = photo(300, 200, 3)
    images = [photo(320, 200, 1), photo(200, 331, 2), torn[: len(torn) // 2]]
    await client.submit(images, request_id="chat-1")
    for transport in ("inline", "shm"):
        requests = [RowRequest(content_digest(image)) for image in images]
        async with client.fetch(
            requests, transports=[transport], timeout_s=60, request_id="chat-1"
        ) as stream:
            async for _ in stream:
                pass
    return images


async def settled(server: Server, name: str, value: float, **labels: str) -> Scrape:
    """Wait until a series has a value: the end of a call is counted after the client has its answer."""
    seen: list[Scrape] = []

    async def holds() -> bool:
        seen[:] = [await numbers(server)]
        return seen[0].total(name, **labels) == value

    await soon(holds)
    return seen[0]


async def images_wait(server: Server, images: int) -> None:
    """Wait until `images` images are queued or running, with or without a waiting Fetch."""
    await soon(lambda: sum(server.jobs.scheduler.snapshot().images.values()) == images)


async def fetches_wait_for(server: Server, images: int) -> None:
    """Wait until `images` images are queued or running, each with a waiting Fetch."""

    def waited_for() -> int:
        counts = server.jobs.scheduler.snapshot().images
        return sum(count for (_, is_demanded), count in counts.items() if is_demanded)

    await soon(lambda: waited_for() == images)


async def flush(server: Server) -> None:
    """Drop all files, and all rows once no call pins them, as `encoder-service flush` does."""
    await soon(lambda: server.store.stats().pins == 0)
    await asyncio.to_thread(list, admin_client.run("flush", server.endpoint))
