"""The embedding store: arenas, tiers, eviction, pins, shared memory. See docs/store.md."""

from encoder_service.store.capacity import StoreSizeError
from encoder_service.store.incoming import Incoming
from encoder_service.store.pin import Pin
from encoder_service.store.stats import EntryStats, StoreStats, TierStats
from encoder_service.store.store import Store
from encoder_service.store.tiers import TierName

__all__ = ["EntryStats", "Incoming", "Pin", "Store", "StoreSizeError", "StoreStats", "TierName", "TierStats"]
