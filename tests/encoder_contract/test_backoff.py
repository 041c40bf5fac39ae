"""The pause before another attempt doubles, from the first to the last."""

from hypothesis import given
from hypothesis import strategies as st

from encoder_contract.backoff import backoff_s


@given(st.integers(0, 10_000), st.floats(0.01, 10), st.floats(10, 1000))
def test_a_pause_doubles_and_stays_between_the_first_and_the_last(
    retries: int, first_s: float, last_s: float
) -> None:
    pause_s, next_s = backoff_s(retries, first_s, last_s), backoff_s(retries + 1, first_s, last_s)
    assert backoff_s(0, first_s, last_s) == first_s <= pause_s <= last_s
    assert next_s == min(2 * pause_s, last_s)
