"""Fixtures: a seeded checkpoint, a real server on free ports, replicas with an index in Redis or a Redis Cluster.

Every run of pytest imports this file, so fixtures import what takes long to import (torch alone takes three seconds).
"""

from __future__ import annotations

import gc
import sys
import threading
from dataclasses import replace
from functools import cache, partial
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any

import pytest

from tests import checkpoint_cache
from tests.reports import pytest_runtest_makereport
from tests.waiting import PATIENCE_S

__all__ = ["pytest_runtest_makereport"]

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Callable, Iterator
    from pathlib import Path

    from encoder_service.app import Server
    from encoder_service.cluster.redis_cluster import RedisCluster
    from encoder_service.config import Config
    from encoder_service.devices.model import Model
    from prefill_client import EncoderClient
    from testing.server_process import ServerProcess
    from tests.gate import Gate
    from tests.index_replicas import Join

TORCH_THREADS = 2

# A test starts a server or a process if its file imports one of these modules, or if it uses one of these fixtures.
STARTING_MODULES = {
    "subprocess",
    "testing.redis_servers",
    "testing.replicas",
    "testing.server_process",
    "tests.cluster_replica",
    "tests.language_servers",
    "tests.lost_device",
    "tests.processes",
    "tests.servers",
    "tests.ulysses_processes",
}
gc.disable()  # until `pytest_collection_finish`

NO_DALI = "DALI is not installed here: `make test-dali` installs it and runs this test"
STARTING_FIXTURES = {
    "server",
    "process",
    "start",
    "guard",
    "redis",
    "redis_url",
    "cluster_url",
    "join",
    "join_watched",
}


@pytest.hookimpl(tryfirst=True)  # before -m selects tests
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Mark tests that start a server or a process, and skip DALI's where it is not installed.

    Files with such tests and with slow ones come first, since they take longest: the quick files then keep all workers
    busy to the end.
    """
    long = set()
    for item in items:
        if isinstance(item, pytest.Function) and starts_processes(item):
            item.add_marker("process")  # `make test-quick` skips it
            long.add(item.path)
        if item.get_closest_marker("slow"):
            long.add(item.path)
        if item.get_closest_marker("dali") and not has_dali():
            item.add_marker(pytest.mark.skip(NO_DALI))
    items.sort(key=lambda item: item.path not in long)


@pytest.hookimpl(trylast=True)  # after pytest has set its hook
def pytest_configure() -> None:
    """Let a thread end by `SystemExit`, as Python does, without a warning: a device on a thread ends so."""
    report = threading.excepthook

    def report_errors(args: threading.ExceptHookArgs) -> None:
        if args.exc_type is not SystemExit:
            report(args)

    threading.excepthook = report_errors


@cache
def has_dali() -> bool:
    """Whether DALI is installed."""
    return find_spec("nvidia") is not None and find_spec("nvidia.dali") is not None


def starts_processes(test: pytest.Function) -> bool:
    """Return whether a test, or another one in its file, starts a server or a process."""
    imported = vars(test.module).values()
    modules = {getattr(value, "__module__", None) or getattr(value, "__name__", "") for value in imported}
    return bool(modules & STARTING_MODULES) or bool(STARTING_FIXTURES & {*test.fixturenames})


def pytest_pycollect_makemodule(module_path: Path) -> None:
    """Load our hypothesis profile before a test file with examples is imported: its decorators read the settings."""
    if b"hypothesis" in module_path.read_bytes():
        limit_no_example()


@cache
def limit_no_example() -> None:
    """Give examples no time limit: a busy machine may stall for a quarter of a second."""
    from hypothesis import HealthCheck, settings

    settings.register_profile("any machine", deadline=None, suppress_health_check=[HealthCheck.too_slow])
    settings.load_profile("any machine")


def pytest_collection_finish() -> None:
    """Limit the threads of torch, because the towers are small, and let clients wait for servers of a busy machine.

    Neither is imported here, if no test file has imported it. Modules are never garbage: no collection looks for any
    while test files are imported, nor at them afterwards.
    """
    gc.freeze()
    gc.enable()
    if torch := sys.modules.get("torch"):
        torch.set_num_threads(TORCH_THREADS)
    if client := sys.modules.get("prefill_client.client"):
        client.EncoderClient.connect.__func__.__kwdefaults__["timeout_s"] = PATIENCE_S


def pytest_unconfigure() -> None:
    """Let modules be freed: Triton would report its objects as leaked."""
    gc.unfreeze()


def pytest_sessionfinish(session: pytest.Session) -> None:
    """Skip the hypothesis plugin's report in runs without examples: it would import hypothesis (a second)."""
    if "hypothesis" not in sys.modules:
        session.config.pluginmanager.unregister(name="hypothesispytest")


