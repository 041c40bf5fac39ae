"""The embedding store: tiers, eviction, pins, shared memory. See docs/store.md."""

from encoder_service.store.disk import Disk, DiskError
from encoder_service.store.pin import Pin
from encoder_service.store.segment import StoreSizeError, require_room
from encoder_service.store.stats import StoreStats, TierStats
from encoder_service.store.store import Store
from encoder_service.store.tier import AnyTier, TierName

__all__ = [
    "AnyTier",
    "Disk",
    "DiskError",
    "Pin",
    "Store",
    "StoreSizeError",
    "StoreStats",
    "TierName",
    "TierStats",
    "require_room",
]
