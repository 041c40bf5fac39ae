"""Rows that workers copy from the service's GPU; a memory file replaces the GPU's memory.

`tests/prefill_client/test_staging.py` has the tests that need no engine.
"""

import itertools
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from vllm.distributed.ec_transfer import get_ec_transfer

from encoder_contract.device_memory import DeviceMemory, DeviceMemoryError
from encoder_contract.v1 import encoder_pb2 as pb
from prefill_client import BlockingClient
from prefill_client.blocking import LoopThread
from prefill_client.transport import device, shared_memory
from prefill_client.vllm.row_fetcher import Outcome
from prefill_client.vllm.staging import StagingWorker
from testing.photos import photo
from testing.server_process import running
from testing.tcp_proxy import TcpProxy
from testing.vllm_engine import Answer, VllmEngine
from tests.engines.answers import TOLERANCE, prompt
from tests.vllm.restartable import Restartable
from tests.vllm.service import SERVICE, SETTINGS
from tests.vllm.test_step_count import encode

TIER_GIB = 0.01
IMAGES = 5


class Proxy(TcpProxy):
    """A proxy with a thread-safe `cut`."""

    def __init__(self, to_port: int) -> None:
        super().__init__(to_port)
        self.loop = LoopThread("proxy")
        self.loop.run(self.start())

    def cut(self) -> None:
        """Break all connections, and refuse new ones."""
        self.loop.call(super().cut)


@pytest.fixture(scope="module")
def server(checkpoint: Path) -> Iterator[Restartable]:
    """A server with a device tier."""
    server = Restartable(checkpoint, store_device_gib=TIER_GIB)
    server.start()
    yield server
    server.kill()


@pytest.fixture(scope="module")
def proxy(server: Restartable) -> Iterator[Proxy]:
    """A proxy between the engine and that server."""
    proxy = Proxy(int(server.endpoint.rpartition(":")[2]))
    yield proxy
    proxy.loop.stop(proxy.stop())


@pytest.fixture(scope="module")
def engine(checkpoint: Path, proxy: Proxy) -> Iterator[VllmEngine]:
    """An engine of that server."""
    engine = VllmEngine(checkpoint, f"127.0.0.1:{proxy.port}", extra={"timeout_s": 300.0, "grace_s": 1.0})
    yield engine
    engine.close()


@pytest.fixture
def stage(engine: VllmEngine) -> Iterator[StagingWorker]:
    """The worker's side, which has opened the memory."""
    engine.ask(["before the first step no worker knows where to connect"])
    get_ready(engine)
    stage: StagingWorker = get_ec_transfer()._loader._staging
    yield stage
    engine.assert_nothing_is_held()
    engine.forget()
    engine.run_until(lambda: not stage._rows)


def get_ready(engine: VllmEngine) -> None:
    """Ask until rows come from the device: workers connect first, then they open the probe."""
    for _ in range(200):
        with transports(engine) as came:
            engine.ask(["ready?", photo(40, 40, 9000, "PNG")])
        engine.forget()
        if came == ["device"]:
            return
    raise AssertionError("no rows come from the device")


@contextmanager
def transports(engine: VllmEngine) -> Iterator[list[str]]:
    """Yield a list that gets the transport of each image whose rows arrive in the block."""
    came: list[str] = []
    fetched = engine.side.counts.ended

    def noted(outcome: Outcome, size_bytes: int) -> None:
        came.append(outcome.transport)
        fetched(outcome, size_bytes)

    engine.side.counts.ended = noted
    yield came
    engine.side.counts.ended = fetched


def wait_until_it_serves(engine: VllmEngine, *, serves: bool = True) -> None:
    """Wait until the health check of the engine's client sees whether the server serves."""
    while engine.side._fetcher._client.any_serves != serves:
        time.sleep(0.02)


@pytest.mark.story("rows from GPU to GPU")
@pytest.mark.cuda
def test_device_rows_equal_host_rows(
    engine: VllmEngine, stage: StagingWorker, monkeypatch: pytest.MonkeyPatch
) -> None:
    loaded: list[torch.Tensor] = []
    rows_of = stage.rows

    def noted(number: int) -> torch.Tensor:
        loaded.append(rows_of(number))
        return loaded[-1]

    monkeypatch.setattr(stage, "rows", noted)
    for seed in range(4):
        parts = prompt(7000 + seed, IMAGES)
        files = [part for part in parts if isinstance(part, bytes)]
        right = engine.ask(parts, own=True)
        engine.forget()
        loaded.clear()
        with transports(engine) as came:
            assert engine.ask(parts).distance(right) <= TOLERANCE
        assert came == ["device"] * IMAGES
        by_host = [torch.from_numpy(rows) for rows in engine.rows(*files)]
        assert len(loaded) == IMAGES
        assert all(any(torch.equal(rows, each) for each in loaded) for rows in by_host)


