"""The index in the memory of one process: what a single node needs, and the contract in its plainest form."""

import asyncio
from collections import OrderedDict
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from time import monotonic

from encoder_contract.errors import ModelMismatchError
from encoder_contract.geometry import Grid
from encoder_service.cluster.index.contract import (
    Acquired,
    IndexState,
    Location,
    Locations,
    Peer,
    Replica,
    Tier,
)


@dataclass
class InProcessCluster:
    """What the replicas of one process share; on a single node, one replica shares it with nobody.

    Nothing lapses here but sources: a replica that is gone takes its leases and locations with it at once.
    """

    max_source_bytes: int = 64 << 20
    source_ttl_s: float = 600.0
    clock: Callable[[], float] = monotonic
    members: "dict[str, MemoryIndex]" = field(default_factory=dict)
    locations: dict[bytes, dict[str, tuple[Tier, Grid]]] = field(default_factory=dict)
    leases: dict[bytes, str] = field(default_factory=dict)
    waiters: dict[bytes, set["asyncio.Future[None]"]] = field(default_factory=dict)
    sources: OrderedDict[bytes, tuple[float, bytes]] = field(default_factory=OrderedDict)

    async def change(self, address: bytes) -> None:
        """Wait for the next `wake` of an address."""
        waiters = self.waiters.setdefault(address, set())
        waiter: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        waiters.add(waiter)
        try:
            await waiter
        finally:
            waiters.discard(waiter)
            if not waiters and self.waiters.get(address) is waiters:
                del self.waiters[address]

    def wake(self, address: bytes) -> None:
        """Have those who wait for an address look again."""
        for waiter in self.waiters.pop(address, set()):
            if not waiter.done():
                waiter.set_result(None)

    def remove(self, replica_id: str) -> None:
        """Forget a replica, and end its leases."""
        self.members.pop(replica_id, None)
        for address in [a for a, holder in self.leases.items() if holder == replica_id]:
            del self.leases[address]
            self.wake(address)
        for address in [a for a, holders in self.locations.items() if replica_id in holders]:
            self.drop(address, replica_id)

    def drop(self, address: bytes, replica_id: str) -> None:
        """Forget that a replica holds an address."""
        holders = self.locations.get(address, {})
        holders.pop(replica_id, None)
        if not holders:
            self.locations.pop(address, None)

    def expire_sources(self) -> None:
        """Drop sources that are too old, and the oldest while there are too many bytes."""
        now, held_bytes = self.clock(), sum(len(image) for _, image in self.sources.values())
        while self.sources:
            key, (expires, image) = next(iter(self.sources.items()))
            if expires > now and held_bytes <= self.max_source_bytes:
                return
            del self.sources[key]
            held_bytes -= len(image)


