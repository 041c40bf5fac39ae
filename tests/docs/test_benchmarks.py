"""The pages show the stored results: `python -m docs.benchmarks` writes them, and `make check` compares."""

import re
from dataclasses import replace
from pathlib import Path

import pytest

from bench.engines import RATIOS
from bench.harness.benchmark import BENCHMARKS_PAGE, Benchmark, Figure, benchmark, benchmarks
from bench.harness.results import DIRTY, ROOT, Result, stored
from docs import benchmarks as program
from docs.benchmarks import (
    PAGES,
    SUMMARY_ROWS,
    caption,
    differing,
    gain,
    looked_up,
    machines,
    main,
    section,
    summary,
    value,
    written,
)
from docs.parts import first_line

GOOD = Result(
    *("store", "a machine", "ok", "python -m bench.store --json", "2026-01-02"),
    figures={"hit_ms": 1.25, "inner": {"gbps": 2.0}},
    versions={"commit": "0123abc"},
)
STORE = Benchmark(
    "store",
    "What does a hit cost?",
    (
        Figure("hit_ms", "a hit", "ms", "<= 2", summary="a quoted hit"),
        Figure("inner.gbps", "a copy", "GB/s"),
    ),
)

HEAD = ["## What does a hit cost?", "", first_line(ROOT / "bench/store.py"), ""]


def test_the_pages_match_the_results() -> None:
    assert [page.name for page in differing()] == [], "run `python -m docs.benchmarks`"


def test_check_fails_for_a_page_that_differs_and_writing_mends_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    pages = tuple(tmp_path / page.name for page in PAGES)
    for page, copy in zip(PAGES, pages, strict=True):
        copy.write_text(page.read_text().replace("≥ 1.6", "≥ 1.5"))
    monkeypatch.setattr(program, "PAGES", pages)
    assert main(["--check"]) == 1
    assert "README.md differs from bench/results/: python -m docs.benchmarks" in capsys.readouterr().err
    assert main([]) == 0
    assert [copy.read_text() for copy in pages] == [page.read_text() for page in PAGES]
    assert main(["--check"]) == 0


def test_a_question_has_one_table_with_a_column_for_each_machine() -> None:
    dirty = replace(
        GOOD,
        hardware="another, AMX",
        status="timed out",
        figures={"hit_ms": 2.5, "left_out": ["case 720p"]},
        load=0.7,
        versions={"commit": f"0123abd{DIRTY}"},
    )
    assert section(STORE, [GOOD, dirty]).splitlines() == [
        *HEAD,
        "|  | a machine | another | target |",
        "|---|---|---|---|",
        "| a hit | 1.25 ms | 2.50 ms, **missed** | ≤ 2 |",
        "| a copy | 2 GB/s | – |  |",
        "",
        f"`python -m bench.store`: {caption(STORE, GOOD)}; {caption(STORE, dirty)}.",
    ]
    assert caption(STORE, GOOD) == "2026-01-02, commit 0123abc"
    assert caption(STORE, dirty) == (
        "2026-01-02, commit 0123abd and changes, timed out, load 0.7 a core, no time for case 720p"
    )
    assert section(STORE, []).splitlines() == [*HEAD, "Not measured yet."]


def test_a_benchmark_without_figures_shows_its_first_table() -> None:
    tables = [{"title": name, "heads": ["a"], "rows": [[name]]} for name in ("1", "2")]
    shown = section(replace(STORE, figures=()), [replace(GOOD, figures={"tables": tables})])
    assert "| a |\n|---|\n| 1 |\n\n`python -m bench.store`" in shown


def test_pages_change_only_between_markers() -> None:
    page = "before\n<!-- bench:store -->\nold\n<!-- /bench -->\nafter\n"
    assert written(page, [STORE], [GOOD, replace(GOOD, benchmark="fleet")]) == (
        f"before\n<!-- bench:store -->\n{section(STORE, [GOOD])}\n<!-- /bench -->\nafter\n"
    )


@pytest.mark.parametrize(
    ("target", "shown"),
    [
        ("<= 2", "1.25 ms"),
        ("<= 1", "1.25 ms, **missed**"),
        (">= 1.5", "1.25 ms, **missed**"),
        ("", "1.25 ms"),
    ],
)
def test_a_missed_target_is_shown_as_missed(target: str, shown: str) -> None:
    assert value(Figure("a.b", "says", "ms", target), {"a": {"b": 1.25}}) == shown


def test_a_missing_figure_is_a_dash() -> None:
    for figures in ({}, {"a": "text"}, {"a": float("nan")}, {"a": {"b": 1}}):
        assert value(Figure("a", "says"), figures) == "–"


def test_the_summary_has_the_newest_figures_and_at_most_seven() -> None:
    newer = replace(GOOD, hardware="another, AMX", measured_at="2026-01-03", figures={"hit_ms": 2.5})
    *_, row = summary([STORE], [newer, GOOD]).splitlines()
    assert row == (
        "| a quoted hit | 2.50 ms, **missed** | ≤ 2 | another, AMX; 2026-01-03, commit 0123abc; "
        "`python -m bench.store` |"
    )
    assert summary([STORE], []) == "Not measured yet."
    with pytest.raises(ValueError, match=r"README\.md quotes at most 7"):
        summary([replace(STORE, figures=STORE.figures * (SUMMARY_ROWS + 1))], [GOOD])


