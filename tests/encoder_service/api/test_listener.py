"""The gRPC port: what is left of a stop that was cancelled."""

import asyncio

import pytest

from encoder_service.app import Server
from prefill_client import EncoderClient, RowRequest
from testing.photos import photo
from tests.gate import Gate
from tests.waiting import soon


def named(*names: str) -> list[str]:
    """Return which tasks of these names exist."""
    return [task.get_name() for task in asyncio.all_tasks() if task.get_name() in names]


async def test_a_cancelled_stop_ends_running_calls_and_leaves_no_task(
    server: Server, client: EncoderClient, gate: Gate
) -> None:
    with gate.closed():
        (image,) = await client.submit([photo(300, 280, 1)])
        async with client.fetch([RowRequest(image.digest)]) as outcomes:
            reading = asyncio.create_task(anext(aiter(outcomes)))
            await soon(lambda: server.budgets.calls.held == 1)
            stopping = asyncio.create_task(server._listener.stop(600))
            await soon(lambda: set(named("stop", "idle")) == {"stop", "idle"})
            stopping.cancel()
            with pytest.raises(asyncio.CancelledError):
                await stopping
            await soon(lambda: server.budgets.calls.held == 0)
            assert named("stop", "idle") == []
            reading.cancel()
