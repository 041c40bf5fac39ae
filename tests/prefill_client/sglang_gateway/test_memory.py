"""The memory that parts share: granted in the order in which it is asked for, and given back whatever happens."""

import asyncio
from contextlib import AsyncExitStack

import pytest

from encoder_contract.errors import ImageLimitError
from prefill_client.sglang_gateway.memory import Memory


async def hold(memory: Memory, size: int, held: list[int], end: asyncio.Event) -> None:
    async with memory.reserved(size):
        held.append(size)
        await end.wait()


async def turns() -> None:
    for _ in range(5):
        await asyncio.sleep(0)


async def test_a_large_reservation_is_not_overtaken_by_small_ones() -> None:
    memory, held, ends = Memory(10, what="rows"), list[int](), [asyncio.Event() for _ in range(3)]
    tasks = [
        asyncio.create_task(hold(memory, size, held, end)) for size, end in zip((6, 8, 1), ends, strict=True)
    ]
    await turns()
    assert held == [6], "8 does not fit, and 1 waits behind it"
    ends[0].set()
    await turns()
    assert held == [6, 8, 1]
    for end in ends:
        end.set()
    await asyncio.gather(*tasks)


async def test_callers_that_leave_give_back_what_they_have_and_their_place() -> None:
    memory, held, end = Memory(10, what="rows"), list[int](), asyncio.Event()
    tasks = [asyncio.create_task(hold(memory, size, held, end)) for size in (10, 9, 4)]
    await turns()
    tasks[1].cancel()  # while it waits
    tasks[0].cancel()  # while it holds all
    await turns()
    assert held == [10, 4]
    end.set()
    await asyncio.gather(*tasks, return_exceptions=True)
    async with AsyncExitStack() as stack:
        await asyncio.wait_for(stack.enter_async_context(memory.reserved(10)), 1)


async def test_more_than_there_is_is_refused_at_once() -> None:
    memory = Memory(10, what="rows of all parts (--rows-gib)")
    with pytest.raises(
        ImageLimitError, match=r"11 bytes exceed the 10 bytes of rows of all parts \(--rows-gib\)"
    ):
        async with memory.reserved(11):
            pass
