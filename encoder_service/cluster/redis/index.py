"""The index in Redis: which replica holds or encodes which embedding. It acts as empty while Redis is unavailable.

`Subscriptions` receive notifications of changes. A notification may be lost, so waiters also re-read from time to time.
"""

import asyncio
from collections import defaultdict
from collections.abc import Awaitable, Callable, Collection, Iterable, Mapping, Sequence
from typing import Any

from encoder_contract.geometry import Grid
from encoder_service.cluster.cluster import Acquired, IndexState, Locations, Replica
from encoder_service.cluster.redis.connection import (
    FAULTS,
    RedisConnection,
    Script,
    batches,
    invalid_replies,
    lost_connections,
)
from encoder_service.cluster.redis.schema import Keys, Membership, Peer, packed, records
from encoder_service.cluster.redis.session import IndexEvents, OnCall, RedisSession, RedisSettings
from encoder_service.cluster.tasks import cancel_task, start_task

PUBLISH, RETRACT, ACQUIRE = Script("publish"), Script("retract"), Script("acquire")
RENEW, RELEASE = Script("renew"), Script("release")


class RedisIndex:
    """The entries of all replicas of a namespace, in Redis, a Redis Cluster, or Valkey; 6.2 or newer.

    Not thread-safe: use from one event loop. Guarantees:
    - **The index is a hint.** A location may be stale (the peer call fails, and the image is encoded); a lease may be
      lost (the image is encoded twice, to equal bits). No answer decides which bytes an address has.
    - **Calls are bounded and do not fail.** Every call returns within its timeouts. Only `register` raises an error,
      `ModelMismatchError`. While Redis is unreachable or refuses, or before this replica has joined, every call answers
      at once like an empty index: nothing is located, every lease is granted, nothing is stored. See `state`.
    - **A batch is one step.** A call takes any number of addresses (32 bytes each, duplicates allowed). It needs one
      round trip for a batch of a reasonable size, never one for each address.
    - **One encoder per address.** While this replica has joined, the lease of an address is granted to one replica at a
      time, and to none while a live peer has published the address. A dead replica loses its leases within their time
      to live; a live one keeps the leases that it renews until it publishes or releases them.
    - **All times are those of Redis.** Clocks of different machines are never compared.

    After an outage this replica registers again by itself. The index keeps no copy of its leases and published
    addresses: `IndexEvents` tell the owner when to renew and publish them again.
    """

    def __init__(
        self, settings: RedisSettings, events: IndexEvents, *, on_call: OnCall = lambda *_: None
    ) -> None:
        """`on_call` is called after every call to Redis."""
        self.settings = settings
        self._keys = Keys(settings.namespace)
        self._events = events
        self._session = RedisSession(settings, on_call, events, self._keys.membership)
        self._subscriptions: Subscriptions | None = None

    @property
    def never_joined(self) -> str:
        """Why this replica has not joined since its start; empty if it has."""
        return self._session.never_joined

    @property
    def state(self) -> IndexState:
        """Whether this replica has joined."""
        return self._session.state

    def peers(self) -> tuple[Peer, ...]:
        """Return the other live replicas, as of the last heartbeat; none while alone."""
        membership = self._session.membership
        return tuple(membership.peers.values()) if membership and self.state is IndexState.JOINED else ()

    async def register(self, replica: Replica) -> None:
        """Join as `replica`, and send heartbeats until `leave` or `close`; while alone, keep trying. Call it once.

        An earlier start of the same replica is replaced, and its published addresses no longer count. Raises
        `ModelMismatchError` if a live replica of the namespace serves another model or processor.
        """
        await self._session.register(replica)

    async def leave(self) -> None:
        """Drain: peers no longer find this replica. Afterwards every call answers as if alone."""
        await self._session.leave()

    async def close(self) -> None:
        """Close connections. Without an earlier `leave`, peers treat this replica as dead."""
        await self._session.close()
        if self._subscriptions is not None:
            await self._subscriptions.close()

    async def publish(self, grids: Mapping[bytes, Grid]) -> bool:
        """Announce that this replica holds these addresses, with the grid of each; return whether all calls succeeded.

        Ends its leases on them and wakes replicas that wait for them. `t` of a grid is 1.
        """
        succeeded = True
        ttl_ms = self.settings.location_ttl_s * 1000
        for batch in batches(list(grids)):
            arguments = (self._token, ttl_ms, self._session.notify_command)
            each = [packed(grids[address]) for address in batch]
            replies = await self._session.run("publish", PUBLISH, self._pairs(batch), *arguments, each=each)
            succeeded &= replies is not None
        return succeeded

    async def retract(self, addresses: Sequence[bytes], replica_id: str | None = None) -> None:
        """Announce that this replica, or the live peer `replica_id`, does not hold `addresses`."""
        membership = self._session.membership
        token = membership and (
            membership.token if replica_id is None else membership.tokens_of([replica_id])
        )
        if token:
            for batch in batches(addresses):
                await self._session.run("retract", RETRACT, [(self._keys.location(a),) for a in batch], token)

    async def locate(self, addresses: Sequence[bytes]) -> dict[bytes, Locations]:
        """Return the live peers that hold each address, without addresses that none holds. Excludes this replica."""
        located: dict[bytes, Locations] = {}
        for batch in batches(addresses):
            values = await self._read("locate", [self._keys.location(address) for address in batch])
            if values is not None:
                located |= await self._live(dict(zip(batch, values, strict=True)))
        return located

    async def acquire(self, addresses: Sequence[bytes], excluding: Collection[str] = ()) -> Acquired:
        """Request leases to encode `addresses`. An address that peers hold is located instead, in the same step.

        Locations at replicas in `excluding` (which have just failed) do not count. A granted lease expires after its
        time to live, unless it is renewed. A lease that this replica already has is granted again.
        """
        granted: set[bytes] = set()
        located: dict[bytes, Locations] = {}
        for batch in batches(addresses):
            orphans = await self._acquire(batch, excluding, granted, located)
            # Only dead replicas hold or encode these. The replicas are marked as dead by now, so they do not count.
            granted.update(await self._acquire(orphans, excluding, granted, located) if orphans else ())
        return Acquired(frozenset(granted), located)

    async def renew(self, addresses: Sequence[bytes]) -> frozenset[bytes]:
        """Renew leases, also expired ones that no other replica has; return those that this replica has now."""
        ours: set[bytes] = set()
        for batch in batches(addresses):
            keys = [(self._keys.lease(address),) for address in batch]
            replies = await self._session.run("renew", RENEW, keys, self._token, self.settings.lease_ttl_ms)
            ours.update(batch if replies is None else (a for a, r in zip(batch, replies, strict=True) if r))
        return frozenset(ours)

    async def release(self, addresses: Sequence[bytes]) -> bool:
        """Release leases without publishing, and wake waiting replicas; return whether all calls succeeded.

        Does not touch leases of other replicas.
        """
        succeeded = True
        for batch in batches(addresses):
            replies = await self._session.run(
                "release", RELEASE, self._pairs(batch), self._token, self._session.notify_command
            )
            succeeded &= replies is not None
        return succeeded

    async def find(self, addresses: Sequence[bytes]) -> dict[bytes, Locations]:
        """Return the live peers that hold each address, and no peers for an address that a live peer is encoding.

        Addresses that no peer holds or encodes are absent.
        """
        found: dict[bytes, Locations] = {}
        for batch in batches(addresses):
            if (read := await self._locations_and_leases("find", batch)) is not None:
                located, leased = read
                found |= {address: () for address, token in leased.items() if token != self._token}
                found |= located
        return found

    async def settled(self, addresses: Collection[bytes]) -> dict[bytes, Locations]:
        """Return the addresses that are published, with their locations, and those that no replica is encoding."""
        if (read := await self._locations_and_leases("wait", addresses)) is None:
            return {} if self.state is IndexState.JOINED else dict.fromkeys(addresses, ())
        located, leased = read
        return {a: located.get(a, ()) for a in addresses if a in located or a not in leased}

    async def _locations_and_leases(
        self, name: str, addresses: Collection[bytes]
    ) -> tuple[dict[bytes, Locations], dict[bytes, bytes]] | None:
        """Return the live peers that hold each address, and the tokens of the live replicas that have leases.

        None if the call fails.
        """
        values = await self._read(name, [key for pair in self._pairs(addresses) for key in pair])
        if values is None:
            return None
        holders = {a: holder for a, holder in zip(addresses, values[1::2], strict=True) if holder}
        located = await self._live(dict(zip(addresses, values[::2], strict=True)), holders.values())
        return located, {address: holder for address, holder in holders.items() if self._lives(holder)}

    async def subscribe(self, added: Iterable[bytes], removed: Iterable[bytes]) -> None:
        """Subscribe to changes of the `added` addresses, and unsubscribe from the `removed` ones."""

        async def subscribe(connection: RedisConnection, _: Membership) -> None:
            if self._subscriptions is None or self._subscriptions.connection is not connection:
                stale, self._subscriptions = self._subscriptions, Subscriptions(connection, self._on_message)
                if stale is not None:
                    await stale.close()
            await self._subscriptions.subscribe(map(self._keys.location, added))
            await self._subscriptions.unsubscribe(map(self._keys.location, removed))

        await self._session.call("follow", subscribe)

    async def _acquire(
        self,
        addresses: Sequence[bytes],
        excluding: Collection[str],
        granted: set[bytes],
        located: dict[bytes, Locations],
    ) -> list[bytes]:
        """Add to `granted` and `located`; return the addresses that only dead replicas hold or encode."""
        membership = self._session.membership
        excluded_tokens = (
            (b"".join(membership.dead), membership.tokens_of(excluding)) if membership else (b"", b"")
        )
        arguments = (self._token, self.settings.lease_ttl_ms, *excluded_tokens)
        replies = await self._session.run("acquire", ACQUIRE, self._pairs(addresses), *arguments)
        if replies is None:
            granted.update(addresses)
            return []
        by_address = dict(zip(addresses, replies, strict=True))
        granted.update(address for address, reply in by_address.items() if reply == 1)
        values = {address: reply for address, reply in by_address.items() if isinstance(reply, bytes)}
        holders = {address: reply[0] for address, reply in by_address.items() if _names_holder(reply)}
        live = await self._live(values, holders.values(), excluding)
        located |= live
        orphans = [address for address in values if address not in live]
        return orphans + [address for address, holder in holders.items() if not self._lives(holder)]

    async def _live(
        self,
        values: Mapping[bytes, bytes | None],
        others: Iterable[bytes] = (),
        excluding: Collection[str] = (),
    ) -> dict[bytes, Locations]:
        """Return the live locations. If a replica in them or in `others` is unknown, send one heartbeat first."""
        membership = self._session.membership
        if membership is None:
            return {}
        named = {token for value in values.values() for token, *_ in records(value)}.union(others)
        if membership.unknown(named):
            await self._session.heartbeat(self._session.calls)
            membership.mark_dead(named)
        return {a: live for a, value in values.items() if (live := membership.locations(value, excluding))}

    def _lives(self, holder: bytes) -> bool:
        membership = self._session.membership
        return membership is not None and holder not in membership.dead

    def _on_message(self, channel: bytes) -> None:
        address = self._keys.address(channel)
        if address is not None:
            self._events.on_changed(address)

    async def _read(self, name: str, keys: Sequence[bytes]) -> list[bytes | None] | None:
        return await self._session.call(name, lambda connection, _: connection.read(keys))

    def _pairs(self, addresses: Iterable[bytes]) -> list[tuple[bytes, bytes]]:
        return [(self._keys.location(address), self._keys.lease(address)) for address in addresses]

    @property
    def _token(self) -> bytes:
        return self._session.membership.token if self._session.membership else b""