@pytest.fixture(scope="session")
def kept_checkpoint(pytestconfig: pytest.Config) -> Callable[..., Path]:
    """Return a function that returns a folder written by `write_checkpoint`, perhaps in an earlier run.

    Its arguments are those of `write_checkpoint` without the folder. A test must not change the folder.
    """
    return partial(checkpoint_cache.kept_checkpoint, pytestconfig.cache.mkdir("checkpoints"))


@pytest.fixture(scope="session")
def kept_family(pytestconfig: pytest.Config) -> Callable[..., Path]:
    """Return the same function for `write_family_checkpoint`."""
    return partial(checkpoint_cache.kept_family, pytestconfig.cache.mkdir("checkpoints"))


@pytest.fixture(scope="session")
def checkpoint(kept_checkpoint: Callable[..., Path]) -> Path:
    """A small Qwen3-VL checkpoint with seeded weights. A test must not change it."""
    return kept_checkpoint()


@pytest.fixture(scope="session")
def config(checkpoint: Path) -> Config:
    """A configuration with small bounds."""
    from encoder_service.config import Config
    from tests.small_store import STORE_GIB

    return Config(
        model=checkpoint,
        listen="127.0.0.1:0",
        metrics_listen="127.0.0.1:0",
        devices="cpu",
        store_host_gib=STORE_GIB,
        device_peak_tflops=1.5,
        drain_s=5,
    )


@pytest.fixture(scope="session")
def model(config: Config) -> Iterator[Model]:
    """The loaded checkpoint."""
    from encoder_service.devices.model import load_model

    model = load_model(config)
    yield model
    model.decoder.close()


@pytest.fixture(scope="module")
def generic(config: Config, kept_family: Callable[..., Path]) -> Iterator[Model]:
    """Qwen2-VL, for which the server has no tower of its own. Its processor refuses strips."""
    from encoder_service.devices.model import load_model

    model = load_model(replace(config, model=kept_family("qwen2_vl"), dtype="float32"))
    yield model
    model.decoder.close()


@pytest.fixture
def gate(model: Model) -> Gate:
    """The gate in front of the decoder of this test's server."""
    from tests.gate import Gate

    return Gate(model.decoder)


@pytest.fixture
async def server(config: Config, model: Model, gate: Gate) -> AsyncIterator[Server]:
    """A serving server."""
    from tests.servers import server_of

    async with server_of(config, gate.before(model)) as server:
        yield server


@pytest.fixture(scope="module")
def process(checkpoint: Path) -> Iterator[ServerProcess]:
    """A server process, for the tests of one file."""
    from tests.processes import running

    with running(checkpoint) as server:
        yield server


@pytest.fixture
async def client(server: Server) -> AsyncIterator[EncoderClient]:
    """A client of that server."""
    from prefill_client import EncoderClient

    async with await EncoderClient.connect(server.endpoint, timeout_s=PATIENCE_S) as client:
        yield client


@pytest.fixture(scope="session")
def redis_url() -> Iterator[str]:
    """A Redis of the project's packages."""
    from testing.redis_servers import redis_server

    with redis_server() as server:
        yield server.url


@pytest.fixture(scope="session")
def cluster_url() -> Iterator[str]:
    """A Redis Cluster."""
    from testing.redis_servers import redis_cluster

    with redis_cluster() as cluster:
        yield cluster.url


@pytest.fixture(params=["redis", "cluster"])
def kind(request: pytest.FixtureRequest) -> str:
    """Where the index is kept."""
    return request.param


@pytest.fixture
async def join(kind: str, request: pytest.FixtureRequest) -> AsyncIterator[Join]:
    """Return a function that lets a replica join the fleet of this test."""
    from encoder_service.cluster.redis import namespace
    from testing.holding import cluster_of
    from tests.index_replicas import MODEL, TTL_MS, as_replica, numbers, redis_settings

    url, space = request.getfixturevalue(f"{kind}_url"), namespace(f"test{next(numbers)}", MODEL)
    joined: list[RedisCluster] = []

    async def join(
        name: str, lease_ttl_ms: int = TTL_MS, replica_ttl_ms: int = TTL_MS, **identity: Any
    ) -> RedisCluster:
        settings = replace(
            redis_settings(url, space), lease_ttl_ms=lease_ttl_ms, replica_ttl_ms=replica_ttl_ms
        )
        cluster = cluster_of(settings)
        joined.append(cluster)
        await cluster.join(as_replica(name, **identity))  # type: ignore[arg-type]
        return cluster

    yield join
    for cluster in joined:
        await cluster.close()
