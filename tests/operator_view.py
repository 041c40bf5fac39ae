"""What an operator sees of a server in this process: its port, its numbers."""

import asyncio
import urllib.error
import urllib.request

from encoder_contract.digest import content_digest
from encoder_service.app import Server
from encoder_service.observability.scrape import Scrape, scrape
from prefill_client import EncoderClient, RowRequest
from testing.photos import photo


async def get(server: Server, path: str) -> tuple[int, str]:
    """GET a path of the operator's port, without holding the server's loop."""

    def ask() -> tuple[int, str]:
        try:
            with urllib.request.urlopen(f"http://{server.watch.endpoint}{path}", timeout=5) as answer:
                return answer.status, answer.read().decode()
        except urllib.error.HTTPError as error:
            return error.code, error.read().decode()

    return await asyncio.to_thread(ask)


async def numbers(server: Server) -> Scrape:
    return await asyncio.to_thread(scrape, server.watch.endpoint)


async def use(client: EncoderClient) -> list[bytes]:
    """Two images and a broken one, submitted and fetched inline, then again by handle."""
    torn = photo(300, 200, 3)
    images = [photo(320, 200, 1), photo(200, 331, 2), torn[: len(torn) // 2]]
    await client.submit(images, request_id="chat-1")
    for transport in ("inline", "shm"):
        requests = [RowRequest(content_digest(image)) for image in images]
        async with client.fetch(
            requests, transports=[transport], timeout_s=30, request_id="chat-1"
        ) as stream:
            async for _ in stream:
                pass
    return images


async def settled(server: Server, name: str, value: float, **labels: str) -> Scrape:
    """Wait until a series has a value: what ends a call is counted behind the client's back."""
    async with asyncio.timeout(10):
        while (now := await numbers(server)).total(name, **labels) != value:
            await asyncio.sleep(0.05)
    return now
