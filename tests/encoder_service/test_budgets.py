"""Budgets are bounded and shared, and a hold is released however its block ends."""

import asyncio
import time
from contextlib import suppress
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from encoder_contract.errors import OverloadedError
from encoder_contract.turns import fair_share
from encoder_contract.v1 import encoder_pb2 as pb
from encoder_service.api.fetch import INSIDE_BYTES, owed_messages
from encoder_service.config import Config
from encoder_service.limits import FETCHED_MESSAGES, Budget, Budgets, Hold
from tests.callers import caller
from tests.waiting import PATIENCE_S


def taken(budget: Budget, holder: str) -> int:
    """Hold 1 at a time until the budget refuses; return how many were held."""
    held = 0
    while True:
        try:
            budget.hold(caller(holder))
        except OverloadedError:
            return held
        held += 1


def test_a_greedy_caller_leaves_a_quarter_to_others() -> None:
    budget = Budget(100, "places")
    assert taken(budget, "greedy") == 75
    with pytest.raises(OverloadedError, match="share of places"):
        budget.hold(caller("greedy"))
    assert 0 < taken(budget, "other") < 25


@pytest.mark.attack("Fetches of many windows that become ready at one moment")
def test_a_holder_is_owed_at_most_a_tenth_of_a_second_of_messages() -> None:
    budget = Budgets.of(Config(model=Path("unused"))).fetched_messages
    assert taken(budget, "greedy") == FETCHED_MESSAGES
    assert fair_share(FETCHED_MESSAGES, 1, budget.size - FETCHED_MESSAGES - 1), "the usual share is larger"
    assert taken(budget, "other") == FETCHED_MESSAGES


