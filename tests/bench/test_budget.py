"""A benchmark's time budget: what fits is measured, and the rest is listed."""

import pytest

from bench.harness.budget import TimeBudget


def test_what_does_not_fit_is_left_out_and_listed() -> None:
    budget = TimeBudget(100)
    assert budget.affords("tables", 50)
    assert budget.count("rounds", 5, 2) == 5
    assert budget.left_out == []
    assert not budget.affords("tables", 200)
    assert budget.count("rounds", 3, 40) == 2
    assert budget.count("photos", 8, 20, share=0.5, least=4) == 4
    assert budget.left_out == ["tables", "1 of 3 rounds", "4 of 8 photos"]


@pytest.mark.parametrize(("seconds", "rounds"), [(100, 5), (25, 2), (1, 1)])
def test_at_least_one_round_is_chosen(seconds: float, rounds: int) -> None:
    assert TimeBudget(seconds).count("rounds", 5, 10) == rounds
