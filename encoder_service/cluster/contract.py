"""The contract of a cluster: the other replicas, as the path of an image sees them."""

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from enum import Enum
from typing import Protocol

from encoder_contract.errors import InvalidRequestError
from encoder_contract.geometry import Grid
from encoder_service.address import ImageKey
from encoder_service.store import Pin


class IndexState(Enum):
    """Whether this replica is connected to the index."""

    ALONE = "alone"  # not registered yet, or the index cannot be used: calls answer as an empty index
    JOINED = "joined"
    LEFT = "left"  # drained: as alone, and for good


@dataclass(frozen=True, slots=True)
class Replica:
    """What a replica says of itself. `epoch` differs with every start of the same `replica_id`."""

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
    """A live peer that said it holds an embedding, and of which grid: as it says, so check that such a grid can be."""

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
    """What metrics say of the cluster: our state, live peers, and image files shared and not shared so far."""

    state: IndexState
    peers: int = 0
    sources_shared: int = 0
    sources_dropped: int = 0


class Cluster(Protocol):
    """The other replicas. Every method belongs to one event loop; an address is the 32 bytes of a store address.

    What is always safe:
    - **It never decides what bytes an address has.** A location may be stale, a lease may be lost: then an image is
      looked for once more, or encoded twice, to equal bits.
    - **It may always know nothing.** With nobody to ask, or an index that cannot be reached, nothing is found, every
      lease is granted and nothing is shared, at once. `Solo` answers so always.
    - **Telling returns at once** (`publish`, `retract`, `release`, `share_source`, `asked`) and never fails.
    - **Asking is bounded in time**, takes a batch in one step, and raises nothing but what its docstring names.
    """

    @property
    def status(self) -> ClusterStatus:
        """What metrics say of the cluster. No I/O."""

    async def join(self, replica: Replica) -> None:
        """Become a member under `replica`; called once. Raises `ModelMismatchError`, and then nothing was begun.

        An index that cannot be reached leaves the replica alone; it is joined as soon as it can be.
        """

    async def hand_over(self, within_s: float) -> None:
        """Have peers fetch what this replica alone holds, the image asked for last first."""

    async def leave(self) -> None:
        """Drain: peers stop finding this replica, its leases are free; from here every call answers as `Solo` does."""

    async def close(self) -> None:
        """Stop everything and free connections. Without `leave` before it, peers see a death."""

    def asked(self, key: ImageKey) -> None:
        """Note that someone wants the rows of an image."""

    async def find(self, images: Collection[ImageKey]) -> dict[bytes, Locations]:
        """Return those of the images, by address, that others can help with.

        That is where peers hold each; nowhere where they only share the image's bytes.
        """

    def search(self, key: ImageKey, found: Callable[[bytes, Locations], None]) -> None:
        """Call `found` with address and locations once `find` finds the image, unless `end_search` comes first."""

    def end_search(self, address: bytes) -> None:
        """Look for the address no longer."""

    async def acquire(self, addresses: Sequence[bytes], without: Collection[str] = ()) -> Acquired:
        """Ask to be the one who encodes the addresses; what peers hold is located instead.

        What only the replicas in `without` hold is granted as if nobody had it. A lease granted before is granted
        again.
        """

    async def wait_published(self, address: bytes, timeout_s: float) -> Locations:
        """Wait until the replica that encodes the address has published it, and return where.

        Returns nothing when it gave up, at the timeout, or when alone: acquire it then.
        """

    def publish(self, address: bytes, grid: Grid) -> None:
        """Say that this replica holds the address now; ends its lease."""

    def retract(self, address: bytes) -> None:
        """Say that this replica no longer holds the address."""

    def release(self, address: bytes) -> None:
        """Say that this replica will not encode the address after all, if it has the lease."""

    def transfer_s(self, tokens: int) -> float:
        """Return how long fetching an image of so many tokens from a peer should take, seconds."""

    async def fetch_from_peer(self, key: ImageKey, locations: Locations) -> Pin | None:
        """Bring the rows over from one of `locations` into the store; None when none of them gives them.

        Each location is tried once. Callers share one transfer, and so may share the pin: it is for holding the entry
        until each has a pin of its own. Raises `OverloadedError` when the store has no room.
        """

    def share_source(self, key: ImageKey, data: bytes) -> None:
        """Let any replica finish what this one begins."""

    async def find_source(self, key: ImageKey) -> bytes | None:
        """Return bytes that another replica was given: of whoever wrote them, so check them against the digest."""
