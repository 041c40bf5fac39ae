"""Fixtures of the cluster tests: a separate Redis, and watched replicas."""

from collections.abc import AsyncIterator, Iterator

import pytest

from testing.redis_servers import RedisServer, redis_server
from tests.index_replicas import JoinWatched, watched_replicas


@pytest.fixture
def redis() -> Iterator[RedisServer]:
    """A Redis of the test's own, which it may kill."""
    with redis_server() as server:
        yield server


@pytest.fixture
async def join_watched() -> AsyncIterator[JoinWatched]:
    """A function that makes a watched replica join, by any URL."""
    async with watched_replicas() as join:
        yield join