def _names_holder(reply: Any) -> bool:
    """Whether a reply names the replica that encodes an address: it is then a list of exactly one token."""
    return isinstance(reply, list) and len(reply) == 1 and isinstance(reply[0], bytes)


class Subscriptions:
    """Subscriptions to channels, each on its server. A failed server is tried again at the next `subscribe`.

    `on_message` is called with the channel's name for every message, including the confirmation of a subscription:
    earlier changes were not notified, so the address must be read then.
    """

    def __init__(self, connection: RedisConnection, on_message: Callable[[bytes], None]) -> None:
        self.connection = connection
        self._on_message = on_message
        self._servers: dict[str, _Subscription] = {}

    async def subscribe(self, channels: Iterable[bytes]) -> None:
        for url, group in self._by_server(channels).items():
            server = self._servers.get(url)
            if server is None or server.is_lost:
                server = self._servers[url] = _Subscription(self.connection, url, self._on_message)
            await server.subscribe(group)

    async def unsubscribe(self, channels: Iterable[bytes]) -> None:
        for url, group in self._by_server(channels).items():
            if (server := self._servers.get(url)) and not server.is_lost:
                await server.unsubscribe(group)

    async def close(self) -> None:
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
    """The channels of one server, on a separate connection."""

    def __init__(self, connection: RedisConnection, url: str, on_message: Callable[[bytes], None]) -> None:
        self._client, self._pubsub = connection.listener(url)
        self._sharded = connection.sharded_channels
        # A cluster accepts shard channels of different slots only one at a time.
        self._max_channels = 1 if connection.is_cluster and self._sharded else 1024
        self._on_message = on_message
        self._listening: asyncio.Task[None] | None = None
        self.is_lost = False

    async def subscribe(self, channels: list[bytes]) -> None:
        await self._send(self._pubsub.ssubscribe if self._sharded else self._pubsub.subscribe, channels)
        if self._listening is None and not self.is_lost:
            self._listening = start_task(self._listen(), "index-subscriptions")

    async def unsubscribe(self, channels: list[bytes]) -> None:
        await self._send(self._pubsub.sunsubscribe if self._sharded else self._pubsub.unsubscribe, channels)

    async def close(self) -> None:
        await cancel_task(self._listening)
        await self._disconnect()

    async def _send(self, command: Callable[..., Awaitable[Any]], channels: list[bytes]) -> None:
        try:
            with lost_connections():
                for first in range(0, len(channels), self._max_channels):
                    await command(*channels[first : first + self._max_channels])
        except FAULTS:
            await self._disconnect()

    async def _listen(self) -> None:
        try:
            with invalid_replies(), lost_connections():
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
            pass  # the connection was lost already
