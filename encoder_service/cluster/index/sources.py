"""Image files in Redis: whatever one replica shares, any other can read for a while."""

from collections.abc import Sequence

from encoder_service.cluster.index.connection import Connection, Script, batches
from encoder_service.cluster.index.membership import Membership
from encoder_service.cluster.index.schema import Keys
from encoder_service.cluster.index.session import RedisSession

EXIST = Script("exist")


class SharedSources:
    """Files by key, in calls that are bounded and raise nothing: while Redis is unavailable there are none."""

    def __init__(self, session: RedisSession, keys: Keys, *, ttl_s: int, max_bytes: int) -> None:
        self.max_bytes = max_bytes
        """The largest file that `put` takes."""
        self._session = session
        self._keys = keys
        self._ttl_ms = ttl_s * 1000

    async def put(self, key: bytes, image: bytes) -> bool:
        """Share the bytes of an image for a while; return False if they are too large or the call failed."""
        if len(image) > self.max_bytes:
            return False

        async def put(connection: Connection, _: Membership) -> bool:
            await connection.put(self._keys.source(key), image, self._ttl_ms)
            return True

        return await self._session.ask("put_source", put, self._session.puts) is not None

    async def existing(self, keys: Sequence[bytes]) -> frozenset[bytes]:
        """Return those of the keys under which bytes are shared."""
        found: set[bytes] = set()
        for batch in batches(keys):
            names = [(self._keys.source(key),) for key in batch]
            replies = await self._session.run("sources", EXIST, names)
            found.update(key for key, reply in zip(batch, replies or (), strict=False) if reply)
        return frozenset(found)

    async def get(self, key: bytes) -> bytes | None:
        """Return the bytes that a replica shared under `key`, or None."""

        async def get(connection: Connection, _: Membership) -> bytes | None:
            return await connection.read_one(self._keys.source(key), self.max_bytes)

        return await self._session.ask("get_source", get, self._session.gets)
