"""The index in Redis: who holds which embedding, and who encodes what. Answers as empty while Redis is unavailable."""

import asyncio
from collections.abc import Collection, Iterable, Mapping, Sequence, Sized
from typing import Any

from encoder_contract.geometry import Grid
from encoder_service.cluster.contract import Acquired, IndexState, Locations, Replica
from encoder_service.cluster.index.connection import Connection, Script, batches
from encoder_service.cluster.index.leases import Leases
from encoder_service.cluster.index.membership import Membership
from encoder_service.cluster.index.republish import Held, Republisher
from encoder_service.cluster.index.schema import Keys, Peer, packed, records
from encoder_service.cluster.index.session import OnCall, RedisSession
from encoder_service.cluster.index.settings import RedisSettings
from encoder_service.cluster.index.sources import SharedSources
from encoder_service.cluster.index.subscriptions import Subscriptions
from encoder_service.cluster.index.tasks import begin, end
from encoder_service.cluster.index.waiters import Waiters

PUBLISH, RETRACT, ACQUIRE = Script("publish"), Script("retract"), Script("acquire")
RENEW, RELEASE = Script("renew"), Script("release")


class RedisIndex:
    """What the replicas of a namespace know about each other, in Redis, a Redis Cluster, or Valkey; 6.2 or newer.

    What is always safe; every method belongs to one event loop:
    - **A hint, never the truth.** A location may be stale (ask the peer, then encode); a lease may be lost (the image
      is then encoded twice, to equal bits). No answer decides what bytes an address has.
    - **Bounded, and no errors.** Every call returns within the index's time bound and raises nothing but
      `ModelMismatchError` from `register`. While Redis is unreachable, refuses, or is not joined, every call answers at
      once as an empty index would: nothing is located, every lease is granted, nothing is stored. `state` says so.
    - **A batch is one step.** A call takes any number of addresses (32 bytes each, duplicates allowed) and costs one
      round trip for a reasonable batch, never one for each address.
    - **One encoder per address.** While the index is joined, an address is granted to one replica at a time, and to
      none while a live peer has published it. A holder that died loses its leases within the lease's time to live;
      a holder that lives keeps them until it publishes or releases, or forgets them for `MAX_LEASE_S`.
    - **Time is that of Redis.** No clock of one machine is compared with that of another.

    After an outage this replica registers again by itself, renews the leases it still holds, and publishes again what
    it holds, paced and after a random delay, so that replicas do not all do so at once.
    """

    def __init__(
        self,
        settings: RedisSettings,
        held: Held,
        jobs: Sized,
        *,
        on_call: OnCall = lambda *_: None,
    ) -> None:
        """`held` is this replica's store, `jobs` its queue; `on_call` is called after every call to Redis."""
        self._settings = settings
        self._keys = Keys(settings.namespace)
        self._leases = Leases(renew_s=settings.lease_ttl_ms / 3000)
        self._waiters = Waiters(self._settled, self._subscribe)
        self._republisher = Republisher(held, self._publish, settings.location_ttl_s)
        self._republishing: asyncio.Task[None] | None = None
        self._session = RedisSession(settings, jobs, on_call, self, self._keys.roll)
        self.sources = SharedSources(
            self._session, self._keys, ttl_s=settings.source_ttl_s, max_bytes=settings.max_source_bytes
        )
        """Image files that replicas share; what is always safe holds for them too."""
        self._subscriptions: Subscriptions | None = None

    @property
    def state(self) -> IndexState:
        """Whether this replica is connected now."""
        return self._session.state

    def peers(self) -> tuple[Peer, ...]:
        """Return the other live replicas, as of the last heartbeat; none while alone."""
        membership = self._session.membership
        return tuple(membership.peers.values()) if membership and self.state is IndexState.JOINED else ()

    async def register(self, replica: Replica) -> None:
        """Join as `replica`, and send heartbeats until `leave` or `close`; while alone, keep trying. Called once.

        An earlier epoch of the same replica is superseded, and what it had published vanishes. Raises
        `ModelMismatchError` if a live replica of the namespace serves another model or processor.
        """
        await self._session.register(replica)
        self._republishing = begin(self._republisher.run(), "index-republisher")

    async def leave(self) -> None:
        """Drain: leases are released, peers stop finding this replica; from now on every call answers as when alone."""
        await self.release(self._leases.all())
        await self._session.leave()

    async def close(self) -> None:
        """Stop everything and close connections. Without a `leave` before it, peers take this replica for dead."""
        await end(self._republishing)
        await self._waiters.close()
        await self._session.close()
        if self._subscriptions is not None:
            await self._subscriptions.close()

    async def publish(self, grids: Mapping[bytes, Grid]) -> None:
        """Announce that this replica holds these addresses, with the grid of each; `t` is 1.

        Ends its leases on them and wakes replicas that wait for them.
        """
        if await self._publish(grids) or self.state is not IndexState.JOINED:
            self._leases.end(grids)  # while alone: after the outage, everything held is published
        else:
            self._leases.add_pending(grids)

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
        """Return the live peers that hold each address; absent if there are none. Never names this replica."""
        located: dict[bytes, Locations] = {}
        for batch in batches(addresses):
            values = await self._read("locate", [self._keys.location(address) for address in batch])
            if values is not None:
                located |= await self._live(dict(zip(batch, values, strict=True)))
        return located

    async def acquire(self, addresses: Sequence[bytes], without: Collection[str] = ()) -> Acquired:
        """Ask for leases to encode `addresses`; those that peers hold are located instead, in the same step.

        Locations at the replicas in `without` (which just failed) do not count. A granted lease is renewed until
        `publish` or `release`. A lease that this replica has already is granted again.
        """
        granted: set[bytes] = set()
        located: dict[bytes, Locations] = {}
        for batch in batches(addresses):
            orphans = await self._acquire(batch, without, granted, located)
            # Only dead replicas hold or encode these. Now that they are known to be dead, they do not count.
            granted.update(await self._acquire(orphans, without, granted, located) if orphans else ())
        self._leases.add(granted)
        return Acquired(frozenset(granted), located)

    async def renew(self, addresses: Sequence[bytes]) -> frozenset[bytes]:
        """Extend leases now; return those that are ours, including lapsed ones that nobody else had taken."""
        ours: set[bytes] = set()
        for batch in batches(addresses):
            keys = [(self._keys.lease(address),) for address in batch]
            replies = await self._session.run("renew", RENEW, keys, self._token, self._settings.lease_ttl_ms)
            ours.update(batch if replies is None else (a for a, r in zip(batch, replies, strict=True) if r))
        return frozenset(ours)

    async def release(self, addresses: Sequence[bytes]) -> None:
        """Give leases up without having published, and wake waiting replicas. Leases of others are not touched."""
        self._leases.end(addresses)
        for batch in batches(addresses):
            await self._session.run(
                "release", RELEASE, self._pairs(batch), self._token, self._session.notify_command
            )

    async def wait_published(
        self, address: bytes, timeout_s: float, without: Collection[str] = ()
    ) -> Locations:
        """Wait until a peer that is not in `without` publishes `address`, and return where it is.

        Empty if the lease ended without that, at the timeout, or when alone: acquire the address then.
        """
        if self.state is not IndexState.JOINED:
            return ()
        return await self._waiters.wait(address, timeout_s, without)

    def on_forgotten(self) -> None:
        """Renew leases and publish everything again: Redis may have lost what it knew about us."""
        self._leases.mark_due()
        self._republisher.forgotten()

    def on_lost(self) -> None:
        """Wake all waiters: the index is unavailable from now on."""
        self._waiters.settle_all()

    async def on_beat(self) -> None:
        """Renew leases that are due, and send pending publications; at every heartbeat."""
        if due := self._leases.due():
            renewed = await self.renew(due)
            self._leases.renewed(renewed)
            self._leases.end(set(due) - renewed)
        if pending := dict(self._leases.pending):
            await self.publish(pending)

    async def _publish(self, grids: Mapping[bytes, Grid]) -> bool:
        through = True
        ttl_ms = self._settings.location_ttl_s * 1000
        for batch in batches(list(grids)):
            arguments = (self._token, ttl_ms, self._session.notify_command)
            each = [packed(grids[address]) for address in batch]
            through &= (
                await self._session.run("publish", PUBLISH, self._pairs(batch), *arguments, each=each)
                is not None
            )
        return through

    async def _acquire(
        self,
        addresses: Sequence[bytes],
        without: Collection[str],
        granted: set[bytes],
        located: dict[bytes, Locations],
    ) -> list[bytes]:
        """Add to `granted` and `located`; return the addresses that only dead replicas hold or encode."""
        membership = self._session.membership
        uncounted = (b"".join(membership.dead), membership.tokens_of(without)) if membership else (b"", b"")
        arguments = (self._token, self._settings.lease_ttl_ms, *uncounted)
        replies = await self._session.run("acquire", ACQUIRE, self._pairs(addresses), *arguments)
        if replies is None:
            granted.update(addresses)
            return []
        by_address = dict(zip(addresses, replies, strict=True))
        granted.update(address for address, reply in by_address.items() if reply == 1)
        values = {address: reply for address, reply in by_address.items() if isinstance(reply, bytes)}
        holders = {address: reply[0] for address, reply in by_address.items() if _names_holder(reply)}
        live = await self._live(values, holders.values(), without)
        located |= live
        orphans = [address for address in values if address not in live]
        return orphans + [address for address, holder in holders.items() if not self._lives(holder)]

    async def _live(
        self,
        values: Mapping[bytes, bytes | None],
        others: Iterable[bytes] = (),
        without: Collection[str] = (),
    ) -> dict[bytes, Locations]:
        """Return the live locations. Unknown replicas in them or among `others` are looked up first, once."""
        membership = self._session.membership
        if membership is None:
            return {}
        named = {token for value in values.values() for token, *_ in records(value)}.union(others)
        if membership.unknown(named):
            await self._session.heartbeat(self._session.calls)
            membership.mark_dead(named)
        return {a: live for a, value in values.items() if (live := membership.locations(value, without))}

    def _lives(self, holder: bytes) -> bool:
        membership = self._session.membership
        return membership is not None and holder not in membership.dead

    async def _settled(self, addresses: Collection[bytes]) -> dict[bytes, Locations]:
        values = await self._read("wait", [key for pair in self._pairs(addresses) for key in pair])
        if values is None:
            return {} if self.state is IndexState.JOINED else dict.fromkeys(addresses, ())
        holders = {a: holder for a, holder in zip(addresses, values[1::2], strict=True) if holder}
        live = await self._live(dict(zip(addresses, values[::2], strict=True)), holders.values())
        encoding = {address for address, holder in holders.items() if self._lives(holder)}
        return {
            address: live.get(address, ())
            for address in addresses
            if address in live or address not in encoding
        }

    async def _subscribe(self, begun: Iterable[bytes], ceased: Iterable[bytes]) -> None:
        async def subscribe(connection: Connection, _: Membership) -> None:
            if self._subscriptions is None or self._subscriptions.connection is not connection:
                stale, self._subscriptions = self._subscriptions, Subscriptions(connection, self._on_message)
                if stale is not None:
                    await stale.close()
            await self._subscriptions.subscribe(map(self._keys.location, begun))
            await self._subscriptions.unsubscribe(map(self._keys.location, ceased))

        await self._session.ask("follow", subscribe)

    def _on_message(self, channel: bytes) -> None:
        address = self._keys.address(channel)
        if address is not None:
            self._waiters.changed(address)

    async def _read(self, name: str, keys: Sequence[bytes]) -> list[bytes | None] | None:
        return await self._session.ask(name, lambda connection, _: connection.read(keys))

    def _pairs(self, addresses: Iterable[bytes]) -> list[tuple[bytes, bytes]]:
        return [(self._keys.location(address), self._keys.lease(address)) for address in addresses]

    @property
    def _token(self) -> bytes:
        return self._session.membership.token if self._session.membership else b""


def _names_holder(reply: Any) -> bool:
    """Whether a reply names who encodes an address: a list of one token, and nothing else that Redis may say."""
    return isinstance(reply, list) and len(reply) == 1 and isinstance(reply[0], bytes)
