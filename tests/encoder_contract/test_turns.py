"""Turns, room and work for threads: holders take turns, and no cancellation or wake-up is lost."""

import asyncio
import threading
from collections import Counter
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from encoder_contract.turns import Place, Room, RoundRobin, ThreadTurns, TurnQueue, Turns, at_most, fair_share
from tests.waiting import PATIENCE_S, soon, until

AT_A_TIME = 2
HOLDERS = st.sampled_from("abcd")


async def passes(count: int = 3) -> None:
    """Let the loop run what is ready."""
    for _ in range(count):
        await asyncio.sleep(0)


def assert_in_turn(asked: Sequence[str], served: Sequence[int]) -> None:
    """Assert that holders took turns: `asked` has the holder of each request, and `served` the requests in order.

    A request that was cancelled when it had its turn is not in `served`, but has used the turn.
    """
    for position, request in enumerate(served):
        holder = asked[request]
        own = [each for each in served[:position] if asked[each] == holder]
        assert all(each < request for each in own), "a holder's requests keep their order"
        before = Counter(asked[each] for each in served[:position] if asked[each] != holder)
        assert max(before.values(), default=0) <= 1 + asked[:request].count(holder), (asked, served)


# RoundRobin


def test_holders_take_turns_and_a_holders_items_keep_their_order() -> None:
    queue: RoundRobin[str] = RoundRobin()
    for item in ("a1", "a2", "a3", "b1", "c1", "b2"):
        queue.put(item[0], item)
    assert list(queue.first()) == ["a1", "b1", "c1"]
    order = []
    while queue.holders:
        order.append(queue.pop())
    assert order == ["a1", "b1", "c1", "a2", "b2", "a3"]
    with pytest.raises(KeyError):
        queue.pop()


@settings(max_examples=100, deadline=None)
@given(st.lists(st.tuples(HOLDERS, st.sampled_from(("put", "pop", "pop of", "remove"))), max_size=40))
def test_a_round_robin_has_what_was_put_and_not_removed(steps: list[tuple[str, str]]) -> None:
    queue: RoundRobin[int] = RoundRobin()
    left: dict[str, list[int]] = {}
    for number, (holder, step) in enumerate(steps):
        if step == "put":
            queue.put(holder, number)
            left.setdefault(holder, []).append(number)
        elif step == "remove":
            queue.remove(holder, min(left.get(holder, [-1])[-1:], default=-1))
            del left.get(holder, [0])[-1:]
        elif step == "pop of" and left.get(holder):
            assert queue.pop(holder) == left[holder].pop(0)
        elif step == "pop" and any(left.values()):
            popped = queue.pop()
            [owner] = [name for name, numbers in left.items() if popped in numbers[:1]]
            left[owner].pop(0)
        assert sorted(queue.first()) == sorted(numbers[0] for numbers in left.values() if numbers)


# Turns


async def test_each_pass_grants_only_a_few_turns() -> None:
    turns, gone_on = Turns(AT_A_TIME), 0

    async def take() -> None:
        nonlocal gone_on
        await turns.take("client")
        gone_on += 1

    tasks = [asyncio.ensure_future(take()) for _ in range(100)]
    granted = []
    while gone_on < 100:
        before = gone_on
        await asyncio.sleep(0)
        granted.append(gone_on - before)
    await asyncio.gather(*tasks)
    assert max(granted) <= 2 * AT_A_TIME  # the turns of one pass, and those granted in the pass before


async def test_each_pass_runs_two_units_of_other_clients_work() -> None:
    turns, done = Turns(AT_A_TIME), 0

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


@settings(max_examples=100, deadline=None)
@given(st.lists(st.tuples(HOLDERS, st.integers(1, 3 * AT_A_TIME), st.booleans()), max_size=30))
def test_turns_go_round_and_a_cancelled_caller_takes_none(requests: list[tuple[str, int, bool]]) -> None:
    """Each request has a holder, its units, and whether it is cancelled while it waits."""
    served: list[int] = []

    async def take(turns: Turns, number: int) -> None:
        await turns.take(requests[number][0], requests[number][1])
        served.append(number)

    async def run() -> None:
        turns = Turns(AT_A_TIME)
        first = asyncio.create_task(
            turns.take("first", AT_A_TIME)
        )  # uses up the pass, so that all others wait
        tasks = [asyncio.create_task(take(turns, number)) for number in range(len(requests))]
        await asyncio.sleep(0)  # each has asked
        for task, (_, _, cancels) in zip(tasks, requests, strict=True):
            if cancels:
                task.cancel()
        async with asyncio.timeout(PATIENCE_S):
            await asyncio.gather(first, *tasks, return_exceptions=True)
        await passes()
        assert not turns._waiting.holders
        assert not turns._is_passing

    asyncio.run(run())
    assert set(served) >= {number for number, request in enumerate(requests) if not request[2]}
    assert_in_turn([request[0] for request in requests], served)


