"""The embedding store: arenas, tiers, eviction, pins, shared memory. See docs/store.md."""

from encoder_service.store.arena import AnyTier, TierName
from encoder_service.store.disk import DiskError
from encoder_service.store.pin import Incoming, Pin
from encoder_service.store.segment import StoreSizeError, require_room
from encoder_service.store.store import EntryStats, Obstacle, Store, StoreStats, TierStats

__all__ = [
    "AnyTier",
    "DiskError",
    "EntryStats",
    "Incoming",
    "Obstacle",
    "Pin",
    "Store",
    "StoreSizeError",
    "StoreStats",
    "TierName",
    "TierStats",
    "require_room",
]
