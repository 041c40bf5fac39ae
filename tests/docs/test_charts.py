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


def engines_result(measured_at: str) -> results.Result:
    """Return a result in which each side has as many requests a second as callers, times its number."""
    sides = {
        side: {"loads": {f"c{callers}": {"requests_per_s": callers * (1 + number)} for callers in (8, 32)}}
        for number, side in enumerate(charts.SIDES)
    }
    return results.Result(
        *("engines", "a machine", "ok", "python -m bench.engines --json", measured_at),
        figures={"cells": {"vllm-new": {"sides": sides}, "sglang-new": {"sides": sides}}},
        versions={"commit": "0123abc"},
    )


def test_the_chart_of_engines_has_a_line_for_each_side() -> None:
    drawn = charts.engines(engines_result("2026-01-02"))
    text = re.findall(r"<text[^>]*>([^<]*)</text>", drawn)
    assert [each for each in text if each in charts.SIDES.values()] == [*charts.SIDES.values()]
    assert {"8", "32", "callers", "requests/s", "vLLM, new images"} <= set(text)
    assert "vLLM, 80 % repeated" not in text, "it was not measured"


def test_the_chart_of_engines_is_of_the_newest_result() -> None:
    picture = ROOT / "docs/img/engines.svg"
    measured = [each for each in results.stored() if each.benchmark == "engines"]
    assert picture.exists() == bool(measured)
    if measured:
        assert charts.source(measured[-1]) in picture.read_text(), "make pictures"


def test_a_benchmark_without_a_result_says_how_to_get_one(tmp_path: Path) -> None:
    with pytest.raises(LookupError, match="make bench ONLY=eviction"):
        results.newest("eviction", tmp_path)