async def test_a_cancelled_caller_uses_no_units_of_a_pass() -> None:
    async def passes_of_another(cancelled: int) -> int:
        turns = Turns(1)
        first = asyncio.create_task(turns.take("first"))  # uses up the pass, so that all others wait
        left = [asyncio.create_task(turns.take(f"left {number}")) for number in range(cancelled)]
        another = asyncio.create_task(turns.take("another"))
        await asyncio.sleep(0)
        for task in left:
            task.cancel()
        count = 0
        while not another.done():
            await asyncio.sleep(0)
            count += 1
        await first
        return count

    assert await passes_of_another(5) == await passes_of_another(0)


# Room

STEPS = st.lists(
    st.one_of(
        st.tuples(st.just("ask"), HOLDERS, st.integers(1, 6)),
        st.tuples(st.just("leave"), st.integers(0, 40), st.just(0)),
    ),
    max_size=40,
)


@settings(max_examples=200, deadline=None)
@given(STEPS, st.sampled_from([(lambda _held, _more, _free: True), fair_share, at_most(6)]))
def test_a_room_is_never_too_full_and_nobody_waits_who_could_go(
    steps: list[tuple[str, int, int]], share: Callable[[int, int, int], bool]
) -> None:
    room = Room(10, "places", share=share)
    places: list[Place] = []
    for step, who, amount in steps:
        if step == "ask":
            places.append(Place(room, str(who), amount))
            room.line_up(places[-1])
        elif places:
            places.pop(int(who) % len(places)).release()  # in line or taken
        taken = [each for each in places if each.is_taken]
        assert room.held == sum(each.amount for each in taken) <= room.size
        waiting = [each for each in places if not each.is_taken]
        firsts = list(room._line.first())
        assert set(waiting) >= set(firsts)
        for first in firsts:  # in the order of their turns
            held = sum(each.amount for each in taken if each.holder == first.holder)
            if first.amount > room.size - room.held:
                break  # those behind it let it go first
            assert not share(held, first.amount, room.size - room.held - first.amount)
    for place in places:
        place.release()
        place.release()
    assert (room.held, room._holders, bool(room._line.holders)) == (0, {}, False)


@settings(max_examples=100, deadline=None)
@given(st.lists(st.tuples(HOLDERS, st.integers(0, 2)), max_size=30), st.integers(1, 3))
def test_callers_of_a_room_take_turns_and_a_cancelled_one_leaves_nothing(
    requests: list[tuple[str, int]], size: int
) -> None:
    """Each request has a holder, and after how many passes it is cancelled; 0: never."""
    served: list[int] = []

    async def use(room: Room, number: int) -> None:
        async with room.taken(requests[number][0]):
            served.append(number)
            assert 0 < room.held <= size
            await asyncio.sleep(0)

    async def run() -> None:
        room = Room(size)
        async with room.taken("first", size):
            tasks = [asyncio.create_task(use(room, number)) for number in range(len(requests))]
            await asyncio.sleep(0)  # each has asked
        for step in (1, 2):  # a place that was given at this moment is cancelled, too
            for task, (_, when) in zip(tasks, requests, strict=True):
                if when == step:
                    task.cancel()
            await asyncio.sleep(0)
        async with asyncio.timeout(PATIENCE_S):
            await asyncio.gather(*tasks, return_exceptions=True)
            async with room.taken("last", size):
                assert room.held == size
        assert (room.held, room._holders, bool(room._line.holders)) == (0, {}, False)

    asyncio.run(run())
    assert set(served) >= {number for number, (_, when) in enumerate(requests) if not when}
    assert_in_turn([holder for holder, _ in requests], served)


