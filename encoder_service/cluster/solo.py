"""The cluster of a single node: no peers."""

# ruff: noqa: ARG002 - the answer never depends on the arguments

from collections.abc import Callable, Collection, Sequence
from math import inf

from encoder_contract.geometry import Grid
from encoder_service.address import ImageKey
from encoder_service.cluster.contract import Acquired, ClusterStatus, IndexState, Locations, Replica
from encoder_service.store import Pin


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

    async def fetch_from_peer(self, key: ImageKey, locations: Locations) -> Pin | None:
        """No peer has rows."""
        return None

    def share_source(self, key: ImageKey, data: bytes) -> None:
        """No peer would read it."""

    async def find_source(self, key: ImageKey) -> bytes | None:
        """No peer shares anything."""
        return None
