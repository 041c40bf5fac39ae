"""`make bench` survives failing benchmarks, stores results, and rewrites the pages from them."""

import json
import shutil
import subprocess
from dataclasses import replace
from pathlib import Path

import pytest

import bench.__main__
from bench.__main__ import LIMIT_S, WORTH_STARTING_S, _run, main, to_measure_again
from bench.hardened import BENCHMARK as HARDENED
from bench.harness import results
from bench.harness.benchmark import Figure, benchmarks, markdown
from bench.harness.report import PAGES, caption, looked_up, rewrite, row_of, summary, table_of
from bench.harness.results import NOT_RUN, ROOT, Result, keep, newest, of_unknown_commits, path_of
from bench.harness.runner import END_S, run
from bench.sizing import BENCHMARK as SIZING
from testing.attacks import ATTACKS

pytestmark = pytest.mark.process

BROKEN = replace(SIZING, arguments=("--no-such-flag",))
GOOD = Result("store", "a machine", "ok", "python -m bench.store", "2026-01-02", figures={"hit_shm_ms": 1.25})


def test_a_benchmark_that_fails_or_times_out_has_a_result() -> None:
    failed = run(BROKEN, "a machine", quick=False, limit_s=110)
    assert failed.status == "failed with exit code 2"
    assert "unrecognized arguments: --no-such-flag" in failed.error
    assert "failed with exit code 2" in table_of(BROKEN, failed)
    late = run(SIZING, "a machine", quick=False, limit_s=0.1)
    assert late.status.startswith("timed out after")


def test_a_result_has_figures_versions_and_command() -> None:
    result = run(SIZING, "a machine", quick=False, limit_s=110)
    assert result.status == "ok", result.error
    assert result.command == "python -m bench.sizing --json"
    assert result.versions.keys() >= {"torch", "python", "commit"}
    assert all(looked_up(figure.key, result.figures) is not None for figure in SIZING.figures)


def test_a_run_takes_under_twenty_minutes_and_no_benchmark_over_ten() -> None:
    """A benchmark that hangs ends at its limit; benchmarks that do not fit into the run are left out."""
    assert LIMIT_S + END_S < 20 * 60
    assert _run(SIZING, "a machine", quick=False, left_s=WORTH_STARTING_S - 1).status == NOT_RUN
    assert max(result.seconds for result in newest()) < 10 * 60