def test_a_large_request_is_not_overtaken_by_small_ones() -> None:
    room = Room(10)
    first, large, small = Place(room, "a", 6), Place(room, "b", 8), Place(room, "c", 1)
    for place in (first, large, small):
        room.line_up(place)
    assert not large.is_taken
    assert not small.is_taken, "it fits, and waits behind the large one"
    first.release()
    assert large.is_taken
    assert small.is_taken


def test_one_whose_holder_has_its_share_is_passed_over() -> None:
    room = Room(10, share=at_most(2))
    first, second, other = Place(room, "a", 2), Place(room, "a", 1), Place(room, "b", 1)
    for place in (first, second, other):
        room.line_up(place)
    assert (first.is_taken, second.is_taken, other.is_taken) == (True, False, True)
    first.release()
    assert second.is_taken


# ThreadTurns


@settings(max_examples=25, deadline=None)
@given(st.lists(st.tuples(HOLDERS, st.booleans()), max_size=20), st.integers(1, 3))
def test_threads_work_for_holders_in_turn_and_none_is_lost(
    requests: list[tuple[str, bool]], threads: int
) -> None:
    """Each request has a holder, and whether it is cancelled while it waits."""
    begun: list[int] = []
    gate = threading.Event()

    async def run() -> None:
        turns = ThreadTurns(threads, "turns")
        blocked = [asyncio.create_task(turns.run("first", gate.wait)) for _ in range(threads)]
        await passes()
        tasks = [
            asyncio.create_task(turns.run(holder, lambda number=number: begun.append(number)))
            for number, (holder, _) in enumerate(requests)
        ]
        await passes()
        assert not begun
        for task, (_, cancels) in zip(tasks, requests, strict=True):
            if cancels:
                task.cancel()
        gate.set()
        async with asyncio.timeout(PATIENCE_S):
            await asyncio.gather(*blocked, *tasks, return_exceptions=True)
            await soon(lambda: turns._room.held == 0)

    asyncio.run(run())
    expected = [number for number, (_, cancels) in enumerate(requests) if not cancels]
    assert sorted(begun) == expected
    if threads == 1:
        assert_in_turn([holder for holder, _ in requests], begun)


async def test_work_that_has_begun_goes_on_and_keeps_its_thread_when_its_call_is_cancelled() -> None:
    turns, gate, begun = ThreadTurns(1, "turns"), threading.Event(), threading.Event()

    def work() -> None:
        begun.set()
        gate.wait()

    task = asyncio.create_task(turns.run("a", work))
    await asyncio.to_thread(begun.wait)
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)
    assert turns._room.held == 1
    gate.set()
    assert await turns.run("b", lambda: 7) == 7


# TurnQueue


@settings(max_examples=50, deadline=None)
@given(st.lists(HOLDERS, max_size=30), st.integers(1, 4), st.integers(0, 30))
def test_threads_take_each_item_once_and_end_when_the_queue_closes(
    holders: list[str], threads: int, before: int
) -> None:
    """`before` items are in the queue when the threads start."""
    queue: TurnQueue[int] = TurnQueue()
    taken: list[int] = []

    def work() -> None:
        while (item := queue.take()) is not None:
            taken.append(item)

    for number, holder in enumerate(holders[:before]):
        queue.put(holder, number)
    with ThreadPoolExecutor(threads) as pool:
        workers = [pool.submit(work) for _ in range(threads)]
        for number, holder in enumerate(holders[before:], before):
            queue.put(holder, number)
        until(lambda: len(taken) == len(holders))
        queue.close()
        for worker in workers:
            worker.result(PATIENCE_S)
    assert sorted(taken) == list(range(len(holders)))
    if threads == 1 and before >= len(holders):
        assert_in_turn(holders, taken)


def test_closing_a_queue_drops_its_items() -> None:
    queue: TurnQueue[int] = TurnQueue()
    queue.put("a", 1)
    assert not queue.is_empty
    queue.close()
    assert queue.take() is None


def test_every_greedy_holder_gets_as_much_as_the_others() -> None:
    room, order = Room(1000, share=fair_share), "abc"
    held = Counter[str]()
    while lacks := [room.take_now(holder) for holder in order]:
        for holder, lack in zip(order, lacks, strict=True):
            held[holder] += lack is None
        if all(lacks):
            break
    assert max(held.values()) - min(held.values()) <= 1
    assert room.size - room.held >= 0.1 * room.size, "some room stays free for new holders"
