"""The embedding store: tiers, eviction, pins, shared memory. See docs/store.md.

Importing it does not load torch, so that a server can check its folders first. torch is loaded with the first name that
needs it.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

from encoder_service.store.disk import Disk, DiskError
from encoder_service.store.segment import StoreSizeError, require_room

if TYPE_CHECKING:
    from encoder_service.store.pin import Pin
    from encoder_service.store.stats import StoreStats, TierStats
    from encoder_service.store.store import Store
    from encoder_service.store.tier import AnyTier, TierName
else:
    _WITH_TORCH = {
        **dict.fromkeys(("AnyTier", "TierName"), "tier"),
        "Pin": "pin",
        **dict.fromkeys(("StoreStats", "TierStats"), "stats"),
        "Store": "store",
    }

    def __getattr__(name: str) -> Any:
        if name not in _WITH_TORCH:
            raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
        return getattr(import_module(f"{__name__}.{_WITH_TORCH[name]}"), name)


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
