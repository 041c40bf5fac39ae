"""The thread between an engine and its shared store: every query and every save has an outcome."""

import asyncio
import os
from collections.abc import Callable, Iterable
from typing import Any

import torch

from encoder_contract.errors import InternalError
from encoder_service.config import Config
from encoder_service.engine.model import Model
from prefill_client.transport.rows import element_type
from prefill_client.vllm.host_memory import RECORD, HostMemory
from prefill_client.vllm.settings import Settings
from prefill_client.vllm.shared_store import RowKind, SharedStore, StoreQuery, StoreSession
from tests.put_calls import PRODUCER, TOKENS
from tests.servers import server_of
from tests.waiting import soon


class Field:
    """One named input of a tower, as vLLM passes it."""

    data = torch.zeros(96, 12)


async def first(outcomes: Callable[[], Iterable[Any]]) -> Any:
    """Return the first outcome."""
    collected: list[Any] = []

    def some() -> bool:
        collected.extend(outcomes())
        return bool(collected)

    await soon(some)
    return collected[0]


async def test_a_failed_save_frees_its_lease(config: Config, model: Model) -> None:
    kind = RowKind(model.tower.width, model.recipe.dtype)
    rows_bytes = TOKENS * kind.width * element_type(kind.dtype).itemsize
    memory = HostMemory(1 << 20)
    async with server_of(config, model, accept_put="yes") as server:
        session = StoreSession(Settings((server.endpoint,)), PRODUCER, kind, HostMemory(1 << 20))
        store = await asyncio.to_thread(SharedStore, session, memory)
        try:
            store.start(StoreQuery({"pixel_values": Field()}, "", TOKENS))
            found = await first(store.outcomes)
            store.expect(7, found.lease, memory.allocate(rows_bytes - 1))  # not a whole number of rows
            pipe = os.open(store.pipe, os.O_WRONLY | os.O_CLOEXEC)
            os.write(pipe, RECORD.pack(7, True))
            os.close(pipe)
            sent = await first(store.puts)
            assert (sent.number, type(sent.error)) == (7, InternalError)
            await soon(lambda: not len(server.leases))
        finally:
            await asyncio.to_thread(store.close)
