"""Fixtures of the cluster tests: replicas, watched replicas, and a separate Redis."""

from collections.abc import AsyncIterator, Iterator

import pytest

from encoder_service.config import Config
from encoder_service.devices.model import Model
from testing.redis_servers import RedisServer, redis_server
from tests.cluster_replica import Start, starting
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


@pytest.fixture
async def start(config: Config, model: Model, redis_url: str) -> AsyncIterator[Start]:
    """Return a function that starts a replica on a separate address; all are drained after the test."""
    async with starting(config, model, redis_url) as start:
        yield start
