"""The index: which replica holds which embedding, and who encodes what; in memory, or in Redis for a fleet."""

from encoder_service.cluster.index.contract import (
    Acquired,
    Held,
    Index,
    IndexState,
    Location,
    Locations,
    Peer,
    Replica,
    Tier,
)
from encoder_service.cluster.index.memory import InProcessCluster, MemoryIndex
from encoder_service.cluster.index.redis import RedisIndex
from encoder_service.cluster.index.schema import namespace
from encoder_service.cluster.index.session import RedisSettings, Watchers

__all__ = [
    "Acquired",
    "Held",
    "InProcessCluster",
    "Index",
    "IndexState",
    "Location",
    "Locations",
    "MemoryIndex",
    "Peer",
    "RedisIndex",
    "RedisSettings",
    "Replica",
    "Tier",
    "Watchers",
    "namespace",
]