def test_a_figure_of_one_part_is_as_old_as_the_part() -> None:
    parts = {
        "first": {"measured_at": "2026-01-01T23:00:00+00:00", "commit": f"0123ab0{DIRTY}"},
        "last": {"measured_at": "2026-01-02T01:00:00+00:00", "commit": "0123abc"},
    }
    of_one = Figure("hit_ms", "a hit", "ms", summary="of one part", part="first")
    of_all = replace(of_one, summary="of all parts", part="")
    in_parts = replace(STORE, figures=(of_one, of_all), parts="parts")
    measured = replace(GOOD, figures={"hit_ms": 1.25, "parts": parts})
    ended_first = replace(measured, hardware="another", measured_at="2026-01-01", figures={"hit_ms": 2.5})
    rows = summary([in_parts], [measured, ended_first]).splitlines()[2:]
    first, last = "2026-01-01, commit 0123ab0 and changes", "2026-01-02, commit 0123abc"
    assert rows == [
        f"| of one part | 1.25 ms |  | a machine; {first}; `python -m bench.store` |",
        f"| of all parts | 1.25 ms |  | a machine; {first} to {last}; `python -m bench.store` |",
    ]
    assert caption(in_parts, measured) == f"{first} to {last}"


def test_a_quoted_figure_of_engines_names_its_cell() -> None:
    cells = {figure.key: figure.part for figure in benchmark("engines").figures if figure.summary}
    assert cells == {key: RATIOS[key].cell for key in cells}


def test_results_with_times_of_their_own_are_declared_as_parts() -> None:
    with_parts = {each.name for each in benchmarks() if each.parts}
    measured_apart = {
        result.benchmark
        for result in stored()
        for part in result.figures.values()
        if isinstance(part, dict)
        and any(isinstance(each, dict) and "measured_at" in each for each in part.values())
    }
    assert measured_apart <= with_parts


def test_every_benchmark_has_its_table_on_the_page() -> None:
    page = BENCHMARKS_PAGE.read_text()
    assert sorted(re.findall(r"<!-- bench:(\w+) -->", page)) == sorted(
        ["machines", *(each.name for each in benchmarks() if each.figures or not each.in_steps)]
    )
    assert re.findall(r"<!-- bench:(\w+) -->", (ROOT / "docs/gain.md").read_text()) == ["gain"]
    assert gain([]) == "Not measured yet."


def load(requests_per_s: float, p99_ms: float) -> dict[str, object]:
    return {"loads": {"c32": {"requests_per_s": requests_per_s, "ttft_p99_ms": p99_ms}}}


def test_the_cells_where_the_engine_alone_is_better_come_first() -> None:
    better = {"sides": {"own": load(2.0, 400.0), "ours": load(5.0, 100.0), "encoder": load(1.0, 900.0)}}
    worse = {"sides": {"own": load(4.0, 100.0), "ours": load(3.0, 200.0)}}
    alone = {"sides": {"own": load(4.0, 100.0)}}
    made = {"measured_at": "2026-01-02T03:04:05+00:00", "commit": f"0123abc{DIRTY}"}
    cells = {name: {**cell, **made} for name, cell in {"a": better, "b": worse, "c": alone}.items()}
    older = replace(GOOD, benchmark="engines", measured_at="2025-01-01", figures={"cells": {}})
    newest = replace(older, measured_at="2026-01-02", figures={"cells": cells})
    elsewhere = replace(older, hardware="another, AMX", figures={"cells": {"d": {**better, **made}}})
    rows = [line for line in gain([newest, elsewhere, older, GOOD]).splitlines() if line.startswith("|")][2:]
    assert rows == [
        "| b | c32 | 4.00/s | – | 3.00/s | 0.75 | 0.50 | a machine; 2026-01-02, 0123abc |",
        "| a | c32 | 2.00/s | 1.00/s | 5.00/s | 2.50 | 4.00 | a machine; 2026-01-02, 0123abc |",
        "| d | c32 | 2.00/s | 1.00/s | 5.00/s | 2.50 | 4.00 | another; 2026-01-02, 0123abc |",
    ]


def test_every_stored_result_has_figures_of_its_benchmark() -> None:
    """A result whose figures were all renamed would silently show only dashes."""
    declared = {each.name: each for each in benchmarks()}
    for result in stored():
        figures = declared[result.benchmark].figures
        assert not figures or any(looked_up(figure.key, result.figures) is not None for figure in figures)


def test_machines_are_named_once_and_two_of_one_name_are_refused() -> None:
    other = replace(GOOD, hardware="another, AMX")
    assert machines([GOOD, other, other]) == "Machines: a machine; another, AMX."
    with pytest.raises(ValueError, match="two kinds of machines have one name"):
        machines([other, replace(GOOD, hardware="another, AVX")])
