"""Rows over the rows port: the same bytes as inline, tickets that work once, and faults of either side."""

from collections.abc import AsyncIterator
from typing import Any

import pytest

from encoder_service.app import Server
from encoder_service.config import Config
from encoder_service.engine.model import Model
from prefill_client import EncoderClient, RowRequest
from testing.photos import photo
from tests.calls import collect
from tests.servers import server_of
from tests.waiting import soon

ROWS: dict[str, Any] = {"rows_listen": "127.0.0.1:0"}
PHOTOS = [photo(256 + 32 * n, 256, n) for n in range(8)]


@pytest.fixture
async def server(config: Config, model: Model) -> AsyncIterator[Server]:
    """A server with a rows port."""
    async with server_of(config, model, **ROWS) as server:
        yield server


async def submitted(client: EncoderClient, images: list[bytes]) -> list[RowRequest]:
    answers = await client.submit(images)
    assert [each.error for each in answers] == [None] * len(images)
    return [RowRequest(each.digest) for each in answers]


async def test_rows_by_tcp_are_those_of_inline(server: Server, client: EncoderClient) -> None:
    requests = await submitted(client, PHOTOS)
    requests += [RowRequest(requests[0].digest, row_begin=3, row_end=9), requests[1]]
    by_tcp = await collect(client, requests, transports=["tcp"])
    inline = await collect(client, requests, transports=["inline"])
    assert {rows.transport for rows in by_tcp.values()} == {"tcp"}
    for index, rows in inline.items():
        assert by_tcp[index].error is None
        assert by_tcp[index].array.tobytes() == rows.array.tobytes()
    await soon(lambda: server.store.stats().pins == 0)


async def test_shared_memory_comes_first_on_one_host(client: EncoderClient) -> None:
    requests = await submitted(client, PHOTOS[:1])
    (rows,) = (await collect(client, requests)).values()
    assert rows.transport == "shm"
