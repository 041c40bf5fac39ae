"""Turns: a client with thousands of requests delays others by a pass or two of the event loop."""

import asyncio

from encoder_service.limits import AT_A_TIME, Turns


async def test_a_client_with_thousands_of_turns_does_not_block_another() -> None:
    turns, order = Turns(), []

    async def take(client_id: str) -> None:
        await turns.take(client_id)
        order.append(client_id)

    greedy = [asyncio.ensure_future(take("greedy")) for _ in range(1000)]
    await asyncio.sleep(0)
    modest = [asyncio.ensure_future(take("modest")) for _ in range(3)]
    await asyncio.gather(*greedy, *modest)
    assert len(order) == 1003
    assert max(at for at, client_id in enumerate(order) if client_id == "modest") < 5 * AT_A_TIME


async def test_each_pass_grants_only_a_few_turns() -> None:
    turns, gone_on = Turns(), 0

    async def take() -> None:
        nonlocal gone_on
        await turns.take("client")
        gone_on += 1

    tasks = [asyncio.ensure_future(take()) for _ in range(100)]
    passes = []
    while gone_on < 100:
        before = gone_on
        await asyncio.sleep(0)
        passes.append(gone_on - before)
    await asyncio.gather(*tasks)
    assert max(passes) <= 2 * AT_A_TIME  # the turns of one pass, and those granted in the pass before


async def test_each_pass_runs_two_units_of_other_clients_work() -> None:
    turns, done = Turns(), 0

    async def work() -> None:
        nonlocal done
        for _ in range(100):
            await turns.take("greedy")
            done += 1

    greedy = [asyncio.ensure_future(work()) for _ in range(20)]
    await asyncio.sleep(0)
    before = done
    for _ in range(50):
        await asyncio.sleep(0)
    assert done - before <= 2 * 50
    await asyncio.gather(*greedy)


async def test_a_turn_as_large_as_a_pass_leaves_the_next_pass_to_others() -> None:
    turns, order = Turns(), []

    async def take(client_id: str, pieces: int) -> None:
        await turns.take(client_id, pieces)
        order.append(client_id)

    large = [asyncio.ensure_future(take("greedy", 100 * AT_A_TIME)) for _ in range(20)]
    await asyncio.sleep(0)
    small = [asyncio.ensure_future(take("modest", 1)) for _ in range(3)]
    await asyncio.gather(*large, *small)
    assert [at for at, client_id in enumerate(order) if client_id == "modest"][-1] < 8


async def test_a_cancelled_waiter_takes_no_turn() -> None:
    turns = Turns()
    waiting = [asyncio.ensure_future(turns.take("client")) for _ in range(50)]
    await asyncio.sleep(0)
    for task in waiting[AT_A_TIME:]:
        task.cancel()
    await asyncio.gather(*waiting, return_exceptions=True)
    await asyncio.wait_for(turns.take("client"), 30)
    for _ in range(3):
        await asyncio.sleep(0)
    assert not turns._waiting
    assert not turns._is_passing
