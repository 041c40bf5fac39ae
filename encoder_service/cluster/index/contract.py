"""The contract of an index: which replica holds which embedding, and who encodes what."""

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from enum import Enum, IntEnum
from typing import Protocol

from encoder_contract.errors import InvalidRequestError
from encoder_contract.geometry import Grid

ADDRESS_BYTES = 32

# Address, grid and tier of every embedding this replica holds: what an index that lost its memory is told again.
Held = Callable[[], "Iterable[tuple[bytes, Grid, Tier]]"]


class Tier(IntEnum):
    """Where a replica keeps an embedding; the number is what the index stores."""

    DEVICE = 1
    HOST = 2


class IndexState(Enum):
    """How this replica stands with its fleet."""

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
class Peer:
    """Another live replica, as of the last heartbeat. `load` is its own measure; compare, do not interpret."""

    replica_id: str
    epoch: int
    endpoint: str
    load: float


@dataclass(frozen=True, slots=True)
class Location:
    """A live peer that said it holds an embedding, and of which grid: as it says, so check that such a grid can be."""

    replica_id: str
    endpoint: str
    tier: Tier
    grid: Grid


Locations = tuple[Location, ...]


@dataclass(frozen=True, slots=True)
class Acquired:
    """The answer to `acquire`. An address that is in neither is being encoded by another replica: wait for it."""

    granted: frozenset[bytes]
    located: Mapping[bytes, Locations]


class Index(Protocol):
    """What a replica asks of an index; every method belongs to one event loop.

    What is always safe:
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
    - **Time is the index's.** No clock of one machine is compared with that of another.

    After an outage the index registers again by itself, renews the leases still held, and is told again what this
    replica holds, paced and at a random moment so that a fleet does not return in one rush.
    """

    @property
    def state(self) -> IndexState:
        """How this replica stands with its fleet now."""

    @property
    def max_source_bytes(self) -> int:
        """The largest image that `put_source` takes; 0: this index shares none."""

    def peers(self) -> tuple[Peer, ...]:
        """Return the other live replicas, as of the last heartbeat; none while alone. No I/O."""

    async def register(self, replica: Replica) -> None:
        """Join the fleet under `replica` and keep beating until `leave` or `close`. Called once.

        An earlier epoch of the same replica is superseded, and what it had published vanishes. An index that cannot be
        reached leaves the replica alone and is tried again. Raises `ModelMismatchError` when a live replica of the
        namespace serves another model or processor.
        """

    async def leave(self) -> None:
        """Drain: peers stop finding this replica, its leases are free; from here every call answers as alone."""

    async def close(self) -> None:
        """Stop everything and free connections. Without `leave` before it, peers see a death. Idempotent."""

    async def publish(self, grids: Mapping[bytes, Grid], tier: Tier) -> None:
        """Say that this replica holds these addresses, with the grid of each; `t` is 1.

        Ends its leases on them and wakes who waits for them.
        """

    async def retract(self, addresses: Sequence[bytes], replica_id: str | None = None) -> None:
        """Say that this replica no longer holds `addresses`, or that the live peer `replica_id` turned out not to."""

    async def locate(self, addresses: Sequence[bytes]) -> dict[bytes, Locations]:
        """Return the live peers that hold each address; absent when there are none. Never names this replica."""

    async def acquire(self, addresses: Sequence[bytes], without: Collection[str] = ()) -> Acquired:
        """Ask to be the one who encodes `addresses`; what peers hold is located instead, in the same step.

        Locations at the replicas in `without` (those that just failed us) do not count. A granted lease is renewed by
        the index until `publish` or `release`. Asking again for a lease already held grants it again.
        """

    async def renew(self, addresses: Sequence[bytes]) -> frozenset[bytes]:
        """Lengthen leases now; return those that are ours, those that had lapsed and were free included."""

    async def release(self, addresses: Sequence[bytes]) -> None:
        """Give leases back without having published, and wake who waits. Leases of others are not touched."""

    async def wait_published(self, address: bytes, timeout_s: float) -> Locations:
        """Wait until a peer publishes `address` and return where it is.

        Returns nothing when the lease ended without that, at the timeout, or when alone: acquire it then.
        """

    async def put_source(self, key: bytes, image: bytes) -> bool:
        """Share the bytes of an image with the fleet for a while; False when too large or not possible."""

    async def sources(self, keys: Sequence[bytes]) -> frozenset[bytes]:
        """Return those of the keys under which bytes are shared."""

    async def get_source(self, key: bytes) -> bytes | None:
        """Return the bytes that any replica shared under `key`, or None."""


# Work that takes longer than any caller's deadline is not work: after this a lease is no longer renewed, so that
# an address that its holder forgot does not stay locked for as long as the holder lives.
MAX_LEASE_S = 300.0
