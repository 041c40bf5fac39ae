"""A benchmark's time: rounds and cases are chosen to fit, targets first, and what is left out is named."""

import pytest

from bench.harness.budget import Budget


def test_with_time_for_all_nothing_is_left_out() -> None:
    budget = Budget(100)
    assert budget.choose({"a": 1, "b": 2}, 3, first=["b"], share=1.0) == (3, ["a", "b"])
    assert budget.affords("tables", 50)
    assert budget.count("rounds", 5, 2) == 5
    assert budget.left_out == []


def test_cases_without_targets_go_before_rounds_do() -> None:
    budget = Budget(100)
    assert budget.choose({"small": 1, "large": 15, "named": 20}, 3, first=["named"], share=1.0) == (
        3,
        ["small", "named"],
    )
    assert budget.left_out == ["case large"]


def test_rounds_go_when_a_case_with_a_target_does_not_fit() -> None:
    budget = Budget(100)
    assert budget.choose({"a": 1, "named": 40}, 3, first=["named"], share=1.0) == (1, ["a", "named"])
    assert budget.left_out == ["2 of 3 rounds"]


def test_a_machine_that_is_too_slow_for_any_case_says_so() -> None:
    budget = Budget(10)
    assert budget.choose({"named": 40}, 3, first=["named"], share=1.0)[1] == []
    assert "case named" in budget.left_out
    assert not budget.affords("tables", 20)
    assert budget.left_out[-1] == "tables"


@pytest.mark.parametrize(("seconds", "rounds"), [(100, 5), (25, 2), (1, 1)])
def test_rounds_are_as_many_as_fit_and_one_at_least(seconds: float, rounds: int) -> None:
    assert Budget(seconds).count("rounds", 5, 10) == rounds
