"""What image URLs were found to hold, in Redis, which counts all times to live."""

from typing import Any

from encoder_service.cluster.index.connection import Script
from encoder_service.cluster.index.schema import Keys
from encoder_service.cluster.index.session import RedisSession
from encoder_service.cluster.url_records import UrlAnswer

LOOK, RECORD, END = Script("url_look"), Script("url_record"), Script("url_end_claim")
MAX_RECORD_BYTES = 1024  # with its signature: what is longer is not ours


class RedisUrlRecords:
    """The `UrlRecords` of a namespace. While Redis is unavailable nothing is known and nothing is kept."""

    def __init__(self, session: RedisSession, keys: Keys) -> None:
        self._session = session
        self._keys = keys

    async def look(self, key: bytes, claim: bytes, claim_ms: int, *, insist: bool) -> UrlAnswer | None:
        """Return what is recorded, or give the claim; None while Redis is unavailable."""
        reply = await self._run("url_look", LOOK, key, claim, claim_ms, int(insist))
        if not isinstance(reply, list) or len(reply) != 3 or not isinstance(reply[0], bytes):
            return None
        record, is_fresh, is_claimed = reply
        if len(record) > MAX_RECORD_BYTES:
            record = b""
        return UrlAnswer(record, is_fresh == 1, is_claimed == 1)

    async def record(self, key: bytes, record: bytes, ttl_ms: int, fresh_ms: int) -> None:
        """Keep a record, or, while Redis is unavailable, do not."""
        await self._run("url_record", RECORD, key, record, ttl_ms, fresh_ms)

    async def end_claim(self, key: bytes, claim: bytes, after_ms: int = 0) -> None:
        """End a claim; while Redis is unavailable it ends by itself."""
        await self._run("url_end_claim", END, key, claim, after_ms)

    async def _run(self, name: str, script: Script, key: bytes, *arguments: bytes | int) -> Any:
        replies = await self._session.run(name, script, [self._keys.url(key)], *arguments)
        return replies[0] if replies else None
