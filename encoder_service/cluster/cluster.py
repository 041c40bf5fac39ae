"""The interface to the other replicas: `Cluster`, which has none, and the types that its methods return."""

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
    LEFT = "left"  # drained: like alone, and never joins again


@dataclass(frozen=True, slots=True)
class Replica:
    """One start of a replica. A later start with the same `replica_id` has a later `epoch`."""

    replica_id: str
    epoch: int
    endpoint: str
    model_fingerprint: bytes
    processor_fingerprint: bytes

    def __post_init__(self) -> None:
        if not self.replica_id or not self.endpoint or " " in self.endpoint or self.epoch < 0:
            raise InvalidRequestError(
                "a replica needs an id, an endpoint without spaces, and an epoch of 0 or more, got "
                f"{self.replica_id!r}, {self.endpoint!r} and {self.epoch}"
            )


@dataclass(frozen=True, slots=True)
class Location:
    """A live peer that claims to hold an embedding with this grid: check that the image can have that grid."""

    replica_id: str
    endpoint: str
    grid: Grid


Locations = tuple[Location, ...]


@dataclass(frozen=True, slots=True)
class Acquired:
    """The answer to `acquire`: leases granted, and addresses that peers hold.

    If an address is in neither, another replica is encoding it: wait for that.
    """

    granted: frozenset[bytes]
    located: Mapping[bytes, Locations]


@dataclass(frozen=True, slots=True)
class ClusterStatus:
    """The state of this replica, its live peers, and how often it ignored rows that the fleet's key had not signed.

    `never_joined` says why a replica with an index has not joined it since its start; empty if it has.
    """

    state: IndexState
    peers: int = 0
    foreign_rows: int = 0
    never_joined: str = ""


# ruff: noqa: ARG002 - without other replicas, the answers do not depend on the arguments


class Cluster:
    """The other replicas. This class is for a server without Redis, which has none; `RedisCluster` overrides it.

    Not thread-safe: use from one event loop. An address is the 32 bytes of a store address. Guarantees:

    - **The cluster never decides which bytes an address has.** If a location is stale, the image is looked up again; if
      a lease is lost, the image is encoded twice, to equal bits.
    - **The cluster may know nothing.** Without Redis, and while the index is unavailable, nothing is found, every lease
      is granted. Every method then answers at once, like this class, without leases, tasks or I/O.
    - **Notifications return at once** (`publish`, `retract`, `release`, `note_request`) and never fail.
    - **Queries are bounded in time**, take a batch in one step, and raise only the errors in their docstrings.
    """

    def __init__(self) -> None:
        self._state = IndexState.ALONE

    @property
    def never_joined(self) -> str:
        """See `ClusterStatus`. Thread-safe."""
        return ""

    @property
    def status(self) -> ClusterStatus:
        """The status now. No I/O."""
        return ClusterStatus(self._state)

    async def join(self, replica: Replica) -> None:
        """Join as `replica`; call it once. Raises `ModelMismatchError`, before anything is started.

        If the index is unavailable, the replica works alone until the index is back, and then joins.
        """
        self._state = IndexState.JOINED

    async def hand_over(self, within_s: float) -> None:
        """Have peers fetch the images that only this replica holds, most recently requested first."""

    async def leave(self) -> None:
        """Drain: peers no longer find this replica, and its leases are released. Afterwards it answers as if alone."""
        self._state = IndexState.LEFT

    async def close(self) -> None:
        """Stop tasks and close connections. Without an earlier `leave`, peers treat this replica as dead."""

    def note_request(self, key: ImageKey) -> None:
        """Note that a caller wants the rows of an image: a handover begins with the latest."""

    async def find(self, images: Collection[ImageKey]) -> dict[bytes, Locations]:
        """Return the images, by address, that another replica holds or encodes.

        The value is the peers that hold the rows; it is empty while a peer encodes the image: wait with
        `wait_published`.
        """
        return {}

    def start_search(self, key: ImageKey, found: Callable[[bytes, Locations], None]) -> None:
        """Call `found` with address and locations once `find` finds the image, unless `stop_search` comes first."""

    def stop_search(self, address: bytes) -> None:
        """Stop searching for the address."""

    async def acquire(self, addresses: Sequence[bytes], excluding: Collection[str] = ()) -> Acquired:
        """Request leases to encode the addresses. An address that peers hold is located instead.

        Replicas in `excluding` do not count: an address that only they hold is granted. A lease that this replica
        already has is granted again.
        """
        return Acquired(frozenset(addresses), {})

    async def wait_published(
        self, address: bytes, timeout_s: float, excluding: Collection[str] = ()
    ) -> Locations:
        """Wait until the replica that encodes the address has published it, and return its locations.

        Return nothing if that replica gave up, at the timeout, or without other replicas: then acquire the address.
        Locations at replicas in `excluding` do not count. While there are such locations, a replica that gives up is
        noticed only at the timeout.
        """
        return ()

    def publish(self, address: bytes, grid: Grid) -> None:
        """Announce that this replica now holds the address; ends its lease."""

    def retract(self, address: bytes) -> None:
        """Announce that this replica no longer holds the address."""

    def release(self, address: bytes) -> None:
        """Release the lease of the address, if this replica has it."""

    def transfer_s(self, tokens: int) -> float:
        """Return the expected time to fetch an image of `tokens` tokens from a peer, in seconds."""
        return inf

    async def fetch_from_peer(self, key: ImageKey, locations: Locations, holder: str) -> Pin | None:
        """Fetch the rows from one of `locations` into the store; return None if every location fails.

        Each location is tried once. Concurrent callers share one transfer, which counts against the `holder` of the
        first. They may share the returned pin too: it keeps the entry until each caller has pinned it. Raises
        `OverloadedError` if the store has no space.
        """
        return None
