"""Rows fetched into an engine's host memory, on a thread, so that its scheduler never waits."""

import asyncio
import threading
from collections.abc import AsyncIterator, Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from encoder_contract.errors import DeadlineError, InvalidImageError
from encoder_contract.geometry import Grid
from encoder_service.app import Server
from encoder_service.config import Config
from encoder_service.devices.model import load_model
from prefill_client import Description, EncoderClient, Submitted
from prefill_client.fleet.fetch_stream import FetchStream
from prefill_client.vllm import row_fetcher
from prefill_client.vllm.host_memory import HostMemory
from prefill_client.vllm.image_name import ImageName, RequestInfo
from prefill_client.vllm.row_fetcher import FetchQuery, Outcome, RowFetcher
from prefill_client.vllm.vllm_settings import VllmSettings
from testing.photos import photo
from testing.tcp_proxy import TcpProxy
from tests.calls import fetched
from tests.gate import Gate
from tests.servers import server_of
from tests.waiting import PATIENCE_S, soon, within_some_limit

UNKNOWN = ImageName(bytes(32), Grid(1, 4, 4), b"")


@pytest.fixture
def memory() -> HostMemory:
    return HostMemory(16 << 20)


@pytest.fixture
async def fetcher(server: Server, client: EncoderClient, memory: HostMemory) -> AsyncIterator[RowFetcher]:
    """A fetcher that waits for unknown images longer than a test takes."""
    settings = VllmSettings((server.endpoint,), grace_s=PATIENCE_S, timeout_s=2 * PATIENCE_S)
    described = client.description
    fetcher = await asyncio.to_thread(
        RowFetcher, settings, memory, width=described.width, dtype=described.dtype
    )
    yield fetcher
    await asyncio.to_thread(fetcher.close)


def port_of(server: Server) -> int:
    return int(server.endpoint.rpartition(":")[2])


async def outcome(fetcher: RowFetcher) -> Outcome:
    await asyncio.to_thread(fetcher.wait, PATIENCE_S)
    (ended,) = fetcher.outcomes()
    return ended


class Step:
    """Queries for images of one request, as a scheduler's step begins them, and their outcomes."""

    def __init__(self, fetcher: RowFetcher, memory: HostMemory, row_bytes: int) -> None:
        self.fetcher, self.memory, self.row_bytes = fetcher, memory, row_bytes
        self.ended: dict[FetchQuery, Outcome] = {}

    def query(self, image: Submitted, request_id: str = "a request") -> FetchQuery:
        assert image.grid is not None
        extents = self.memory.allocate(image.tokens * self.row_bytes)
        assert extents is not None
        name = ImageName(image.digest, image.grid, b"")
        return FetchQuery(name, image.tokens, RequestInfo(request_id), extents=extents)

    async def outcomes(self, number: int) -> dict[FetchQuery, Outcome]:
        """Wait for this many outcomes; return all that have arrived."""
        async with asyncio.timeout(PATIENCE_S):
            while len(self.ended) < number:
                await asyncio.to_thread(self.fetcher.wait, 1.0)
                self.ended |= {each.query: each for each in self.fetcher.outcomes()}
        return self.ended


async def test_a_cancelled_query_has_an_outcome(fetcher: RowFetcher) -> None:
    query = FetchQuery(UNKNOWN, 4, RequestInfo())
    fetcher.start([query])
    fetcher.cancel(query)
    assert (await outcome(fetcher)).state == "cancelled"


async def test_close_cancels_queries_and_ends_the_thread(fetcher: RowFetcher) -> None:
    def threads() -> list[Any]:
        return [each for each in threading.enumerate() if each.name == "encoder-rows"]

    assert len(threads()) == 1
    fetcher.start([FetchQuery(UNKNOWN, 4, RequestInfo())])
    await asyncio.to_thread(fetcher.close)
    assert threads() == []
    assert [ended.state for ended in fetcher.outcomes()] == ["cancelled"]


async def test_an_engine_with_its_own_tower_joins_no_service_of_another_model(
    config: Config,
    kept_checkpoint: Callable[..., Path],
    server: Server,
    client: EncoderClient,
    memory: HostMemory,
    caplog: pytest.LogCaptureFixture,
) -> None:
    """The fetcher starts without a service, logs the wrong one once, and joins the right one later."""
    right = client.description
    checks = 0

    def check(description: Description) -> None:
        nonlocal checks
        checks += 1
        if description.model_fingerprint != right.model_fingerprint:
            raise ValueError("another model")

    other_config = replace(config, model=kept_checkpoint(seed=7))
    other_model = load_model(other_config)
    proxy = await TcpProxy(0).start()
    proxy.cut()
    settings = VllmSettings((f"127.0.0.1:{proxy.port}",), without_service="own_tower")
    fetcher = await asyncio.to_thread(
        RowFetcher, settings, memory, width=right.width, dtype=right.dtype, check=check
    )
    try:
        assert fetcher.description is None
        async with server_of(other_config, other_model) as other:
            proxy.mend(to_port=port_of(other))
            await soon(lambda: checks >= 2)
            assert fetcher.description is None
            assert [each.getMessage() for each in caplog.records if each.levelname == "ERROR"] == [
                f"the encoder service at 127.0.0.1:{proxy.port} answers but cannot be used: another model"
            ]
            proxy.cut()
        proxy.mend(to_port=port_of(server))
        await soon(lambda: fetcher.description == right)
        (image,) = await client.submit([photo(64, 96, 2)])
        fetcher.start([Step(fetcher, memory, right.row_bytes).query(image)])
        assert (await outcome(fetcher)).error is None
    finally:
        await asyncio.to_thread(fetcher.close)
        await proxy.stop()
        other_model.decoder.close()