@pytest.mark.parametrize("opened", [True, False])
@pytest.mark.cuda
def test_a_server_killed_between_handle_and_copy_costs_no_request(
    engine: VllmEngine,
    stage: StagingWorker,
    server: Restartable,
    proxy: Proxy,
    opened: bool,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The rows come from the restarted server, also if the memory was open: that of a dead server is unmapped."""
    file = photo(200, 150, 7100 + opened, "PNG")
    right = engine.ask(["x", file], own=True)
    engine.forget()
    copy, killed = stage._copy, []

    def late(number: int, handle: pb.Handle) -> str:
        if not killed:
            killed.append(handle)
            proxy.cut()
            server.kill()
            if not opened:
                shared_memory._segments.clear()
            server.start()
            with BlockingClient.connect(server.endpoint) as client:
                client.submit([file])
            proxy.mend()
            wait_until_it_serves(engine)
        return copy(number, handle)

    monkeypatch.setattr(stage, "_copy", late)
    with transports(engine) as came:
        assert engine.ask(["x", file]).distance(right) <= TOLERANCE
    assert killed[0].segment, "not the probe"
    assert came == ["shm"]


def test_overwritten_rows_are_fetched_through_the_host(
    engine: VllmEngine,
    stage: StagingWorker,
    server: Restartable,
    proxy: Proxy,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The call that holds the rows ends unnoticed, and the server overwrites them."""
    file = photo(200, 150, 7200, "PNG")
    right = engine.ask(["x", file], own=True)
    engine.forget()
    copy, copied = device.device_copy, []

    def late(*arguments: Any) -> torch.Tensor:
        rows = copy(*arguments)
        if not copied:
            proxy.cut()
            wait_until_it_serves(engine, serves=False)
            others = (photo(256, 256, seed, "PNG") for seed in itertools.count(7300))
            with BlockingClient.connect(server.endpoint) as client:
                while torch.equal(overwritten := copy(*arguments), rows):
                    client.submit([next(others) for _ in range(16)])
            copied.append(rows := overwritten)
            proxy.mend()
            wait_until_it_serves(engine)
        return rows

    monkeypatch.setattr(device, "device_copy", late)
    with transports(engine) as came:
        assert engine.ask(["x", file]).distance(right) <= TOLERANCE
    assert copied
    assert came == ["shm"]


def test_rows_in_memory_that_the_worker_cannot_open_come_through_the_host(
    engine: VllmEngine, stage: StagingWorker, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = photo(200, 150, 7400, "PNG")
    right = engine.ask(["x", file], own=True)
    engine.forget()
    refused: list[bytes] = []

    def refuse(name: bytes, *_: object) -> DeviceMemory:
        refused.append(name)
        raise DeviceMemoryError("CUDA: cudaErrorMapBufferObjectFailed")

    shared_memory._segments.clear()
    monkeypatch.setattr(shared_memory, "open_memory", refuse)
    with transports(engine) as came:
        assert engine.ask(["x", file]).distance(right) <= TOLERANCE
    assert refused
    assert came == ["shm"]


def test_the_workers_copies_are_bounded(
    engine: VllmEngine, stage: StagingWorker, monkeypatch: pytest.MonkeyPatch
) -> None:
    prompts = [prompt(7500 + seed, IMAGES) for seed in range(6)]
    right = [engine.ask(parts, own=True) for parts in prompts]
    engine.forget()
    limit = 3 * 64 * engine.client.description.row_bytes  # of an image with the most rows
    monkeypatch.setattr(engine.side._staging, "_limit_bytes", limit)
    encode(engine, [part for parts in prompts for part in parts if isinstance(part, bytes)])
    ended: dict[str, Answer] = {}
    with transports(engine) as came:
        started = [engine.start(parts) for parts in prompts]
        while len(ended) < len(prompts):
            ended |= engine.step()
            assert sum(rows.nbytes for rows in list(stage._rows.values())) <= limit
    assert {"device", "shm"} == {*came}
    assert all(ended[each].distance(answer) <= TOLERANCE for each, answer in zip(started, right, strict=True))


@pytest.mark.story("rows from GPU to GPU")
def test_two_ranks_copy_rows_from_the_device(checkpoint: Path) -> None:
    """Each rank is a process; no step reads an image that one of them has not copied."""
    with running(checkpoint, executable=SERVICE, **SETTINGS, store_device_gib=TIER_GIB) as server:
        engine = VllmEngine(checkpoint, server.endpoint, tensor_parallel_size=2)
        try:
            engine.ask(["before the first step no worker knows where to connect"])
            get_ready(engine)
            parts = prompt(7600, IMAGES)
            right = engine.ask(parts, own=True)
            engine.forget()
            with transports(engine) as came:
                assert engine.ask(parts).distance(right) <= TOLERANCE
            assert came == ["device"] * IMAGES
            engine.assert_nothing_is_held()
        finally:
            engine.close()
