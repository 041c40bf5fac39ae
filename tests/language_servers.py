"""Language servers, as far as image URLs go: each a client and a loader of its own, with an encoder in common."""

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from typing import Any

from encoder_service.app import Server
from prefill_client import EncoderClient, FetchedRows, RowRequest
from prefill_client.media.destinations import Destinations
from prefill_client.media.image_loader import ImageLoader
from prefill_client.media.shared_loader import SharedLoader
from tests.calls import collect
from tests.image_host import Host
from tests.waiting import soon


@dataclass
class LanguageServer:
    """A process that loads URLs and submits what it finds: its loader and its client."""

    loader: SharedLoader
    client: EncoderClient

    async def submit(self, url: str) -> FetchedRows:
        """Load and submit a URL, and fetch its rows."""
        (submitted,) = await self.client.submit([await self.loader.open(url, self.client)])
        assert submitted.error is None, submitted.error
        return await self.fetch(submitted.digest)

    async def fetch(self, digest: bytes) -> FetchedRows:
        (rows,) = (await collect(self.client, [RowRequest(digest)])).values()
        assert rows.error is None, rows.error
        return rows

    async def told(self) -> None:
        """Wait until all that was found has been recorded."""
        await asyncio.gather(*self.loader._said)


Start = Callable[..., Awaitable[LanguageServer]]


@asynccontextmanager
async def language_servers(server: Server, host: Host) -> AsyncIterator[Start]:
    """Give what starts one that may load from `host`."""
    async with AsyncExitStack() as stack:

        async def start(
            *rules: str, timeout_s: float = 30, endpoint: str = "", **options: Any
        ) -> LanguageServer:
            client = await stack.enter_async_context(
                await EncoderClient.connect(endpoint or server.endpoint, **options)
            )
            destinations = Destinations([host.name, *rules])
            loader = SharedLoader(ImageLoader(destinations, max_bytes=1 << 20, timeout_s=timeout_s))
            stack.push_async_callback(loader.close)
            return LanguageServer(loader, client)

        yield start


async def lose(server: Server) -> None:
    """Let a server forget all images; rows that are still pinned stay a moment longer."""

    def is_lost() -> bool:
        server._sources.clear()
        server.store.flush()
        return not sum(tier.entries for tier in server.store.stats().tiers)

    await soon(is_lost)
