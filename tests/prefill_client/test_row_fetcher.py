"""Rows fetched into an engine's host memory, on a thread, so that its scheduler never waits."""

import asyncio
import threading
from collections.abc import AsyncIterator, Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from encoder_contract.geometry import Grid
from encoder_service.app import Server
from encoder_service.config import Config
from encoder_service.engine.model import load_model
from prefill_client import Description, EncoderClient
from prefill_client.transport.rows import element_type
from prefill_client.vllm.host_memory import HostMemory
from prefill_client.vllm.image_name import ImageName, RequestInfo
from prefill_client.vllm.row_fetcher import FetchQuery, Outcome, RowFetcher
from prefill_client.vllm.settings import Settings
from testing.photos import photo
from tests.calls import fetched
from tests.servers import server_of
from tests.tcp_proxy import TcpProxy
from tests.waiting import PATIENCE_S, soon

UNKNOWN = ImageName(bytes(32), Grid(1, 4, 4), b"")


@pytest.fixture
def memory() -> HostMemory:
    return HostMemory(1 << 20)


@pytest.fixture
async def fetcher(server: Server, client: EncoderClient, memory: HostMemory) -> AsyncIterator[RowFetcher]:
    """A fetcher that waits for unknown images longer than a test takes."""
    settings, described = Settings((server.endpoint,), grace_s=20.0), client.description
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


async def test_rows_are_in_their_extents_when_the_outcome_arrives(
    client: EncoderClient, fetcher: RowFetcher, memory: HostMemory
) -> None:
    (image,) = await client.submit([photo(64, 96, 1)])
    row_bytes = client.description.width * element_type(client.description.dtype).itemsize
    name = ImageName(image.digest, image.grid, b"")
    query = FetchQuery(
        name, image.tokens, RequestInfo("a request"), extents=memory.allocate(image.tokens * row_bytes)
    )
    fetcher.start(query)
    ended = await outcome(fetcher)
    assert (ended.query, ended.state) == (query, "here")
    assert memory.read(query.extents).tobytes() == (await fetched(client, image.digest)).array.tobytes()
    assert list(fetcher.outcomes()) == [], "each outcome is returned once"


async def test_a_cancelled_query_has_an_outcome(fetcher: RowFetcher) -> None:
    query = FetchQuery(UNKNOWN, 4, RequestInfo())
    fetcher.start(query)
    fetcher.cancel(query)
    assert (await outcome(fetcher)).state == "cancelled"


async def test_close_cancels_queries_and_ends_the_thread(fetcher: RowFetcher) -> None:
    def threads() -> list[Any]:
        return [each for each in threading.enumerate() if each.name == "encoder-rows"]

    assert len(threads()) == 1
    fetcher.start(FetchQuery(UNKNOWN, 4, RequestInfo()))
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
    settings = Settings((f"127.0.0.1:{proxy.port}",), without_service="own_tower")
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
        row_bytes = right.width * element_type(right.dtype).itemsize
        name = ImageName(image.digest, image.grid, b"")
        extents = memory.allocate(image.tokens * row_bytes)
        fetcher.start(FetchQuery(name, image.tokens, RequestInfo("a request"), extents=extents))
        assert (await outcome(fetcher)).error is None
    finally:
        await asyncio.to_thread(fetcher.close)
        await proxy.stop()
        other_model.decoder.close()