def test_windows_inside_announcements_count_as_a_quarter_of_a_message() -> None:
    rows = 10

    def owed(windows: int, begin: int, end: int, *, rows_inside: bool = True) -> int:
        images = [pb.FetchImage(row_begin=begin, row_end=end)] * windows
        request = pb.FetchRequest(images=images, rows_inside=rows_inside)
        return owed_messages(request, INSIDE_BYTES // rows)

    sizes = (1, 4, 5, 512)
    assert [owed(windows, 3, 3 + rows) for windows in sizes] == [1, 1, 2, 128]
    assert [owed(windows, 3, 3 + rows, rows_inside=False) for windows in sizes] == [1, 4, 5, 512]
    assert [owed(windows, 3, 4 + rows) for windows in sizes] == [1, 4, 5, 512], "too large"
    tickets = pb.FetchRequest(
        images=[pb.FetchImage(row_end=1)] * 8, rows_inside=True, transports=[pb.TRANSPORT_TCP]
    )
    assert owed_messages(tickets, 1) == 8
    assert [owed(windows, 0, 0) for windows in sizes] == [1, 4, 5, 512], "an image may be of any size"


def test_a_part_counts_in_the_whole_but_against_nobodys_share_of_it() -> None:
    whole = Budget(100, "places")
    part = Budget(80, "seats", part_of=whole)
    with part.hold(caller("reader"), 60) as hold:
        assert whole.held == 60
        assert taken(whole, "reader") == 30, "as a newcomer: three quarters of the 40 that are free"
        with pytest.raises(OverloadedError, match=r"limit of places \(100\)"):
            part.hold(caller("other"), 15)
        hold.resize(20)
        assert (part.held, whole.held) == (20, 50)
    assert (part.held, whole.held) == (0, 30)


def test_a_hold_is_released_once_however_its_block_ends() -> None:
    budget = Budget(10, "places")
    with suppress(ValueError), budget.hold(caller("a"), 3) as hold:
        assert budget.held == 3
        hold.resize(7)
        with pytest.raises(OverloadedError):
            hold.resize(9)
        assert budget.held == hold.amount == 7
        hold.resize(2)
        raise ValueError("a bug")
    hold.release()
    assert budget.held == 0
    assert not budget._holders


def test_an_amount_above_the_budget_counts_as_the_whole_budget() -> None:
    budget = Budget(10, "places")
    with budget.hold(caller("a"), 1000):
        assert budget.held == 10
        with pytest.raises(OverloadedError, match=r"limit of places \(10\)"):
            budget.hold(caller("b"))
    assert budget.held == 0


async def test_a_waiting_caller_gets_released_budget_or_an_error() -> None:
    room = Budget(100, "pinned bytes")

    async def hold(holder: str, address: bytes, seconds: float, size: int = 60) -> Hold:
        return await room.hold_within(caller(holder), size, seconds, once=address)

    first, again = await hold("a", b"1", 0), await hold("a", b"1", 0)
    assert room.held == 60, "the same image once more costs nothing"
    waiting = asyncio.create_task(hold("b", b"2", PATIENCE_S))
    await asyncio.sleep(0.05)
    assert not waiting.done()
    first.release()
    assert room.held == 60
    again.release()
    second = await waiting
    with pytest.raises(OverloadedError) as refused:
        await hold("c", b"3", 0.05)
    assert refused.value.retry_after_ms > 0
    second.release()
    second.release()
    with await hold("c", b"larger than all", 0, 1000):
        assert room.held == 100
    assert room.held == 0


async def test_a_hold_counts_if_its_time_ends_as_it_gets_room() -> None:
    loop, budget = asyncio.get_running_loop(), Budget(10, "places")
    first = budget.hold(caller("a"), 10)
    waiting = asyncio.create_task(budget.hold_within(caller("b"), 10, 0.01))
    await asyncio.sleep(0)
    loop.call_later(0.02, first.release)
    time.sleep(0.1)  # so that both are due in the next pass of the loop
    hold = await waiting
    assert budget.held == hold.amount == 10
    hold.release()
    assert budget.held == 0


AMOUNTS = {b"": 3, b"x": 4, b"y": 7}  # by key; without one, each hold counts


class Callers:
    """Callers that hold images, each with its holder and key, or wait for them."""

    def __init__(self, budget: Budget) -> None:
        self.budget = budget
        self.held: list[tuple[str, bytes, Hold]] = []
        self.waiting: list[asyncio.Task[None]] = []

    @property
    def counted(self) -> int:
        """What the holds take: an image of a holder once."""
        keyed = {(holder, once) for holder, once, _ in self.held if once}
        unkeyed = sum(not once for _, once, _ in self.held)
        return sum(AMOUNTS[once] for _, once in keyed) + AMOUNTS[b""] * unkeyed

    async def step(self, step: str, holder: str, key: bytes) -> None:
        if step == "hold":
            with suppress(OverloadedError):
                self.held.append((holder, key, self.budget.hold(caller(holder), AMOUNTS[key], once=key)))
        elif step == "wait":
            self.waiting.append(asyncio.create_task(self._wait(holder, key)))
        elif step == "release" and self.held:
            self.held.pop(0)[2].release()
        elif step == "cancel" and self.waiting:
            self.waiting.pop().cancel()
        for _ in range(3):
            await asyncio.sleep(0)

    async def _wait(self, holder: str, key: bytes) -> None:
        hold = await self.budget.hold_within(caller(holder), AMOUNTS[key], PATIENCE_S, once=key)
        self.held.append((holder, key, hold))

    async def end(self) -> None:
        for task in self.waiting:
            task.cancel()
        await asyncio.gather(*self.waiting, return_exceptions=True)
        for _, _, hold in self.held:
            hold.release()


STEPS = st.tuples(
    st.sampled_from(("hold", "wait", "release", "cancel")),
    st.sampled_from("abc"),
    st.sampled_from(sorted(AMOUNTS)),
)


@settings(max_examples=150, deadline=None)
@given(st.lists(STEPS, max_size=40))
def test_no_order_of_holds_counts_an_image_twice_or_leaks(steps: list[tuple[str, str, bytes]]) -> None:
    budget = Budget(20, "pinned bytes")

    async def run() -> None:
        callers = Callers(budget)
        for step in steps:
            await callers.step(*step)
            assert budget.held == callers.counted <= budget.size
        await callers.end()

    asyncio.run(run())
    assert (budget.held, budget._holders, +budget._uses) == (0, {}, {})
