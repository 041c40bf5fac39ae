"""A call that is cancelled at any of its awaits leaves nothing behind, at the client or the server, and ends."""

import asyncio
import itertools
import types
from collections.abc import Awaitable, Callable, Coroutine, Generator
from typing import Any

import pytest

from encoder_service.app import Server
from prefill_client import EncoderClient, RowRequest
from testing.photos import photo, with_comment
from tests.calls import encoded, submitted
from tests.encoder_service.api.test_ended_calls import in_use
from tests.waiting import PATIENCE_S, soon

BASE = photo(96, 64, 1)
numbers = itertools.count()

Operation = Callable[[EncoderClient, bytes], Coroutine[Any, Any, None]]


async def submit(client: EncoderClient, image: bytes) -> None:
    await submitted(client, [image])


async def fetch(client: EncoderClient, image: bytes) -> None:
    await encoded(client, image)


async def keep(client: EncoderClient, image: bytes) -> None:
    kept = await client.keep([image])
    try:
        async with client.fetch([RowRequest(kept.answers[0].digest)], kept=True) as stream:
            async for rows in stream:
                assert rows.error is None
    finally:
        await kept.close()


@types.coroutine
def cancelled_at(awaitable: Awaitable[None], suspension: int) -> Generator[Any, Any, None]:
    """Await `awaitable`, and cancel the current task at the given suspension, counted from 1."""
    steps = awaitable.__await__()
    task = asyncio.current_task()
    assert task is not None
    step: Callable[[], Any] = steps.__next__
    for number in itertools.count(1):
        try:
            waited_for = step()
        except StopIteration:
            return
        if number == suspension:
            task.cancel()
        try:
            sent = yield waited_for
        except BaseException as error:  # noqa: BLE001 - passed on
            step = lambda error=error: steps.throw(error)  # type: ignore[misc]  # noqa: E731
        else:
            step = lambda sent=sent: steps.send(sent)  # type: ignore[misc]  # noqa: E731


async def run(operation: Awaitable[None], suspension: int) -> None:
    await cancelled_at(operation, suspension)


def is_unused(server: Server) -> bool:
    """Whether nobody holds anything of the server, but for the client's watch of its health."""
    return in_use(server).keys() <= {"health_calls"} and not server.jobs and not server.store.stats().pins


def open_tasks() -> int:
    """Count the tasks. Those that close a replaced connection stay for minutes: a machine that stalls loses some."""
    return sum(not task.get_name().startswith("retire ") for task in asyncio.all_tasks())


@pytest.mark.parametrize("operation", [submit, fetch, keep])
async def test_a_call_cancelled_at_any_await_leaves_nothing(server: Server, operation: Operation) -> None:
    async with await EncoderClient.connect(server.endpoint) as client:
        await operation(client, with_comment(BASE, next(numbers)))  # connections and tasks that stay
        await soon(lambda: is_unused(server))
        tasks = open_tasks()
        for suspension in itertools.count(1):
            task = asyncio.create_task(run(operation(client, with_comment(BASE, next(numbers))), suspension))
            await asyncio.wait([task], timeout=PATIENCE_S)
            assert task.done(), f"it hangs, cancelled at suspension {suspension}"
            await soon(lambda: is_unused(server) and open_tasks() <= tasks)
            if not task.cancelled():
                await task
                break
        assert suspension > 3
        await operation(client, with_comment(BASE, next(numbers)))
