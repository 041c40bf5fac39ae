"""The index in Redis: who holds which embedding and who encodes what; alone whenever Redis is unavailable."""

# Over 300 lines because the contract is in it too.

import asyncio
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from typing import Any

from encoder_contract.geometry import Grid
from encoder_service.cluster.contract import Acquired, IndexState, Locations, Replica
from encoder_service.cluster.index.connection import Connection, Script
from encoder_service.cluster.index.leases import Leases
from encoder_service.cluster.index.membership import Membership
from encoder_service.cluster.index.republish import Held, Republisher
from encoder_service.cluster.index.schema import Keys, Peer, packed, records
from encoder_service.cluster.index.session import OnCall, RedisSession, RedisSettings
from encoder_service.cluster.index.subscriptions import Subscriptions
from encoder_service.cluster.index.tasks import end
from encoder_service.cluster.index.waiters import Waiters

PUBLISH, RETRACT, ACQUIRE = Script("publish"), Script("retract"), Script("acquire")
RENEW, RELEASE, EXIST = Script("renew"), Script("release"), Script("exist")
# A script of this many addresses holds Redis, and everyone who asks it, for about two milliseconds.
MAX_BATCH = 256


class RedisIndex:
    """What the replicas of a namespace know of each other, over one Redis, a Redis Cluster, or Valkey; 6.2 or newer.

    What is always safe; every method belongs to one event loop:
    - **A hint, never the truth.** A location may be stale (ask the peer, then encode), a lease may be lost (the image
      is then encoded twice, to equal bits). Nothing that is answered here decides what bytes an address has.
    - **Bounded and quiet.** Every call returns within the index's time bound and raises nothing but
      `ModelMismatchError` from `register`. An index that cannot be reached, refuses, or is not joined answers as an
      empty one, at once: nothing is located, every lease is granted, nothing is stored. `state` says so.
    - **A batch is one step.** A call takes any number of addresses (32 bytes each, duplicates allowed) and costs one
      round trip for a reasonable batch, never one for each address.
    - **One encoder per address.** While the index is joined, an address is granted to one replica at a time, and to
      none while a live peer has published it. A holder that died loses its leases within the lease's time to live;
      a holder that lives keeps them until it publishes or releases, or forgets them for `MAX_LEASE_S`.
    - **Time is Redis's.** No clock of one machine is compared with that of another.

    After an outage the index registers again by itself, renews the leases still held, and is told again what this
    replica holds, paced and from a random moment on, so that replicas do not all do so at once.
    """

    def __init__(
        self,
        settings: RedisSettings,
        *,
        held: Held,
        load: Callable[[], float],
        on_call: OnCall = lambda *_: None,
    ) -> None:
        """`held` says what this replica holds, `load` how busy it is; `on_call` is told of every call to Redis."""
        self._settings = settings
        self._keys = Keys(settings.namespace)
        self._leases = Leases(renew_s=settings.lease_ttl_ms / 3000)
        self._waiters = Waiters(self._settled, self._subscribe)
        self._republisher = Republisher(held, self._publish, settings.location_ttl_s)
        self._republishing: asyncio.Task[None] | None = None
        self._session = RedisSession(settings, load, on_call, self, self._keys.roll)
        self._subscriptions: Subscriptions | None = None

    @property
    def max_source_bytes(self) -> int:
        """The largest image that `put_source` takes."""
        return self._settings.max_source_bytes

    @property
    def state(self) -> IndexState:
        """Whether this replica is connected now."""
        return self._session.state

    def peers(self) -> tuple[Peer, ...]:
        """Return the other live replicas, as of the last heartbeat; none while alone."""
        membership = self._session.membership
        return tuple(membership.peers.values()) if membership and self.state is IndexState.JOINED else ()

    async def register(self, replica: Replica) -> None:
        """Join under `replica` and keep beating until `leave` or `close`; alone, go on trying. Called once.

        An earlier epoch of the same replica is superseded, and what it had published vanishes. Raises
        `ModelMismatchError` when a live replica of the namespace serves another model or processor.
        """
        await self._session.register(replica)
        self._republishing = asyncio.create_task(self._republisher.run(), name="index-republisher")

    async def leave(self) -> None:
        """Drain: leases are free, peers stop finding this replica; from here every call answers as alone."""
        await self.release(self._leases.all())
        await self._session.leave()

    async def close(self) -> None:
        """Stop everything and free connections. Without `leave` before it, peers see a death. Idempotent."""
        await end(self._republishing)
        await self._waiters.close()
        await self._session.close()
        if self._subscriptions is not None:
            await self._subscriptions.close()

    async def publish(self, grids: Mapping[bytes, Grid]) -> None:
        """Say that this replica holds these addresses, with the grid of each; `t` is 1.

        Ends its leases on them and wakes who waits for them.
        """
        if await self._publish(grids) or self.state is not IndexState.JOINED:
            self._leases.end(grids)  # alone, all that is held is published on return
        else:
            self._leases.add_pending(grids)

    async def retract(self, addresses: Sequence[bytes], replica_id: str | None = None) -> None:
        """Say that this replica no longer holds `addresses`, or that the live peer `replica_id` turned out not to."""
        membership = self._session.membership
        token = membership and (
            membership.token if replica_id is None else membership.tokens_of([replica_id])
        )
        if token:
            for batch in _batches(addresses):
                await self._run("retract", RETRACT, [(self._keys.location(a),) for a in batch], token)

    async def locate(self, addresses: Sequence[bytes]) -> dict[bytes, Locations]:
        """Return the live peers that hold each address; absent when there are none. Never names this replica."""
        located: dict[bytes, Locations] = {}
        for batch in _batches(addresses):
            values = await self._read("locate", [self._keys.location(address) for address in batch])
            if values is not None:
                located |= await self._live(dict(zip(batch, values, strict=True)))
        return located

    async def acquire(self, addresses: Sequence[bytes], without: Collection[str] = ()) -> Acquired:
        """Ask to be the one who encodes `addresses`; what peers hold is located instead, in the same step.

        Locations at the replicas in `without` (those that just failed us) do not count. A granted lease is renewed by
        the index until `publish` or `release`. Asking again for a lease already held grants it again.
        """
        granted: set[bytes] = set()
        located: dict[bytes, Locations] = {}
        for batch in _batches(addresses):
            orphans = await self._acquire(batch, without, granted, located)
            # Only the dead hold or encode these; now that they are known to be dead, they are in nobody's way.
            granted.update(await self._acquire(orphans, without, granted, located) if orphans else ())
        self._leases.add(granted)
        return Acquired(frozenset(granted), located)

    async def renew(self, addresses: Sequence[bytes]) -> frozenset[bytes]:
        """Lengthen leases now; return those that are ours, those that had lapsed and were free included."""
        ours: set[bytes] = set()
        for batch in _batches(addresses):
            keys = [(self._keys.lease(address),) for address in batch]
            replies = await self._run("renew", RENEW, keys, self._token, self._settings.lease_ttl_ms)
            ours.update(batch if replies is None else (a for a, r in zip(batch, replies, strict=True) if r))
        return frozenset(ours)

    async def release(self, addresses: Sequence[bytes]) -> None:
        """Give leases back without having published, and wake who waits. Leases of others are not touched."""
        self._leases.end(addresses)
        for batch in _batches(addresses):
            await self._run("release", RELEASE, self._pairs(batch), self._token, self._session.notify_command)

    async def wait_published(self, address: bytes, timeout_s: float) -> Locations:
        """Wait until a peer publishes `address` and return where it is.

        Returns nothing when the lease ended without that, at the timeout, or when alone: acquire it then.
        """
        if self.state is not IndexState.JOINED:
            return ()
        return await self._waiters.wait(address, timeout_s)

    async def put_source(self, key: bytes, image: bytes) -> bool:
        """Share the bytes of an image for a while; False when too large or not possible."""
        if len(image) > self._settings.max_source_bytes:
            return False

        async def put(connection: Connection, _: Membership) -> bool:
            await connection.put(self._keys.source(key), image, self._settings.source_ttl_s * 1000)
            return True

        return await self._session.ask("put_source", put, self._session.puts) is not None

    async def sources(self, keys: Sequence[bytes]) -> frozenset[bytes]:
        """Return those of the keys under which bytes are shared."""
        found: set[bytes] = set()
        for batch in _batches(keys):
            replies = await self._run("sources", EXIST, [(self._keys.source(key),) for key in batch])
            found.update(key for key, reply in zip(batch, replies or (), strict=False) if reply)
        return frozenset(found)

    async def get_source(self, key: bytes) -> bytes | None:
        """Return the bytes that any replica shared under `key`, or None."""

        async def get(connection: Connection, _: Membership) -> bytes | None:
            return await connection.read_one(self._keys.source(key), self._settings.max_source_bytes)

        return await self._session.ask("get_source", get, self._session.gets)

    def on_forgotten(self) -> None:
        """Redis is new to us, or lost what it knew of us."""
        self._leases.mark_due()
        self._republisher.forgotten()

    def on_lost(self) -> None:
        """The index cannot be asked any more: nobody is worth waiting for."""
        self._waiters.settle_all()

    async def on_beat(self) -> None:
        """With every heartbeat, renew what we hold, and publish what did not get through."""
        if due := self._leases.due():
            renewed = await self.renew(due)
            self._leases.renewed(renewed)
            self._leases.end(set(due) - renewed)
        if pending := dict(self._leases.pending):
            await self.publish(pending)

    async def _publish(self, grids: Mapping[bytes, Grid]) -> bool:
        through = True
        ttl_ms = self._settings.location_ttl_s * 1000
        for batch in _batches(list(grids)):
            arguments = (self._token, ttl_ms, self._session.notify_command)
            each = [packed(grids[address]) for address in batch]
            through &= (
                await self._run("publish", PUBLISH, self._pairs(batch), *arguments, each=each) is not None
            )
        return through

    async def _acquire(
        self,
        addresses: Sequence[bytes],
        without: Collection[str],
        granted: set[bytes],
        located: dict[bytes, Locations],
    ) -> list[bytes]:
        """Add to what is granted and located; return what is neither granted nor anywhere, nor being encoded."""
        membership = self._session.membership
        uncounted = (b"".join(membership.dead), membership.tokens_of(without)) if membership else (b"", b"")
        arguments = (self._token, self._settings.lease_ttl_ms, *uncounted)
        replies = await self._run("acquire", ACQUIRE, self._pairs(addresses), *arguments)
        if replies is None:
            granted.update(addresses)
            return []
        by_address = dict(zip(addresses, replies, strict=True))
        granted.update(address for address, reply in by_address.items() if reply == 1)
        values = {address: reply for address, reply in by_address.items() if isinstance(reply, bytes)}
        holders = {address: reply[0] for address, reply in by_address.items() if isinstance(reply, list)}
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
        """Return the live locations; first, unknown replicas in them or among `others` are looked up, once."""
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

    async def _run(
        self,
        name: str,
        script: Script,
        keys: Sequence[Sequence[bytes]],
        *arguments: bytes | int,
        each: Sequence[bytes] = (),
    ) -> list[Any] | None:
        return await self._session.ask(
            name, lambda connection, _: connection.run(script, keys, *arguments, each=each)
        )

    async def _read(self, name: str, keys: Sequence[bytes]) -> list[bytes | None] | None:
        return await self._session.ask(name, lambda connection, _: connection.read(keys))

    def _pairs(self, addresses: Iterable[bytes]) -> list[tuple[bytes, bytes]]:
        return [(self._keys.location(address), self._keys.lease(address)) for address in addresses]

    @property
    def _token(self) -> bytes:
        return self._session.membership.token if self._session.membership else b""


def _batches(addresses: Sequence[bytes]) -> Iterator[list[bytes]]:
    unique = list(dict.fromkeys(addresses))
    for begin in range(0, len(unique), MAX_BATCH):
        yield unique[begin : begin + MAX_BATCH]
