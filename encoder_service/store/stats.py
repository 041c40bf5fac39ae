"""Statistics of a store at one moment."""

from dataclasses import dataclass

from encoder_service.store.tiers import TierName


@dataclass(frozen=True, slots=True)
class TierStats:
    """Statistics of one tier. Bytes count whole pages; counters only grow."""

    name: TierName
    size_bytes: int
    used_bytes: int
    pinned_bytes: int
    entries: int
    pinned_entries: int
    hits: int
    evictions: int
    writes: int
    free_runs: int
    largest_free_bytes: int


@dataclass(frozen=True, slots=True)
class EntryStats:
    """One embedding in one tier."""

    address: bytes
    tier: TierName
    row_bytes: int
    tokens: int
    pins: int
    hits: int


@dataclass(frozen=True, slots=True)
class StoreStats:
    """The whole store; `tiers` fastest first, `largest` by bytes."""

    tiers: tuple[TierStats, ...]
    misses: int
    pins: int
    demotions: int
    promotions: int
    waits: int
    refusals: int
    largest: tuple[EntryStats, ...]