class MemoryIndex:
    """`Index` for the replicas of one process; without a `fleet` to share, a fleet of one."""

    def __init__(
        self, fleet: InProcessCluster | None = None, *, load: Callable[[], float] = lambda: 0.0
    ) -> None:
        self._fleet = fleet or InProcessCluster()
        self._load = load
        self._replica: Replica | None = None
        self.state = IndexState.ALONE

    @property
    def max_source_bytes(self) -> int:
        """The largest image that `put_source` takes."""
        return self._fleet.max_source_bytes

    def peers(self) -> tuple[Peer, ...]:
        """Return the other replicas of the process."""
        if self.state is not IndexState.JOINED:
            return ()
        return tuple(member.as_peer() for member in self._fleet.members.values() if member is not self)

    def as_peer(self) -> Peer:
        """Return this replica as others see it."""
        replica = self._joined()
        return Peer(replica.replica_id, replica.epoch, replica.endpoint, self._load())

    async def register(self, replica: Replica) -> None:
        """Join the fleet. Raises `ModelMismatchError`."""
        assert self._replica is None, "a replica registers once"
        earlier = self._fleet.members.get(replica.replica_id)
        for member in self._fleet.members.values():
            if member is not earlier and _model(member._joined()) != _model(replica):
                raise ModelMismatchError(
                    f"{member._joined().replica_id} serves {_model(member._joined())}, "
                    f"{replica.replica_id} serves {_model(replica)}"
                )
        if earlier is not None:
            await earlier.close()
        self._replica = replica
        self._fleet.members[replica.replica_id] = self
        self.state = IndexState.JOINED

    async def leave(self) -> None:
        """Drain."""
        if self.state is IndexState.JOINED:
            self._fleet.remove(self._joined().replica_id)
        self.state = IndexState.LEFT

    async def close(self) -> None:
        """Stop; in one process, a death and a departure are the same."""
        await self.leave()

    async def publish(self, grids: Mapping[bytes, Grid], tier: Tier) -> None:
        """Say that this replica holds these addresses; ends its leases on them and wakes who waits for them."""
        if self.state is IndexState.JOINED:
            replica_id = self._joined().replica_id
            for address, grid in grids.items():
                self._fleet.locations.setdefault(address, {})[replica_id] = tier, grid
                if self._fleet.leases.get(address) == replica_id:
                    del self._fleet.leases[address]
                self._fleet.wake(address)

    async def retract(self, addresses: Sequence[bytes], replica_id: str | None = None) -> None:
        """Say that this replica no longer holds `addresses`, or that `replica_id` turned out not to."""
        if self.state is IndexState.JOINED:
            for address in addresses:
                self._fleet.drop(address, replica_id or self._joined().replica_id)

    async def locate(self, addresses: Sequence[bytes]) -> dict[bytes, Locations]:
        """Return the peers that hold each address; absent when there are none."""
        return {address: found for address in addresses if (found := self._located(address, ()))}

    async def acquire(self, addresses: Sequence[bytes], without: Collection[str] = ()) -> Acquired:
        """Ask to be the one who encodes `addresses`; what peers hold is located instead."""
        if self.state is not IndexState.JOINED:
            return Acquired(frozenset(addresses), {})
        located = {address: found for address in addresses if (found := self._located(address, without))}
        return Acquired(await self.renew([a for a in addresses if a not in located]), located)

    async def renew(self, addresses: Sequence[bytes]) -> frozenset[bytes]:
        """Return the leases that are ours, those that are free included; here a lease needs no renewing."""
        if self.state is not IndexState.JOINED:
            return frozenset(addresses)
        ours = self._joined().replica_id
        return frozenset(a for a in addresses if self._fleet.leases.setdefault(a, ours) == ours)

    async def release(self, addresses: Sequence[bytes]) -> None:
        """Give leases back without having published, and wake who waits."""
        for address in addresses:
            if (
                self.state is IndexState.JOINED
                and self._fleet.leases.get(address) == self._joined().replica_id
            ):
                del self._fleet.leases[address]
                self._fleet.wake(address)

    async def wait_published(self, address: bytes, timeout_s: float) -> Locations:
        """Wait until a peer publishes `address`; nothing when its lease ended without that."""
        try:
            async with asyncio.timeout(timeout_s):
                while self.state is IndexState.JOINED and address in self._fleet.leases:
                    if found := self._located(address, ()):
                        return found
                    await self._fleet.change(address)
        except TimeoutError:
            return ()
        return self._located(address, ())

    async def put_source(self, key: bytes, image: bytes) -> bool:
        """Keep the bytes of an image for a while; False when too large."""
        if self.state is not IndexState.JOINED or len(image) > self._fleet.max_source_bytes:
            return False
        self._fleet.sources.pop(key, None)
        self._fleet.sources[key] = (self._fleet.clock() + self._fleet.source_ttl_s, image)
        self._fleet.expire_sources()
        return True

    async def sources(self, keys: Sequence[bytes]) -> frozenset[bytes]:
        """Return those of the keys under which bytes are kept."""
        self._fleet.expire_sources()
        held = self._fleet.sources if self.state is IndexState.JOINED else {}
        return frozenset(key for key in keys if key in held)

    async def get_source(self, key: bytes) -> bytes | None:
        """Return the bytes kept under `key`, or None."""
        self._fleet.expire_sources()
        held = self._fleet.sources.get(key) if self.state is IndexState.JOINED else None
        return held[1] if held else None

    def _joined(self) -> Replica:
        assert self._replica is not None
        return self._replica

    def _located(self, address: bytes, without: Collection[str]) -> Locations:
        if self.state is not IndexState.JOINED:
            return ()
        found = []
        for replica_id, (tier, grid) in self._fleet.locations.get(address, {}).items():
            member = self._fleet.members.get(replica_id)
            if member is not None and member is not self and replica_id not in without:
                found.append(Location(replica_id, member._joined().endpoint, tier, grid))
        return tuple(found)


def _model(replica: Replica) -> str:
    return f"{replica.model_fingerprint.hex()}.{replica.processor_fingerprint.hex()}"
