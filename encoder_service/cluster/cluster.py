"""The cluster, as the path of an image sees it: what that needs from the other replicas; and `Solo`, without any."""

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from enum import Enum
from math import inf
from typing import Protocol

from encoder_contract.errors import InvalidRequestError
from encoder_contract.geometry import Grid
from encoder_service.keys import ImageKey
from encoder_service.store import Pin


class IndexState(Enum):
    """Whether this replica is connected to the index."""

    ALONE = "alone"  # not registered yet, or the index is unavailable: calls answer like an empty index
    JOINED = "joined"
    LEFT = "left"  # drained: like alone, for good


@dataclass(frozen=True, slots=True)
class Replica:
    """What a replica says about itself. Each start of the same `replica_id` has another `epoch`."""

    replica_id: str
    epoch: int
    endpoint: str
    model_fingerprint: bytes
    processor_fingerprint: bytes

    def __post_init__(self) -> None:
        if not self.replica_id or not self.endpoint or " " in self.endpoint or self.epoch < 0:
            raise InvalidRequestError(
                "a replica needs an id, an endpoint without spaces, and an epoch of 0 or more"
            )


@dataclass(frozen=True, slots=True)
class Location:
    """A live peer that says it holds an embedding, and the grid it names: check that an image can have that grid."""

    replica_id: str
    endpoint: str
    grid: Grid


Locations = tuple[Location, ...]


@dataclass(frozen=True, slots=True)
class Acquired:
    """The answer to `acquire`. An address that is in neither is being encoded by another replica: wait for it."""

    granted: frozenset[bytes]
    located: Mapping[bytes, Locations]


@dataclass(frozen=True, slots=True)
class ClusterStatus:
    """The cluster in numbers: our state, live peers, and image files shared and not shared so far."""

    state: IndexState
    peers: int = 0
    sources_shared: int = 0
    sources_dropped: int = 0
    foreign_rows: int = 0
    foreign_sources: int = 0


class Cluster(Protocol):
    """The other replicas. Every method belongs to one event loop; an address is the 32 bytes of a store address.

    What is always safe:
    - **It never decides what bytes an address has.** A location may be stale, a lease may be lost: then an image is
      looked for once more, or encoded twice, to equal bits.
    - **It may know nothing.** Without peers, or while the index is unavailable, nothing is found, every lease is
      granted and nothing is shared, all at once. `Solo` always answers like that.
    - **Notifications return at once** (`publish`, `retract`, `release`, `share_source`, `asked`) and never fail.
    - **Queries are bounded in time**, take a batch in one step, and raise only what their docstrings name.
    """

    @property
    def status(self) -> ClusterStatus:
        """The cluster in numbers. No I/O."""

    async def join(self, replica: Replica) -> None:
        """Join as `replica`; called once. Raises `ModelMismatchError`; nothing has been started then.

        While the index is unavailable the replica is alone; it joins as soon as the index is back.
        """

    async def hand_over(self, within_s: float) -> None:
        """Have peers fetch the images that only this replica holds, most recently requested first."""

    async def leave(self) -> None:
        """Drain: peers stop finding this replica, its leases are released; from now on it answers as `Solo` does."""

    async def close(self) -> None:
        """Stop everything and close connections. Without a `leave` before it, peers take this replica for dead."""

    def asked(self, key: ImageKey) -> None:
        """Note that a caller wants the rows of an image."""

    async def find(self, images: Collection[ImageKey]) -> dict[bytes, Locations]:
        """Return, by address, those of the images that other replicas can help with.

        The value says which peers hold the image; it is empty if they only share the image's bytes.
        """

    def search(self, key: ImageKey, found: Callable[[bytes, Locations], None]) -> None:
        """Call `found` with address and locations once `find` finds the image, unless `end_search` comes first."""

    def end_search(self, address: bytes) -> None:
        """Stop looking for the address."""

    async def acquire(self, addresses: Sequence[bytes], without: Collection[str] = ()) -> Acquired:
        """Ask for leases to encode the addresses; those that peers hold are located instead.

        An address that only the replicas in `without` hold is granted as if not held. A lease that this replica
        has already is granted again.
        """

    async def wait_published(
        self, address: bytes, timeout_s: float, without: Collection[str] = ()
    ) -> Locations:
        """Wait until the replica that encodes the address has published it, and return where it is.

        Empty if that replica gave up, at the timeout, or when alone: acquire the address then. Locations at the
        replicas in `without` do not count; while there are any, a replica that gives up is noticed at the timeout.
        """

    def publish(self, address: bytes, grid: Grid) -> None:
        """Announce that this replica holds the address now; ends its lease."""

    def retract(self, address: bytes) -> None:
        """Announce that this replica no longer holds the address."""

    def release(self, address: bytes) -> None:
        """Give up the lease of the address, if this replica has it."""

    def transfer_s(self, tokens: int) -> float:
        """Return how long fetching an image of so many tokens from a peer should take, seconds."""

    async def fetch_from_peer(self, key: ImageKey, locations: Locations, holder: str) -> Pin | None:
        """Fetch the rows from one of `locations` into the store; return None if none of them delivers.

        Each location is tried once. Concurrent callers share one transfer, which counts against the first one's
        `holder`, and perhaps one pin, which keeps the entry until each of them has a pin of its own. Raises
        `OverloadedError` when the store has no room.
        """

    def share_source(self, key: ImageKey, data: bytes) -> None:
        """Share an image's bytes, so that any replica can finish what this one begins."""

    async def find_source(self, key: ImageKey) -> bytes | None:
        """Return bytes that another replica shared. Anyone may have written them: check them against the digest."""