@pytest.fixture
def step(client: EncoderClient, fetcher: RowFetcher, memory: HostMemory) -> Step:
    return Step(fetcher, memory, client.description.row_bytes)


def calls_of(fetcher: RowFetcher, monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Return a list that gets the number of images of each Fetch."""
    calls: list[int] = []
    fetch = FetchStream.__init__

    def noted(stream: FetchStream, pool: Any, recent: Any, requests: Any, *rest: Any, **named: Any) -> None:
        calls.append(len(requests))
        fetch(stream, pool, recent, requests, *rest, **named)

    monkeypatch.setattr(FetchStream, "__init__", noted)
    return calls


async def test_the_images_of_a_step_come_in_one_call_for_each_request(
    client: EncoderClient, step: Step, monkeypatch: pytest.MonkeyPatch
) -> None:
    images = await client.submit([photo(64, 96, seed) for seed in range(9)])
    for image in images:
        await fetched(client, image.digest)  # all are stored
    monkeypatch.setattr(row_fetcher, "HOLD_S", PATIENCE_S)  # else a call that is copied slowly is renewed
    calls = calls_of(step.fetcher, monkeypatch)
    queries = [step.query(image, f"request {number // 6}") for number, image in enumerate(images)]
    step.fetcher.start(queries)
    ended = await step.outcomes(9)
    assert {each.state for each in ended.values()} == {"here"}
    assert list(step.fetcher.outcomes()) == [], "each outcome is returned once"
    assert sorted(calls) == [3, 6]
    for query, image in zip(queries, images, strict=True):
        right = (await fetched(client, image.digest)).array.tobytes()
        assert step.memory.read(query.extents).tobytes() == right


async def test_rows_are_released_while_others_of_the_call_are_waited_for(
    server: Server, client: EncoderClient, step: Step
) -> None:
    """A call that waits would else hold memory that the server may need for the images it waits for."""
    (image,) = await client.submit([photo(64, 96, 1)])
    stored = step.query(image)
    unknown = FetchQuery(UNKNOWN, 4, RequestInfo("a request"))
    step.fetcher.start([stored, unknown])
    assert (await step.outcomes(1))[stored].transport == "shm"
    await soon(lambda: server.budgets.pinned_bytes.held == 0)
    assert unknown not in await step.outcomes(1)
    step.fetcher.cancel(unknown)
    assert (await step.outcomes(2))[unknown].state == "cancelled"


async def test_cancelling_an_image_leaves_the_others_of_its_call(
    gate: Gate, client: EncoderClient, step: Step
) -> None:
    with gate.closed():
        images = await client.submit([photo(64, 96, seed) for seed in range(3)])
        queries = [step.query(image) for image in images]
        step.fetcher.start(queries)
        step.fetcher.cancel(queries[1])
        assert {query: each.state for query, each in (await step.outcomes(1)).items()} == {
            queries[1]: "cancelled"
        }
    ended = await step.outcomes(3)
    assert [ended[query].state for query in queries] == ["here", "cancelled", "here"]


async def test_a_damaged_image_fails_alone(client: EncoderClient, step: Step) -> None:
    whole = photo(300, 200, 5, "PNG")
    images = await client.submit([photo(64, 96, 1), whole[: len(whole) // 2], photo(64, 96, 2)])
    queries = [step.query(image) for image in images]
    step.fetcher.start(queries)
    ended = await step.outcomes(3)
    assert [ended[query].state for query in queries] == ["here", "failed", "here"]
    assert isinstance(ended[queries[1]].error, InvalidImageError)


async def test_rows_that_are_not_copied_in_time_fail(
    client: EncoderClient, step: Step, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The memory is not used any more when the outcome arrives."""
    (image,) = await client.submit([photo(64, 96, 1)])
    await fetched(client, image.digest)
    began, may_end, copied = threading.Event(), threading.Event(), threading.Event()
    write = step.memory.write

    def slow(*arguments: Any) -> None:
        began.set()
        may_end.wait(PATIENCE_S)
        write(*arguments)
        copied.set()

    monkeypatch.setattr(step.memory, "write", slow)
    fetcher = step.fetcher

    async def began_in_time(limit_s: float) -> bool:
        monkeypatch.setattr(fetcher, "_settings", replace(fetcher._settings, timeout_s=limit_s))
        query = step.query(image)
        fetcher.start([query])
        await soon(lambda: began.is_set() or fetcher.has_outcomes)
        if began.is_set():
            await asyncio.sleep(limit_s + 0.1)  # longer than the time limit: the copy must not be left behind
            assert list(fetcher.outcomes()) == []
            may_end.set()
        ended = await outcome(fetcher)
        assert ended.query is query
        assert isinstance(ended.error, DeadlineError)
        return copied.is_set()

    await within_some_limit(began_in_time)
