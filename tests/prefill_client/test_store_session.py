"""An engine's session with the shared store, without the engine: it joins, works alone, and joins again."""

import asyncio
import logging
from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch

from encoder_contract.errors import DeadlineError, EncoderError, UnavailableError
from encoder_service.config import Config
from encoder_service.engine.model import Model
from prefill_client.transport.rows import element_type
from prefill_client.vllm import row_fetcher
from prefill_client.vllm.host_memory import HostMemory
from prefill_client.vllm.settings import Settings
from prefill_client.vllm.shared_store import RowKind, StoreQuery, StoreSession, image_key, same_image
from testing.processes import free_port
from tests.put_calls import PRODUCER
from tests.servers import server_of
from tests.waiting import soon

TOKENS = 24


@dataclass
class Field:
    """One named input of a tower, as vLLM passes it."""

    data: Any


def an_image(value: int) -> dict[str, Field]:
    return {
        "pixel_values": Field(torch.full((96, 12), value)),
        "image_grid_thw": Field(torch.tensor((1, 8, 12))),
    }


@pytest.fixture
def kind(model: Model) -> RowKind:
    """The rows of these tests' server."""
    return RowKind(model.tower.width, model.recipe.dtype)


def session(endpoint: str, kind: RowKind, **settings: Any) -> tuple[StoreSession, HostMemory]:
    memory = HostMemory(1 << 20)
    all_settings = Settings((endpoint,), **{"submit_timeout_s": 20.0, **settings})
    return StoreSession(all_settings, PRODUCER, kind, memory), memory


def query_of(memory: HostMemory, kind: RowKind, value: int) -> StoreQuery:
    extents = memory.allocate(TOKENS * kind.width * element_type(kind.dtype).itemsize)
    assert extents is not None
    return StoreQuery(an_image(value), "", TOKENS, extents)


async def test_a_server_that_cannot_store_the_rows_is_refused_with_the_reason(
    config: Config, model: Model, kind: RowKind
) -> None:
    for accepts, rows, why in (
        ("no", kind, "--accept-put"),
        ("yes", replace(kind, width=kind.width + 1), "the engine has"),
        ("yes", replace(kind, dtype="float16"), "the engine has"),
    ):
        async with server_of(config, model, accept_put=accepts) as server:
            ours, _ = session(server.endpoint, rows)
            with pytest.raises(ValueError, match=why):
                await ours.start()
            await ours.close()


async def test_an_engine_starts_alone_joins_later_and_logs_each_once(
    config: Config, model: Model, kind: RowKind, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.WARNING, "vllm.encoder_service")
    endpoint = f"127.0.0.1:{free_port()}"  # where no server listens yet
    ours, memory = session(endpoint, kind)
    await ours.start()
    assert ours.alone
    for value in range(3):
        found = await ours.find(query_of(memory, kind, value))
        assert (found.state, found.lease) == ("own", None), "it does not query a store that is down"
    async with server_of(config, model, accept_put="yes", listen=endpoint):
        await soon(lambda: not ours.alone)
        found = await ours.find(query_of(memory, kind, 9))
        assert found.lease is not None
        await ours.abandon(found.lease)
        await ours.close()
    logged = [record.getMessage() for record in caplog.records if record.name == "vllm.encoder_service"]
    assert ["is unavailable" in line for line in logged] == [True, False], logged