@pytest.fixture
def repository(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A repository with one commit, which the harness uses as ours."""
    git(tmp_path, "init", "--quiet")
    for name in ("page.md", "code.py", "bench/results/one.json"):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text("a\n")
    git(tmp_path, "add", ".")
    git(tmp_path, "-c", "user.name=a", "-c", "user.email=a@b", "commit", "--quiet", "--message", "a")
    monkeypatch.setattr(results, "ROOT", tmp_path)
    return tmp_path


def git(folder: Path, *arguments: str) -> str:
    program = shutil.which("git")
    if program is None:
        pytest.skip("git is not installed")
    done = subprocess.run([program, *arguments], cwd=folder, capture_output=True, text=True, check=True)
    return done.stdout.strip()


def test_uncommitted_code_is_measured_only_with_dirty_or_quick(
    repository: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    measured: list[bool] = []

    def measure(_: object, quick: bool) -> list[Result]:
        measured.append(quick)
        return []

    monkeypatch.setattr(bench.__main__, "measure", measure)
    assert main(["--only", "sizing"]) == 0
    (repository / "page.md").write_text("b\n")  # a run writes pages itself
    (repository / "bench/results/one.json").write_text("b\n")
    assert main(["--only", "sizing"]) == 0
    (repository / "code.py").write_text("b\n")
    assert main(["--only", "sizing"]) == 2
    assert "code.py not committed" in (said := capsys.readouterr().err)
    assert "--dirty" in said
    assert main(["--only", "sizing", "--dirty"]) == main(["--only", "sizing", "--quick"]) == 0
    assert measured == [False, False, False, True]


def test_a_result_names_its_commit_and_uncommitted_changes(repository: Path) -> None:
    commit = git(repository, "rev-parse", "--short", "HEAD")
    clean = replace(GOOD, versions=results.versions())
    assert caption(clean).startswith(f"**a machine** · 2026-01-02, commit {commit} · `python")
    (repository / "new.py").touch()
    dirty = replace(GOOD, versions=results.versions())
    assert f"2026-01-02, commit {commit} with uncommitted changes · `python" in caption(dirty)
    assert caption(GOOD).startswith("**a machine** · 2026-01-02 · `python")


def test_results_of_commits_outside_the_history_are_listed(repository: Path) -> None:
    commit = git(repository, "rev-parse", "--short", "HEAD")
    known, lost, unsaid = (
        replace(GOOD, benchmark=name, versions={"commit": name} if name else {})
        for name in (f"{commit}-dirty", "0123abc-dirty", "")
    )
    assert of_unknown_commits([known, lost, unsaid]) == [lost]
    assert "on a machine (2026-01-02): 0123abc-dirty\n" in to_measure_again([lost])
    assert to_measure_again([]) == ""


def test_a_day_has_one_file_and_the_newest_result_of_each_benchmark_counts(tmp_path: Path) -> None:
    path = path_of("A (machine), 2 cores", quick=False, folder=tmp_path)
    assert path.name.endswith("-a-machine-2-cores.json")
    (tmp_path / "2020-01-01-a-machine.json").write_text(
        json.dumps(
            {
                "hardware": "a machine",
                "benchmarks": {"store": {"status": "ok", "command": "", "measured_on": ""}},
            }
        )
    )
    keep(path, GOOD)
    keep(path, replace(GOOD, benchmark="fleet"))
    keep(path, replace(GOOD, status=NOT_RUN, figures={}))
    keep(path_of("a machine", quick=True, folder=tmp_path), replace(GOOD, benchmark="overlap"))
    assert {result.benchmark: result.figures for result in newest(tmp_path)} == {
        "store": GOOD.figures,
        "fleet": GOOD.figures,
    }


def test_every_module_declares_a_benchmark_under_its_own_name() -> None:
    modules = {path.stem for path in (ROOT / "bench").glob("*.py")} - {"__init__", "__main__"}
    assert {each.name for each in benchmarks()} == modules


@pytest.mark.parametrize(
    ("target", "shown"),
    [("<= 2", "≤ 2"), ("<= 1", "≤ 1, **missed**"), (">= 1.5", "≥ 1.5, **missed**"), ("", "")],
)
def test_a_missed_target_is_shown_as_missed(target: str, shown: str) -> None:
    assert row_of(Figure("a.b", "says", "ms", target), {"a": {"b": 1.25}}) == ("says", "1.25 ms", shown, "")


def test_a_missing_figure_is_shown_as_not_reported() -> None:
    for figures in ({}, {"a": "text"}, {"a": float("nan")}, {"a": {"b": 1}}):
        assert row_of(Figure("a", "says"), figures)[1] == "not reported"


def test_pages_change_only_between_markers(tmp_path: Path) -> None:
    page = tmp_path / "page.md"
    page.write_text(
        "before\n<!-- bench:store -->\nold\n<!-- /bench -->\nafter\n<!-- bench:summary -->\n<!-- /bench -->\n"
    )
    assert rewrite([GOOD], [page]) == [page]
    text = page.read_text()
    assert text.startswith(
        "before\n<!-- bench:store -->\n**a machine** · 2026-01-02 · `python -m bench.store`"
    )
    assert "1.25 ms" in text
    assert "old" not in text
    assert summary([GOOD]) in text
    assert rewrite([GOOD], [page]) == [], "the same results change nothing"


def test_a_page_shows_the_tables_that_a_benchmark_printed(tmp_path: Path) -> None:
    page = tmp_path / "page.md"
    page.write_text("<!-- bench:store.tables -->\nold\n<!-- /bench -->\n")
    tables = [{"title": title, "heads": ["a"], "rows": [["1"]]} for title in ("First", "Second")]
    assert rewrite([replace(GOOD, figures={"tables": tables})], [page]) == [page]
    text = page.read_text()
    assert text.startswith("<!-- bench:store.tables -->\n**a machine** · 2026-01-02")
    assert "First:\n\n| a |\n|---|\n| 1 |\n\nSecond:\n\n| a |" in text
    assert "old" not in text


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_the_pages_match_the_results(page: Path, tmp_path: Path) -> None:
    copy = Path(shutil.copy(page, tmp_path))
    assert rewrite(newest(), [copy]) == [], "run `python -m bench --pages-only`"


def test_every_attack_has_its_figures() -> None:
    shown = {figure.key for figure in HARDENED.figures}
    assert {f"{what}_{name}" for name in ATTACKS for what in ("p99_ratio", "failed")} <= shown


def test_the_summary_has_the_newest_figures_and_marks_missed_targets() -> None:
    newer = replace(GOOD, hardware="another, AMX", measured_on="2026-01-03", figures={"hit_shm_ms": 2.5})
    failed = replace(GOOD, measured_on="2026-01-04", status="failed")
    head, _, *rows = summary([newer, GOOD, failed]).splitlines()
    assert head == "|  | measured | target | where and when | command |"
    assert [row.split(" | ")[1:] for row in rows] == [
        ["2.50 ms, **missed**", "≤ 2", "another, AMX; 2026-01-03", "`python -m bench.store` |"]
    ]
    assert summary([failed]) == "Not measured yet."


def test_skipped_measurements_are_listed_above_the_table() -> None:
    assert "left out, no time: case 720p" in caption(replace(GOOD, figures={"left_out": ["case 720p"]}))


def test_markdown_tables_have_a_head() -> None:
    assert markdown(("a", "b"), [("1", "2")]) == "| a | b |\n|---|---|\n| 1 | 2 |"
