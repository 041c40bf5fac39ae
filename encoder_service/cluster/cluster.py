"""The other replicas, as the path of an image sees them: `Cluster`, which has none, and what its methods return."""

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from enum import Enum
from math import inf

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


# ruff: noqa: ARG002 - alone, the answers do not depend on the arguments


class Cluster:
    """The other replicas, as the path of an image sees them. This class is a server without Redis: there are none.

    Every method belongs to one event loop; an address is the 32 bytes of a store address. `RedisCluster` overrides all
    of this class. What is always safe:

    - **It never decides what bytes an address has.** A location may be stale, a lease may be lost: then an image is
      looked for once more, or encoded twice, to equal bits.
    - **It may know nothing.** Alone, and while the index is unavailable, nothing is found, every lease is granted and
      nothing is shared, all at once: as the methods of this class answer, without leases, tasks or I/O.
    - **Notifications return at once** (`publish`, `retract`, `release`, `share_source`, `asked`) and never fail.
    - **Queries are bounded in time**, take a batch in one step, and raise only what their docstrings name.
    """

    def __init__(self) -> None:
        self._state = IndexState.ALONE

    @property
    def status(self) -> ClusterStatus:
        """The cluster in numbers. No I/O."""
        return ClusterStatus(self._state)

    async def join(self, replica: Replica) -> None:
        """Join as `replica`; called once. Raises `ModelMismatchError`; nothing has been started then.

        While the index is unavailable the replica is alone; it joins as soon as the index is back.
        """
        self._state = IndexState.JOINED

    async def hand_over(self, within_s: float) -> None:
        """Have peers fetch the images that only this replica holds, most recently requested first."""

    async def leave(self) -> None:
        """Drain: peers stop finding this replica, its leases are released; from now on it answers as when alone."""
        self._state = IndexState.LEFT

    async def close(self) -> None:
        """Stop everything and close connections. Without a `leave` before it, peers take this replica for dead."""

    def asked(self, key: ImageKey) -> None:
        """Note that a caller wants the rows of an image."""

    async def find(self, images: Collection[ImageKey]) -> dict[bytes, Locations]:
        """Return, by address, those of the images that other replicas can help with.

        The value says which peers hold the image; it is empty if they only share the image's bytes.
        """
        return {}

    def search(self, key: ImageKey, found: Callable[[bytes, Locations], None]) -> None:
        """Call `found` with address and locations once `find` finds the image, unless `end_search` comes first."""

    def end_search(self, address: bytes) -> None:
        """Stop looking for the address."""

    async def acquire(self, addresses: Sequence[bytes], without: Collection[str] = ()) -> Acquired:
        """Ask for leases to encode the addresses; those that peers hold are located instead.

        An address that only the replicas in `without` hold is granted as if not held. A lease that this replica
        has already is granted again.
        """
        return Acquired(frozenset(addresses), {})

    async def wait_published(
        self, address: bytes, timeout_s: float, without: Collection[str] = ()
    ) -> Locations:
        """Wait until the replica that encodes the address has published it, and return where it is.

        Empty if that replica gave up, at the timeout, or when alone: acquire the address then. Locations at the
        replicas in `without` do not count; while there are any, a replica that gives up is noticed at the timeout.
        """
        return ()

    def publish(self, address: bytes, grid: Grid) -> None:
        """Announce that this replica holds the address now; ends its lease."""

    def retract(self, address: bytes) -> None:
        """Announce that this replica no longer holds the address."""

    def release(self, address: bytes) -> None:
        """Give up the lease of the address, if this replica has it."""

    def transfer_s(self, tokens: int) -> float:
        """Return how long fetching an image of so many tokens from a peer should take, seconds."""
        return inf

    async def fetch_from_peer(self, key: ImageKey, locations: Locations, holder: str) -> Pin | None:
        """Fetch the rows from one of `locations` into the store; return None if none of them delivers.

        Each location is tried once. Concurrent callers share one transfer, which counts against the first one's
        `holder`, and perhaps one pin, which keeps the entry until each of them has a pin of its own. Raises
        `OverloadedError` when the store has no room.
        """
        return None

    def share_source(self, key: ImageKey, data: bytes) -> None:
        """Share an image's bytes, so that any replica can finish what this one begins."""

    async def find_source(self, key: ImageKey) -> bytes | None:
        """Return bytes that another replica shared. Any writer of Redis may have written them: check the digest."""
        return None
