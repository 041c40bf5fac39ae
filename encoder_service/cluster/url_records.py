"""What image URLs were found to hold, and who is finding out: shared by the callers of a node, or of all replicas."""

import logging
from collections.abc import Callable
from dataclasses import dataclass
from time import monotonic
from typing import Protocol

from cachetools import TLRUCache

from encoder_contract.fleet_key import FleetKey

log = logging.getLogger(__name__)

MAX_RECORDS = 16384  # of a single node: some 500 bytes each, 8 MB


@dataclass(frozen=True, slots=True)
class UrlAnswer:
    """What is recorded, empty without a record; whether it is fresh; whether the asker has the claim now."""

    record: bytes = b""
    is_fresh: bool = False
    is_claimed: bool = False


class UrlRecords(Protocol):
    """Records by key (32 bytes), and one claim for each key. The keys of tenants differ; a record is opaque bytes.

    What is always safe: to forget a record or a claim. Then a URL is downloaded once more.
    """

    async def look(self, key: bytes, claim: bytes, claim_ms: int, *, insist: bool) -> UrlAnswer | None:
        """Return what is recorded; None while that cannot be said.

        Without a fresh record, or if the asker does `insist`, the claim goes to the asker unless another has it: for
        `claim_ms` milliseconds, under the name `claim`.
        """

    async def record(self, key: bytes, record: bytes, ttl_ms: int, fresh_ms: int) -> None:
        """Keep a record for `ttl_ms` milliseconds, for `fresh_ms` of which it is fresh."""

    async def end_claim(self, key: bytes, claim: bytes, after_ms: int = 0) -> None:
        """End the claim of that name, now or in so many milliseconds. Claims of others are not touched."""


@dataclass(frozen=True, slots=True)
class _Entry:
    content: bytes
    fresh_until: float
    ends_at: float


class MemoryUrlRecords:
    """Those of a single node; the least recently used go first."""

    def __init__(self, clock: Callable[[], float] = monotonic) -> None:
        self._clock = clock
        self._records = _until_they_end(clock)
        self._claims = _until_they_end(clock)

    async def look(self, key: bytes, claim: bytes, claim_ms: int, *, insist: bool) -> UrlAnswer | None:
        """Return what is recorded, or give the claim."""
        now, entry = self._clock(), self._records.get(key)
        content = entry.content if entry else b""
        is_fresh = entry is not None and now < entry.fresh_until
        if (is_fresh and not insist) or key in self._claims:
            return UrlAnswer(content, is_fresh)
        self._claims[key] = _Entry(claim, now, now + claim_ms / 1000)
        return UrlAnswer(content, is_fresh, is_claimed=True)

    async def record(self, key: bytes, record: bytes, ttl_ms: int, fresh_ms: int) -> None:
        """Keep a record."""
        now = self._clock()
        self._records[key] = _Entry(record, now + fresh_ms / 1000, now + ttl_ms / 1000)

    async def end_claim(self, key: bytes, claim: bytes, after_ms: int = 0) -> None:
        """End a claim."""
        entry = self._claims.get(key)
        if entry is not None and entry.content == claim:
            del self._claims[key]
            if after_ms:
                now = self._clock()
                self._claims[key] = _Entry(claim, now, now + after_ms / 1000)


class SealedUrlRecords:
    """Records of the fleet: under its key's signature if it has one, and then no others."""

    def __init__(self, records: UrlRecords, fleet_key: FleetKey | None) -> None:
        self._records = records
        self._fleet_key = fleet_key
        self.foreign = 0
        self.end_claim = records.end_claim

    async def look(self, key: bytes, claim: bytes, claim_ms: int, *, insist: bool) -> UrlAnswer | None:
        """Return what is recorded, or give the claim; what the fleet did not sign is no record."""
        answer = await self._records.look(key, claim, claim_ms, insist=insist)
        if answer is None or not answer.record or self._fleet_key is None:
            return answer
        record = self._fleet_key.open_url(key, answer.record)
        if record is None:
            self.foreign += 1
            log.warning("a URL's record in the index is not signed with the fleet's key: it is not used")
            return UrlAnswer(b"", answer.is_fresh, answer.is_claimed)
        return UrlAnswer(record, answer.is_fresh, answer.is_claimed)

    async def record(self, key: bytes, record: bytes, ttl_ms: int, fresh_ms: int) -> None:
        """Keep a record, signed."""
        sealed = self._fleet_key.seal_url(key, record) if self._fleet_key else record
        await self._records.record(key, sealed, ttl_ms, fresh_ms)


def _until_they_end(clock: Callable[[], float]) -> TLRUCache[bytes, _Entry]:
    return TLRUCache(MAX_RECORDS, ttu=lambda _key, entry, _now: entry.ends_at, timer=clock)
