"""Fixtures: a seeded checkpoint folder, a real server on free ports, replicas that meet in Redis or a Redis Cluster."""

import threading
from collections.abc import AsyncIterator, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any, cast

import hypothesis
import pytest
import torch
from torch import Tensor

from encoder_contract.errors import EncoderError
from encoder_service.app import Server
from encoder_service.cluster.index import RedisIndex, namespace
from encoder_service.config import Config
from encoder_service.engine.model import Model, load_model
from encoder_service.image.decode import Decoder
from encoder_service.image.source import Source
from prefill_client import EncoderClient
from testing.checkpoints import write_checkpoint
from testing.holding import Holding
from testing.redis_servers import redis_cluster, redis_server
from tests.index_replicas import (
    MODEL,
    TTL_MS,
    Join,
    as_replica,
    numbers,
    redis_settings,
)
from tests.servers import server_of
from tests.small_store import STORE_GIB
from tests.waiting import START_S

torch.set_num_threads(2)
# No example has a time limit: a machine that does something else for a quarter of a second breaks no promise of ours.
hypothesis.settings.register_profile(
    "any machine", deadline=None, suppress_health_check=[hypothesis.HealthCheck.too_slow]
)
hypothesis.settings.load_profile("any machine")


@pytest.fixture(scope="session")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A small Qwen3-VL checkpoint folder with seeded weights."""
    return write_checkpoint(tmp_path_factory.mktemp("checkpoint"))


@pytest.fixture(scope="session")
def config(checkpoint: Path) -> Config:
    """A configuration whose every bound fits a test."""
    return Config(
        model=checkpoint,
        listen="127.0.0.1:0",
        metrics_listen="127.0.0.1:0",
        device="cpu",
        store_host_gib=STORE_GIB,
        store_prefault="no",
        device_peak_tflops=1.5,
        drain_s=5,
    )


@pytest.fixture(scope="session")
def model(config: Config) -> Iterator[Model]:
    """The loaded checkpoint."""
    model = load_model(config)
    yield model
    model.decoder.close()


class Gate:
    """A real decoder behind a gate: while the gate is closed, decoding waits, as it would behind a busy machine."""

    def __init__(self, decoder: Decoder) -> None:
        self._decoder = decoder
        self._open = threading.Event()
        self._open.set()
        self.name, self.deaths = decoder.name, decoder.deaths

    def batches(self, source: Source) -> bool:
        """Say what the decoder says."""
        return self._decoder.batches(source)

    def decode_batch(self, sources: Sequence[Source]) -> list[Tensor | None]:
        """Wait for the gate, then decode."""
        assert self._open.wait(START_S), "nobody opened the gate"
        return self._decoder.decode_batch(sources)

    def decode_one(self, source: Source) -> Tensor | EncoderError:
        """Wait for the gate, then decode."""
        assert self._open.wait(START_S), "nobody opened the gate"
        return self._decoder.decode_one(source)

    @contextmanager
    def closed(self) -> Iterator[None]:
        """Keep the gate closed."""
        self._open.clear()
        try:
            yield
        finally:
            self._open.set()


@pytest.fixture
def gate(model: Model) -> Gate:
    """The gate of this test's server."""
    return Gate(model.decoder)


@pytest.fixture
async def server(config: Config, model: Model, gate: Gate) -> AsyncIterator[Server]:
    """A serving server."""
    async with server_of(config, replace(model, decoder=cast(Decoder, gate))) as server:
        yield server


@pytest.fixture
async def client(server: Server) -> AsyncIterator[EncoderClient]:
    """A client of that server."""
    async with await EncoderClient.connect(server.endpoint) as client:
        yield client


@pytest.fixture(scope="session")
def redis_url() -> Iterator[str]:
    """A Redis: the one that the project brings, whatever this machine has."""
    with redis_server() as server:
        yield server.url


@pytest.fixture(scope="session")
def cluster_url() -> Iterator[str]:
    """A Redis Cluster."""
    with redis_cluster() as cluster:
        yield cluster.url


@pytest.fixture(params=["redis", "cluster"])
def kind(request: pytest.FixtureRequest) -> str:
    """What keeps the index."""
    return request.param


@pytest.fixture
async def join(kind: str, request: pytest.FixtureRequest) -> AsyncIterator[Join]:
    """Return a function that makes a replica join the fleet of this test."""
    url, space = request.getfixturevalue(f"{kind}_url"), namespace(f"test{next(numbers)}", MODEL)
    joined: list[RedisIndex] = []

    async def join(
        name: str, lease_ttl_ms: int = TTL_MS, replica_ttl_ms: int = TTL_MS, **identity: Any
    ) -> RedisIndex:
        settings = replace(
            redis_settings(url, space), lease_ttl_ms=lease_ttl_ms, replica_ttl_ms=replica_ttl_ms
        )
        index = RedisIndex(settings, Holding(), ())
        joined.append(index)
        await index.register(as_replica(name, **identity))  # type: ignore[arg-type]
        return index

    yield join
    for index in joined:
        await index.close()
