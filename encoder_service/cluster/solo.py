"""A cluster of one: nobody to ask, nobody to tell."""

# ruff: noqa: ARG002 - whatever is asked about, nobody has it

from collections.abc import Callable, Collection, Sequence
from math import inf

from encoder_contract.geometry import Grid
from encoder_service.address import ImageKey
from encoder_service.cluster.contract import Acquired, ClusterStatus, IndexState, Locations, Replica
from encoder_service.store import Pin


class Solo:
    """`Cluster` of a single node: no leases, no tasks, no I/O."""

    def __init__(self) -> None:
        self.status = ClusterStatus(IndexState.ALONE)

    async def join(self, replica: Replica) -> None:
        """Serve."""
        self.status = ClusterStatus(IndexState.JOINED)

    async def hand_over(self, within_s: float) -> None:
        """Nobody is there to take anything."""

    async def leave(self) -> None:
        """Drain."""
        self.status = ClusterStatus(IndexState.LEFT)

    async def close(self) -> None:
        """Nothing was begun."""

    def asked(self, key: ImageKey) -> None:
        """Nobody will take it over."""

    async def find(self, images: Collection[ImageKey]) -> dict[bytes, Locations]:
        """Nobody else has anything."""
        return {}

    def search(self, key: ImageKey, found: Callable[[bytes, Locations], None]) -> None:
        """Nobody else will have it."""

    def end_search(self, address: bytes) -> None:
        """Nobody was asked."""

    async def acquire(self, addresses: Sequence[bytes], without: Collection[str] = ()) -> Acquired:
        """Nobody else encodes anything."""
        return Acquired(frozenset(addresses), {})

    async def wait_published(self, address: bytes, timeout_s: float) -> Locations:
        """Nobody else encodes anything."""
        return ()

    def publish(self, address: bytes, grid: Grid) -> None:
        """Nobody is told."""

    def retract(self, address: bytes) -> None:
        """Nobody is told."""

    def release(self, address: bytes) -> None:
        """Nobody is told."""

    def transfer_s(self, tokens: int) -> float:
        """Nobody sends anything."""
        return inf

    async def fetch_from_peer(self, key: ImageKey, locations: Locations) -> Pin | None:
        """Nobody else has rows."""
        return None

    def share_source(self, key: ImageKey, data: bytes) -> None:
        """Nobody will read it."""

    async def find_source(self, key: ImageKey) -> bytes | None:
        """Nobody else was given anything."""
        return None
