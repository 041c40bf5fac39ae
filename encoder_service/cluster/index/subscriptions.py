"""Subscriptions: Redis channels that notify of changes. Notifications may be lost: waiters also read again in time."""

import asyncio
from collections import defaultdict
from collections.abc import Awaitable, Callable, Iterable
from typing import Any

from encoder_service.cluster.index.connection import FAULTS, Connection, lost_connections
from encoder_service.cluster.index.tasks import begin, end


class Subscriptions:
    """Channels, each on its server. A server that fails is dropped, and tried again at the next `subscribe`.

    `on_message` is called with the channel's name for every message, including the confirmation of a subscription:
    changes before that moment were not notified and must be read.
    """

    def __init__(self, connection: Connection, on_message: Callable[[bytes], None]) -> None:
        self.connection = connection
        self._on_message = on_message
        self._servers: dict[str, _Subscription] = {}

    async def subscribe(self, channels: Iterable[bytes]) -> None:
        """Listen to channels from now on."""
        for url, group in self._by_server(channels).items():
            server = self._servers.get(url)
            if server is None or server.is_lost:
                server = self._servers[url] = _Subscription(self.connection, url, self._on_message)
            await server.subscribe(group)

    async def unsubscribe(self, channels: Iterable[bytes]) -> None:
        """Stop listening to channels."""
        for url, group in self._by_server(channels).items():
            if (server := self._servers.get(url)) and not server.is_lost:
                await server.unsubscribe(group)

    async def close(self) -> None:
        """Stop listening to all channels."""
        while self._servers:
            await self._servers.popitem()[1].close()

    def _by_server(self, channels: Iterable[bytes]) -> dict[str, list[bytes]]:
        servers: dict[str, list[bytes]] = defaultdict(list)
        for channel in channels:
            url = self.connection.server_of(channel)
            if url is not None:
                servers[url].append(channel)
        return servers


class _Subscription:
    """The channels of one server, on a connection of their own."""

    def __init__(self, connection: Connection, url: str, on_message: Callable[[bytes], None]) -> None:
        self._client, self._pubsub = connection.listener(url)
        self._sharded = connection.sharded_channels
        # A cluster accepts shard channels of different slots only one by one.
        self._at_once = 1 if connection.is_cluster and self._sharded else 1024
        self._on_message = on_message
        self._listening: asyncio.Task[None] | None = None
        self.is_lost = False

    async def subscribe(self, channels: list[bytes]) -> None:
        await self._send(self._pubsub.ssubscribe if self._sharded else self._pubsub.subscribe, channels)
        if self._listening is None and not self.is_lost:
            self._listening = begin(self._listen(), "index-subscriptions")

    async def unsubscribe(self, channels: list[bytes]) -> None:
        await self._send(self._pubsub.sunsubscribe if self._sharded else self._pubsub.unsubscribe, channels)

    async def close(self) -> None:
        await end(self._listening)
        await self._disconnect()

    async def _send(self, command: Callable[..., Awaitable[Any]], channels: list[bytes]) -> None:
        try:
            with lost_connections():
                for begin in range(0, len(channels), self._at_once):
                    await command(*channels[begin : begin + self._at_once])
        except FAULTS:
            await self._disconnect()

    async def _listen(self) -> None:
        try:
            with lost_connections():
                while True:
                    message = await self._pubsub.get_message(timeout=None)
                    if message is not None and message["channel"] is not None:
                        self._on_message(message["channel"])
        except FAULTS:
            await self._disconnect()

    async def _disconnect(self) -> None:
        self.is_lost = True
        try:
            with lost_connections():
                await self._pubsub.aclose()  # type: ignore[no-untyped-call]
                await self._client.aclose()
        except FAULTS:
            pass  # it was lost already
