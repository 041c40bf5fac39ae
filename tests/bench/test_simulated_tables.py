"""The simulated tables of the pages match the scheduler of this commit."""

import pytest

from bench.harness.results import newest
from bench.scheduler import fleet_table


@pytest.mark.slow
def test_the_stored_table_matches_a_new_simulation() -> None:
    """One row, which has both policies, is enough: the simulation is seeded, so every machine computes the same."""
    computed = fleet_table([1])
    results = [result for result in newest() if result.benchmark == "scheduler"]
    assert results
    for result in results:
        (stored,) = (each for each in result.figures["tables"] if each["title"] == computed["title"])
        assert computed["heads"] == stored["heads"]
        assert computed["rows"][0] == stored["rows"][0], "run `make bench ONLY=scheduler`"
