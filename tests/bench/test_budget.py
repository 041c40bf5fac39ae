"""A benchmark's time budget: rounds and cases that fit are chosen, those with targets first; the rest is listed."""

import pytest

from bench.harness.budget import TimeBudget


def test_nothing_is_left_out_if_everything_fits() -> None:
    budget = TimeBudget(100)
    assert budget.choose({"a": 1, "b": 2}, 3, first=["b"], share=1.0) == (3, ["a", "b"])
    assert budget.affords("tables", 50)
    assert budget.count("rounds", 5, 2) == 5
    assert budget.left_out == []


def test_cases_without_targets_are_dropped_before_rounds() -> None:
    budget = TimeBudget(100)
    assert budget.choose({"small": 1, "large": 15, "named": 20}, 3, first=["named"], share=1.0) == (
        3,
        ["small", "named"],
    )
    assert budget.left_out == ["case large"]


def test_rounds_are_dropped_to_fit_a_case_with_a_target() -> None:
    budget = TimeBudget(100)
    assert budget.choose({"a": 1, "named": 40}, 3, first=["named"], share=1.0) == (1, ["a", "named"])
    assert budget.left_out == ["2 of 3 rounds"]


def test_a_case_with_a_target_that_never_fits_is_listed() -> None:
    budget = TimeBudget(10)
    assert budget.choose({"named": 40}, 3, first=["named"], share=1.0)[1] == []
    assert "case named" in budget.left_out
    assert not budget.affords("tables", 20)
    assert budget.left_out[-1] == "tables"


@pytest.mark.parametrize(("seconds", "rounds"), [(100, 5), (25, 2), (1, 1)])
def test_at_least_one_round_is_chosen(seconds: float, rounds: int) -> None:
    assert TimeBudget(seconds).count("rounds", 5, 10) == rounds