async def test_a_refusal_of_the_service_is_logged_once_and_retried(
    config: Config,
    model: Model,
    kind: RowKind,
    caplog: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    caplog.set_level(logging.WARNING, "vllm.encoder_service")
    monkeypatch.setattr(row_fetcher, "JOIN_S", 0.02)
    endpoint = f"127.0.0.1:{free_port()}"  # where no server listens yet
    ours, _ = session(endpoint, kind)
    await ours.start()
    refusals, join = [], ours._join

    async def noted_join() -> None:
        try:
            await join()
        except EncoderError as error:
            if not isinstance(error, (UnavailableError, DeadlineError)):
                refusals.append(error)
            raise

    monkeypatch.setattr(ours, "_join", noted_join)
    async with server_of(config, model, accept_put="no", listen=endpoint):
        await soon(lambda: len(refusals) > 3)
        assert ours.alone
    async with server_of(config, model, accept_put="yes", listen=endpoint):
        await soon(lambda: not ours.alone)
        await ours.close()
    logged = [record.getMessage() for record in caplog.records if record.name == "vllm.encoder_service"]
    refused = [line for line in logged if "answers but cannot be used" in line]
    assert len(refused) == 1, logged
    assert "--accept-put" in refused[0]


async def test_put_rows_are_found_and_waits_can_be_cancelled(
    config: Config, model: Model, kind: RowKind
) -> None:
    async with server_of(config, model, accept_put="yes") as server:
        (one, one_memory), (other, memory) = session(server.endpoint, kind), session(server.endpoint, kind)
        await one.start()
        await other.start()
        first = await one.find(query_of(one_memory, kind, 1))
        assert first.lease is not None
        waiting = query_of(memory, kind, 1)
        task = asyncio.create_task(other.find(waiting))
        await soon(lambda: waiting.fetch_task is not None)
        waiting.cancel()
        assert (await task).state == "cancelled"
        rows = memory.read(waiting.extents).copy()
        rows[:] = 7
        assert await one.put(first.lease, rows) is None
        found = query_of(memory, kind, 1)
        assert (await other.find(found)).state == "here"
        assert (memory.read(found.extents) == 7).all()
        assert not other.alone
        await one.close()
        await other.close()


async def test_an_expired_lease_does_not_end_sharing(
    config: Config, model: Model, kind: RowKind, caplog: pytest.LogCaptureFixture
) -> None:
    async with server_of(config, model, accept_put="yes", put_lease_s=0.2) as server:
        ours, memory = session(server.endpoint, kind)
        await ours.start()
        image = query_of(memory, kind, 1)
        late = (await ours.find(image)).lease
        assert late is not None
        await soon(lambda: not len(server.leases))
        assert isinstance(await ours.put(late, memory.read(image.extents)), DeadlineError)
        assert not ours.alone
        logged = [record for record in caplog.records if record.name == "vllm.encoder_service"]
        assert not logged, "the store is available"
        assert (await ours.find(image)).lease is not None
        await ours.close()


def test_a_key_covers_pixels_shapes_types_and_the_salt() -> None:
    one = an_image(1)
    assert image_key(one, "a") == image_key(an_image(1), "a")
    cast = {**one, "pixel_values": Field(one["pixel_values"].data.to(torch.int32))}
    turned = {**one, "pixel_values": Field(one["pixel_values"].data.reshape(48, 24))}
    tiles = list(one["pixel_values"].data.split(48))
    others = [
        an_image(2),
        cast,
        turned,
        {**one, "pixel_values": Field(tiles)},
        {**one, "pixel_values": Field([tiles, []])},
        {**one, "num_tiles": Field(2)},
        {**one, "num_tiles": Field("2")},
    ]
    keys = {image_key(each, "a").key for each in (one, *others)} | {image_key(one, "b").key}
    assert len(keys) == 2 + len(others)
    assert all(same_image(each, each | {}) for each in (one, *others))
    assert same_image(one, an_image(1))
    assert not any(same_image(one, other) for other in others)
    with pytest.raises(TypeError, match="pixel_values is a bytes"):
        image_key({"pixel_values": Field(b"1")}, "")


async def test_an_image_with_too_many_rows_does_not_end_sharing(
    config: Config, model: Model, kind: RowKind
) -> None:
    async with server_of(config, model, accept_put="yes") as server:
        ours, memory = session(server.endpoint, kind)
        await ours.start()
        found = await ours.find(StoreQuery(an_image(1), "", 1 << 20))
        assert (found.state, found.lease) == ("own", None)
        assert not ours.alone
        assert (await ours.find(query_of(memory, kind, 2))).lease is not None
        await ours.close()
