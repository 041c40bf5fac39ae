"""When an attempt at an image is worth another one, and what its caller is told in the end."""

from time import monotonic

import pytest

from encoder_contract.errors import (
    DeadlineError,
    InternalError,
    InvalidImageError,
    OverloadedError,
    UnavailableError,
    UnknownImageError,
)
from prefill_client.retries import MAX_FAILURES, MAX_REFUSED_PAUSE_S, Attempts


def attempts(left_s: float = 60.0) -> Attempts:
    return Attempts(monotonic() + left_s)


@pytest.mark.parametrize("error", [InvalidImageError("x"), DeadlineError("x"), UnknownImageError("x")])
def test_what_a_retry_cannot_help_is_the_outcome(error) -> None:
    assert attempts().pause_s(error, can_resubmit=False) is None


@pytest.mark.parametrize("hint_ms", [0, 1, 200, 4000])
def test_a_refusal_is_waited_out_for_its_hint_and_longer_each_time_as_often_as_the_deadline_allows(
    hint_ms: int,
) -> None:
    tried = attempts(1e6)
    pauses = []
    for _ in range(2000):
        pause = tried.pause_s(OverloadedError("full", retry_after_ms=hint_ms), can_resubmit=False)
        assert pause is not None
        assert pause >= hint_ms / 1000
        pauses.append(pause)
    assert pauses[0] <= 1.5 * max(hint_ms / 1000, 0.1)
    assert sum(pauses[:6]) > 3
    assert max(pauses) <= 1.5 * max(hint_ms / 1000, MAX_REFUSED_PAUSE_S)
    assert attempts(0.1).pause_s(OverloadedError("full", retry_after_ms=200), can_resubmit=False) is None


def test_whose_time_runs_out_over_refusals_is_told_of_the_refusal() -> None:
    tried = attempts()
    refusal = OverloadedError("full", retry_after_ms=10)
    tried.pause_s(refusal, can_resubmit=False)
    assert tried.outcome(DeadlineError("late")) is refusal
    assert isinstance(attempts().outcome(DeadlineError("late")), DeadlineError)
    other = InternalError("bug")
    assert tried.outcome(other) is other


def test_failures_are_tried_a_bounded_number_of_times() -> None:
    tried = attempts()
    pauses = [tried.pause_s(UnavailableError("gone"), can_resubmit=False) for _ in range(MAX_FAILURES + 1)]
    assert None not in pauses[:-1]
    assert pauses[-1] is None
    bug = attempts()
    assert bug.pause_s(InternalError("bug"), can_resubmit=False) is not None
    assert bug.pause_s(InternalError("bug"), can_resubmit=False) is None
    assert attempts().pause_s(UnknownImageError("lost"), can_resubmit=True) == 0.0
