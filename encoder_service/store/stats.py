"""Statistics of the store and of its tiers."""

from dataclasses import dataclass

from encoder_service.store.disk import Disk
from encoder_service.store.tier import AnyTier, Tier


@dataclass(frozen=True, slots=True)
class TierStats:
    """Statistics of one tier. Bytes are counted in whole pages. Counters only grow."""

    name: AnyTier
    size_bytes: int
    used_bytes: int
    pinned_bytes: int
    entries: int
    hits: int
    evictions: int
    writes: int
    largest_free_bytes: int


@dataclass(frozen=True, slots=True)
class StoreStats:
    """Statistics of the whole store. `tiers` lists the fastest first."""

    tiers: tuple[TierStats, ...]
    damaged_files: int
    is_disk_off: bool
    misses: int
    pins: int
    demotions: int
    promotions: int
    waits: int
    refusals: int


def tier_stats(tier: Tier) -> TierStats:
    """Return the statistics of a tier in memory. Call it with the store's lock held."""
    page_bytes, arena = tier.layout.page_bytes, tier.arena
    return TierStats(
        name=tier.name,
        size_bytes=arena.pages * page_bytes,
        used_bytes=(arena.pages - arena.free_pages) * page_bytes,
        pinned_bytes=tier.pinned_pages * page_bytes,
        entries=len(tier.entries),
        hits=tier.hits,
        evictions=tier.evictions,
        writes=tier.writes,
        largest_free_bytes=arena.largest_free_run * page_bytes,
    )


def disk_stats(disk: Disk) -> TierStats:
    """Return the statistics of the disk tier."""
    return TierStats(
        name="disk",
        size_bytes=0 if disk.is_off else disk.max_bytes,
        used_bytes=disk.used_bytes,
        pinned_bytes=0,
        entries=len(disk),
        hits=disk.hits,
        evictions=disk.evictions,
        writes=disk.writes,
        largest_free_bytes=max(0, disk.max_bytes - disk.used_bytes),
    )