# ruff: noqa: ARG002 - the answer never depends on the arguments


class Solo:
    """A `Cluster` without peers: no leases, no tasks, no I/O."""

    def __init__(self) -> None:
        self.status = ClusterStatus(IndexState.ALONE)

    async def join(self, replica: Replica) -> None:
        """Report as joined."""
        self.status = ClusterStatus(IndexState.JOINED)

    async def hand_over(self, within_s: float) -> None:
        """There are no peers to take anything."""

    async def leave(self) -> None:
        """Report as left."""
        self.status = ClusterStatus(IndexState.LEFT)

    async def close(self) -> None:
        """There is nothing to close."""

    def asked(self, key: ImageKey) -> None:
        """Only a handover would need to know."""

    async def find(self, images: Collection[ImageKey]) -> dict[bytes, Locations]:
        """Peers have nothing."""
        return {}

    def search(self, key: ImageKey, found: Callable[[bytes, Locations], None]) -> None:
        """It will not turn up elsewhere."""

    def end_search(self, address: bytes) -> None:
        """Nothing is being looked for."""

    async def acquire(self, addresses: Sequence[bytes], without: Collection[str] = ()) -> Acquired:
        """Grant everything."""
        return Acquired(frozenset(addresses), {})

    async def wait_published(
        self, address: bytes, timeout_s: float, without: Collection[str] = ()
    ) -> Locations:
        """No other replica encodes anything."""
        return ()

    def publish(self, address: bytes, grid: Grid) -> None:
        """There is no index to tell."""

    def retract(self, address: bytes) -> None:
        """There is no index to tell."""

    def release(self, address: bytes) -> None:
        """There is no index to tell."""

    def transfer_s(self, tokens: int) -> float:
        """No peer sends anything."""
        return inf

    async def fetch_from_peer(self, key: ImageKey, locations: Locations, holder: str) -> Pin | None:
        """No peer has rows."""
        return None

    def share_source(self, key: ImageKey, data: bytes) -> None:
        """No peer would read it."""

    async def find_source(self, key: ImageKey) -> bytes | None:
        """No peer shares anything."""
        return None
