"""The simulated tables of the pages: what the scheduler of this commit computes."""

import pytest

from bench.harness.results import newest
from bench.scheduler import fleet_table


@pytest.mark.slow
def test_the_stored_tables_are_what_the_code_computes() -> None:
    """One row of them, which has both policies; the simulation is seeded, so it is the same on every machine."""
    computed = fleet_table([1])
    results = [result for result in newest() if result.benchmark == "scheduler"]
    assert results
    for result in results:
        (stored,) = (each for each in result.figures["tables"] if each["title"] == computed["title"])
        assert computed["heads"] == stored["heads"]
        assert computed["rows"][0] == stored["rows"][0], "run `make bench ONLY=scheduler`"
