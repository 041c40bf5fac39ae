"""The charts of the pages: what they show, and that the chart of eviction is of the newest result."""

import re
from pathlib import Path

import pytest

from bench.harness import results
from docs import charts
from testing.collector import CollectedSpan
from tests.pages import ROOT

NAMES = {"caller": "LLM server", "a1": "replica a", "b2": "replica b"}


def span(name: str, instance: str, own: str, parent: str, at_ms: int, images: str = "") -> CollectedSpan:
    """Return a span of 5 ms."""
    values = {"Name": name, "ID": own, "Parent ID": parent, "Trace ID": "7"}
    values |= {"Start time": str(at_ms * 1_000_000), "End time": str((at_ms + 5) * 1_000_000)}
    return CollectedSpan(
        {"service.instance.id": instance}, values, {"encoder.images": images} if images else {}
    )


def test_a_trace_has_each_span_below_its_parent_and_a_legend_of_processes() -> None:
    spans = [
        span("encoder.vit", "a1", "4", "2", 30, "2"),
        span("encoder.client.fetch", "caller", "3", "elsewhere", 20),
        span("encoder.fetch", "a1", "2", "3", 21),
        span("encoder.client.submit", "caller", "1", "elsewhere", 10),
        span("encoder.peer_fetch", "a1", "5", "2", 22),
        span("encoder.fetch", "b2", "6", "5", 23),
    ]
    text = re.findall(r"<text[^>]*>([^<]*)</text>", charts.trace(spans, NAMES))
    labels = [each.strip() for each in text if each.strip().startswith("encoder.")]
    depths = [(len(each) - len(each.lstrip())) // 4 for each in text if each.strip().startswith("encoder.")]
    assert labels == [
        *("encoder.client.submit", "encoder.client.fetch", "encoder.fetch", "encoder.peer_fetch"),
        *("encoder.fetch", "encoder.vit (2 images)"),
    ]
    assert depths == [0, 0, 1, 2, 3, 2]
    assert list(NAMES.values()) == [each for each in text if each in NAMES.values()]


def test_the_chart_of_eviction_is_of_the_newest_result() -> None:
    drawn = (ROOT / "docs/img/eviction.svg").read_text()
    assert charts.source(results.newest("eviction")) in drawn, "make pictures"


def test_a_benchmark_without_a_result_says_how_to_get_one(tmp_path: Path) -> None:
    with pytest.raises(LookupError, match="make bench ONLY=eviction"):
        results.newest("eviction", tmp_path)
