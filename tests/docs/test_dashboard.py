"""The picture of Grafana's dashboard: its queries, its panels, and that the drawn file has the panels of today."""

import re
import shutil

import pytest

from docs import dashboard
from tests.pages import ROOT


def texts(drawn: str) -> set[str]:
    return set(re.findall(r"<text[^>]*>([^<]*)</text>", drawn))


def test_queries_have_no_variable_of_grafana_left() -> None:
    queries = [
        dashboard.filled(target["expr"])
        for panel in dashboard.panels()
        for target in panel.get("targets", ())
    ]
    assert len(queries) >= 30
    assert [query for query in queries if "$" in query] == []


def test_a_panel_shows_its_largest_series_or_that_it_has_none() -> None:
    series = {title: {} for title in dashboard.titles()}
    series["Queue"] = {f"class {number}": [(0.0, number), (5.0, number)] for number in range(9)}
    series["Cache hits"] = {"": [(0.0, 0.1), (5.0, 0.342)]}
    found = texts(dashboard.draw(dashboard.panels(), series, "a test"))
    assert {"Queue", "Health", "No data", "34.2 %"} <= found
    assert {text for text in found if text.startswith("class")} == {f"class {n}" for n in range(3, 9)}


@pytest.mark.parametrize(
    ("value", "unit", "text"),
    [
        (0.342, "percentunit", "34.2 %"),
        (0.25, "s", "250 ms"),
        (2.5e6, "Bps", "2.5 MB/s"),
        (2.2, "ops", "2.2/s"),
        (2427, "short", "2,427"),
    ],
)
def test_values_have_the_unit_of_their_panel(value: float, unit: str, text: str) -> None:
    assert dashboard.shown(value, unit) == text


def test_the_picture_has_the_panels_of_the_dashboard() -> None:
    drawn = texts((ROOT / "docs/img/dashboard.svg").read_text())
    assert set(dashboard.titles()) <= drawn, "python -m docs.dashboard"


@pytest.mark.process
@pytest.mark.slow
@pytest.mark.skipif(shutil.which("prometheus") is None, reason="Prometheus is not installed")
def test_a_real_prometheus_answers_what_the_panels_ask() -> None:
    drawn = texts(dashboard.run(seconds=30))
    assert set(dashboard.titles()) <= drawn
    assert {"2 of 2", "demanded", "host used"} <= drawn
