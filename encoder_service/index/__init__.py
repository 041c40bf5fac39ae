"""The index: which replica holds which embedding, and who encodes what; in memory, or in Redis for a fleet."""

from encoder_service.index.contract import (
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
from encoder_service.index.memory import Fleet, MemoryIndex
from encoder_service.index.redis import RedisIndex
from encoder_service.index.schema import namespace
from encoder_service.index.standing import RedisSettings, Watchers

__all__ = [
    "Acquired",
    "Fleet",
    "Held",
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
