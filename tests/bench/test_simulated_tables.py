"""The simulated tables of the pages match the scheduler of this commit."""

import pytest

from bench.harness.benchmark import markdown
from bench.harness.results import ROOT, stored
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


def test_the_page_of_the_scheduler_shows_the_first_stored_table() -> None:
    """It is typed from the output of `python -m bench.scheduler`, which is the same on every machine."""
    page = (ROOT / "docs/scheduling.md").read_text()
    for result in (each for each in stored() if each.benchmark == "scheduler"):
        first = result.figures["tables"][0]
        assert markdown(first["heads"], first["rows"]) in page
