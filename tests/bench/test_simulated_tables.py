"""The simulated tables of the pages match the code of this commit."""

import pytest

from bench.harness.results import stored
from bench.scheduler import fleet_table


@pytest.mark.slow
def test_the_stored_table_matches_a_new_simulation() -> None:
    """One row, which has both policies, is enough: the simulation is seeded, so every machine computes the same."""
    computed = fleet_table([1])
    results = [result for result in stored() if result.benchmark == "scheduler"]
    assert results
    for result in results:
        (kept,) = (each for each in result.figures["tables"] if each["title"] == computed["title"])
        assert computed["heads"] == kept["heads"]
        assert computed["rows"][0] == kept["rows"][0], "run `make bench ONLY=scheduler`"
