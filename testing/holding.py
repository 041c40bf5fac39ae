"""A replica of the cluster without a store: it holds addresses, and no rows."""

from collections.abc import Callable, Mapping
from typing import cast

from encoder_contract.geometry import Geometry, Grid
from encoder_service.cluster.peers import Peers
from encoder_service.cluster.redis import RedisSettings
from encoder_service.cluster.redis.session import OnCall
from encoder_service.cluster.redis_cluster import RedisCluster
from encoder_service.keys import Recipe
from encoder_service.store import Store


class Holding(dict[bytes, Grid]):
    """Addresses and their grids, as a store lists them."""

    def __init__(self, grids: Mapping[bytes, Grid] | None = None) -> None:
        super().__init__(grids or {})
        self.on_freed: list[Callable[[], None]] = []

    def grids(self) -> "Holding":
        """Return the held addresses with their grids."""
        return self


def cluster_of(
    settings: RedisSettings, held: Holding | None = None, on_call: OnCall = lambda *_: None
) -> RedisCluster:
    """Return the cluster of a replica without a store, which never fetches rows from peers."""
    recipe, geometry = Recipe(b"m" * 32, b"p" * 32, "float32"), Geometry(16, 2, 65536, 1 << 24)
    peers = Peers(recipe, 8, 32, geometry)
    store = cast(Store, Holding() if held is None else held)
    return RedisCluster(settings, peers, store, on_call=on_call)
