"""Hints: hears on Redis channels that something may have changed; what is missed is found by reading again."""

import asyncio
from collections import defaultdict
from collections.abc import Awaitable, Callable, Iterable
from typing import Any

from encoder_service.cluster.index.connection import FAULTS, Connection, lost_connections
from encoder_service.cluster.index.tasks import end


class Subscriptions:
    """Follows channels, on the server where each lives; a server that fails is left, and tried at the next `follow`.

    `heard` is called with a channel's name for every message on it, the confirmation that it is followed included:
    what changed before that moment must be read.
    """

    def __init__(self, link: Connection, heard: Callable[[bytes], None]) -> None:
        self.link = link
        self._heard = heard
        self._stations: dict[str, _Subscription] = {}

    async def follow(self, channels: Iterable[bytes]) -> None:
        """Listen to channels from here on."""
        for home, group in self._by_home(channels).items():
            station = self._stations.get(home)
            if station is None or station.is_lost:
                station = self._stations[home] = _Subscription(self.link, home, self._heard)
            await station.follow(group)

    async def unfollow(self, channels: Iterable[bytes]) -> None:
        """Stop listening to channels."""
        for home, group in self._by_home(channels).items():
            if (station := self._stations.get(home)) and not station.is_lost:
                await station.unfollow(group)

    async def close(self) -> None:
        """Stop listening to all."""
        while self._stations:
            await self._stations.popitem()[1].close()

    def _by_home(self, channels: Iterable[bytes]) -> dict[str, list[bytes]]:
        homes: dict[str, list[bytes]] = defaultdict(list)
        for channel in channels:
            home = self.link.home(channel)
            if home is not None:
                homes[home].append(channel)
        return homes


class _Subscription:
    """The channels followed on one server, over one connection of their own."""

    def __init__(self, link: Connection, home: str, heard: Callable[[bytes], None]) -> None:
        self._client, self._pubsub = link.listener(home)
        self._sharded = link.sharded_channels
        # A cluster takes shard channels of different slots one by one only.
        self._at_once = 1 if link.is_cluster and self._sharded else 1024
        self._heard = heard
        self._listening: asyncio.Task[None] | None = None
        self.is_lost = False

    async def follow(self, channels: list[bytes]) -> None:
        await self._send(self._pubsub.ssubscribe if self._sharded else self._pubsub.subscribe, channels)
        if self._listening is None and not self.is_lost:
            self._listening = asyncio.create_task(self._listen(), name="index-hints")

    async def unfollow(self, channels: list[bytes]) -> None:
        await self._send(self._pubsub.sunsubscribe if self._sharded else self._pubsub.unsubscribe, channels)

    async def close(self) -> None:
        await end(self._listening)
        await self._hang_up()

    async def _send(self, command: Callable[..., Awaitable[Any]], channels: list[bytes]) -> None:
        try:
            with lost_connections():
                for begin in range(0, len(channels), self._at_once):
                    await command(*channels[begin : begin + self._at_once])
        except FAULTS:
            await self._hang_up()

    async def _listen(self) -> None:
        try:
            with lost_connections():
                while True:
                    message = await self._pubsub.get_message(timeout=None)
                    if message is not None and message["channel"] is not None:
                        self._heard(message["channel"])
        except FAULTS:
            await self._hang_up()

    async def _hang_up(self) -> None:
        self.is_lost = True
        try:
            with lost_connections():
                await self._pubsub.aclose()  # type: ignore[no-untyped-call]
                await self._client.aclose()
        except FAULTS:
            pass  # it was lost already
