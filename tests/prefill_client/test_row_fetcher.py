"""Rows fetched into an engine's host memory, on a thread that never makes its scheduler wait."""

import asyncio
import threading
from collections.abc import AsyncIterator
from typing import Any

import pytest

from encoder_contract.geometry import Grid
from encoder_service.app import Server
from prefill_client import EncoderClient
from prefill_client.transport.rows import element_type
from prefill_client.vllm.host_memory import HostMemory
from prefill_client.vllm.image_name import ImageName
from prefill_client.vllm.row_fetcher import Caller, Outcome, RowFetcher, Wanted
from prefill_client.vllm.settings import Settings
from testing.photos import photo
from tests.calls import fetched
from tests.waiting import PATIENCE_S

NOBODYS = ImageName(bytes(32), Grid(1, 4, 4), b"")


@pytest.fixture
def memory() -> HostMemory:
    return HostMemory(1 << 20)


@pytest.fixture
async def fetcher(server: Server, client: EncoderClient, memory: HostMemory) -> AsyncIterator[RowFetcher]:
    """One that waits for an image that nobody submits for as long as a test takes."""
    settings, described = Settings((server.endpoint,), grace_s=20.0), client.description
    fetcher = await asyncio.to_thread(
        RowFetcher, settings, memory, width=described.width, dtype=described.dtype
    )
    yield fetcher
    await asyncio.to_thread(fetcher.close)


async def outcome(fetcher: RowFetcher) -> Outcome:
    await asyncio.to_thread(fetcher.wait, PATIENCE_S)
    (told,) = fetcher.answers()
    return told


async def test_rows_lie_where_they_are_wanted_once_their_outcome_is_told(
    client: EncoderClient, fetcher: RowFetcher, memory: HostMemory
) -> None:
    (image,) = await client.submit([photo(64, 96, 1)])
    row_bytes = client.description.width * element_type(client.description.dtype).itemsize
    name = ImageName(image.digest, image.grid, b"")
    wanted = Wanted(
        name, image.tokens, Caller("a request"), extents=memory.allocate(image.tokens * row_bytes)
    )
    fetcher.ask(wanted)
    told = await outcome(fetcher)
    assert (told.wanted, told.error, told.cancelled) == (wanted, None, False)
    assert memory.read(wanted.extents).tobytes() == (await fetched(client, image.digest)).array.tobytes()
    assert list(fetcher.answers()) == [], "each is told once"


async def test_a_fetch_that_is_given_up_has_an_outcome_too(fetcher: RowFetcher) -> None:
    wanted = Wanted(NOBODYS, 4, Caller())
    fetcher.ask(wanted)
    fetcher.give_up(wanted)
    assert (await outcome(fetcher)).cancelled


async def test_closing_ends_what_is_under_way_and_the_thread(fetcher: RowFetcher) -> None:
    def threads() -> list[Any]:
        return [each for each in threading.enumerate() if each.name == "encoder-rows"]

    assert len(threads()) == 1
    fetcher.ask(Wanted(NOBODYS, 4, Caller()))
    await asyncio.to_thread(fetcher.close)
    assert threads() == []
    assert [told.cancelled for told in fetcher.answers()] == [True]
