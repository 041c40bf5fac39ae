"""What an image URL holds, for callers who would download it: one of them does, the others get what it found."""

import asyncio
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from secrets import token_bytes

from google.protobuf.message import DecodeError

from encoder_contract.digest import DIGEST_BYTES
from encoder_contract.errors import OverloadedError
from encoder_contract.v1 import encoder_pb2 as pb
from encoder_service.address import Recipe, url_key
from encoder_service.cluster.contract import Cluster
from encoder_service.engine.job_queue import JobQueue
from encoder_service.image.source_cache import SourceCache
from encoder_service.scheduler.shares import Shares

CLAIM_BYTES = 16
# The downloader submits next: until its bytes are here, others wait rather than download what is about to come.
UPLOAD_MS = 3000
# A host may allow longer; nobody can check what a caller says, so it holds no longer than this.
MAX_FRESH_S = 3600.0
# Beyond freshness, for as long as the server is likely to have the image: its host is asked whether it has changed.
KEEP_S = 600.0
MAX_UNSHARED_S = 60.0
# In the place of a record: no message, which would be empty and so none.
UNSHARED = b"unshared"
# Each looks about three times a second.
MAX_WAITING = 512
FIRST_PAUSE_S, LAST_PAUSE_S = 0.02, 0.4


@dataclass(frozen=True, slots=True)
class Resolved:
    """What to tell a caller: a record and whether it is fresh; the claim to find out; or, with neither, to download."""

    record: pb.UrlRecord | None = None
    is_fresh: bool = False
    claim: bytes = b""


class UrlResolver:
    """Answers what URLs hold by what callers of the same tenant recorded. One event loop's; loads nothing itself."""

    def __init__(self, recipe: Recipe, sources: SourceCache, jobs: JobQueue, cluster: Cluster) -> None:
        self._recipe = recipe
        self._sources = sources
        self._jobs = jobs
        self._cluster = cluster
        self._waiting = Shares(MAX_WAITING, "callers that wait for a URL")

    async def resolve(
        self,
        url_digest: bytes,
        salt: bytes,
        holders: Sequence[str],
        *,
        wait_s: float,
        claim_s: float,
        is_over: Callable[[], bool],
    ) -> Resolved:
        """Return what a URL holds; waits at most `wait_s` for the caller who finds out, who has `claim_s` for it.

        Waiting ends when it `is_over`.
        """
        try:
            self._waiting.take(holders)
        except OverloadedError:
            return Resolved()
        try:
            return await self._resolve(url_digest, salt, wait_s, claim_s, is_over)
        finally:
            self._waiting.give_back(holders)

    async def record(
        self, url_digest: bytes, salt: bytes, record: pb.UrlRecord | None, *, fresh_s: float, claim: bytes
    ) -> None:
        """Keep what a caller found a URL to hold, None for nothing, an empty record for what each has to download.

        Ends the claim: for what is to be shared, once the image had time to come.
        """
        records, key, after_ms = self._cluster.url_records, url_key(url_digest, salt), 0
        if record is not None:
            fresh_ms, ttl_ms = _lives_ms(record, fresh_s)
            if ttl_ms:
                content = record.SerializeToString() if record.digest else UNSHARED
                await records.record(key, content, ttl_ms, fresh_ms)
            after_ms = UPLOAD_MS if ttl_ms and record.digest else 0
        if claim:
            await records.end_claim(key, claim, after_ms)

    async def _resolve(
        self, url_digest: bytes, salt: bytes, wait_s: float, claim_s: float, is_over: Callable[[], bool]
    ) -> Resolved:
        records, key, claim = self._cluster.url_records, url_key(url_digest, salt), token_bytes(CLAIM_BYTES)
        loop = asyncio.get_running_loop()
        until, pause_s, insist = loop.time() + wait_s, FIRST_PAUSE_S, False
        while True:
            answer = await records.look(key, claim, round(claim_s * 1000), insist=insist)
            if answer is None:
                return Resolved()
            record = _parsed(answer.record)
            is_unshared = record is not None and not record.digest
            if answer.is_fresh and (is_unshared or (record is not None and await self._has(record, salt))):
                if answer.is_claimed:
                    await records.end_claim(key, claim)
                return Resolved(None if is_unshared else record, is_fresh=not is_unshared)
            if answer.is_claimed:
                can_ask = record is not None and not is_unshared and await self._has(record, salt)
                return Resolved(record if can_ask else None, claim=claim)
            if answer.is_fresh and not insist:
                insist = True  # the record is of no use: what it names is not here
                continue
            if is_over() or loop.time() + pause_s > until:
                return Resolved()
            await asyncio.sleep(pause_s)
            pause_s = min(2 * pause_s, LAST_PAUSE_S)

    async def _has(self, record: pb.UrlRecord, salt: bytes) -> bool:
        """Whether the image is here or at another replica, so that its digest is enough to submit it."""
        key = self._recipe.key(record.digest, salt=salt)
        if self._jobs.knows(key) or self._sources.get(key.source_key) is not None:
            return True
        return key.address in await self._cluster.find([key])


def _lives_ms(record: pb.UrlRecord, fresh_s: float) -> tuple[int, int]:
    """Return for how long a record is fresh, and is kept."""
    if not record.digest:
        fresh_ms = round(min(fresh_s, MAX_UNSHARED_S) * 1000)
        return fresh_ms, fresh_ms
    fresh_ms = round(min(fresh_s, MAX_FRESH_S) * 1000)
    can_ask = bool(record.etag or record.last_modified)
    return fresh_ms, fresh_ms + (round(KEEP_S * 1000) if can_ask else 0)


def _parsed(record: bytes) -> pb.UrlRecord | None:
    """Return a record as it was kept, an empty one for what is not shared; None for what is none.

    Anyone may have written it, where the fleet has no key.
    """
    if record == UNSHARED:
        return pb.UrlRecord()
    try:
        parsed = pb.UrlRecord.FromString(record) if record else None
    except DecodeError:
        return None
    return parsed if parsed is not None and len(parsed.digest) == DIGEST_BYTES else None
