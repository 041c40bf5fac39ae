"""Budgets are bounded and shared, and a hold is released however its block ends."""

import asyncio
from contextlib import suppress
from pathlib import Path

import pytest

from encoder_contract.errors import OverloadedError
from encoder_contract.turns import fair_share
from encoder_service.config import Config
from encoder_service.limits import FETCHED_MESSAGES, Budget, Budgets, Hold, fetch_messages
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


def test_a_holder_is_owed_at_most_a_tenth_of_a_second_of_messages() -> None:
    budget = Budgets.of(Config(model=Path("unused"))).fetched_messages
    assert taken(budget, "greedy") == FETCHED_MESSAGES
    assert fair_share(FETCHED_MESSAGES, 1, budget.size - FETCHED_MESSAGES - 1), "the usual share is larger"
    assert taken(budget, "other") == FETCHED_MESSAGES


def test_windows_inside_announcements_count_as_a_quarter_of_a_message() -> None:
    assert [fetch_messages(windows, rows_inside=True) for windows in (1, 4, 5, 512)] == [1, 1, 2, 128]
    assert [fetch_messages(windows, rows_inside=False) for windows in (1, 4, 5, 512)] == [1, 4, 5, 512]


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
