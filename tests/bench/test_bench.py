"""`make bench` survives failing benchmarks, and stores the newest result of each benchmark and machine."""

import shutil
import subprocess
from dataclasses import replace
from pathlib import Path

import pytest

import bench.__main__
from bench.__main__ import LIMIT_S, WORTH_STARTING_S, _run, main, measure
from bench.hardened import BENCHMARK as HARDENED
from bench.harness import results
from bench.harness.benchmark import benchmarks, markdown
from bench.harness.results import NOT_RUN, ROOT, Result, store, stored
from bench.harness.runner import END_S, run
from bench.sizing import BENCHMARK as SIZING
from docs.benchmarks import looked_up
from testing.attacks import ATTACKS
from tests.waiting import PATIENCE_S

pytestmark = pytest.mark.process

PATIENT = replace(SIZING, limit_s=PATIENCE_S)
BROKEN = replace(PATIENT, arguments=("--no-such-flag",))
GOOD = Result("store", "a machine", "ok", "python -m bench.store", "2026-01-02", figures={"hit_shm_ms": 1.25})


def test_a_benchmark_that_fails_or_times_out_has_a_result() -> None:
    failed = run(BROKEN, "a machine", quick=False, limit_s=PATIENCE_S)
    assert failed.status == "failed with exit code 2"
    assert "unrecognized arguments: --no-such-flag" in failed.error
    late = run(SIZING, "a machine", quick=False, limit_s=0.1)
    assert late.status.startswith("timed out after")


def test_a_result_has_figures_versions_and_command() -> None:
    result = run(SIZING, "a machine", quick=False, limit_s=PATIENCE_S)
    assert result.status == "ok", result.error
    assert result.command == "python -m bench.sizing --json"
    assert result.versions.keys() >= {"torch", "python", "commit"}
    assert all(looked_up(figure.key, result.figures) is not None for figure in SIZING.figures)


def test_a_run_takes_under_twenty_minutes_and_no_benchmark_over_ten() -> None:
    """A benchmark that hangs ends at its limit; benchmarks that do not fit into the run are left out."""
    assert LIMIT_S + END_S < 20 * 60
    assert _run(SIZING, "a machine", quick=False, left_s=WORTH_STARTING_S - 1).status == NOT_RUN
    assert max(result.seconds for result in stored()) < 10 * 60


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


def test_uncommitted_code_is_measured_atly_with_dirty_or_quick(
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
    assert results.versions()["commit"] == commit
    (repository / "new.py").touch()
    assert results.versions()["commit"] == f"{commit}-dirty"


def test_a_result_replaces_the_older_one_of_its_benchmark_and_machine(tmp_path: Path) -> None:
    path = store(replace(GOOD, hardware="A (machine), 2 cores"), tmp_path)
    assert path.name == "store.a-machine-2-cores.json"
    newer = replace(GOOD, hardware="A (machine), 2 cores", measured_at="2026-01-03")
    assert store(newer, tmp_path) == path
    other = replace(GOOD, benchmark="fleet")
    store(other, tmp_path)
    assert stored(tmp_path) == [other, newer], "the oldest first"


def test_a_run_stores_what_succeeded_and_no_quick_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(bench.__main__, "store", lambda result: ROOT / store(result, tmp_path).name)
    measure([SIZING], quick=True)
    assert stored(tmp_path) == []
    measure([BROKEN, PATIENT], quick=False)
    assert [result.benchmark for result in stored(tmp_path)] == ["sizing"]
    assert "failed with exit code 2" in capsys.readouterr().out


def test_every_module_declares_a_benchmark_under_its_own_name() -> None:
    modules = {path.stem for path in (ROOT / "bench").glob("*.py")} - {"__init__", "__main__"}
    assert {each.name for each in benchmarks()} == modules


def test_every_attack_has_its_figures() -> None:
    shown = {figure.key for figure in HARDENED.figures}
    each = ("p99_ratio", "p99_over_neighbour", "loop_ms", "failed")
    assert {f"{what}_{name}" for name in ATTACKS for what in each} <= shown


def test_markdown_tables_have_a_head() -> None:
    assert markdown(("a", "b"), [("1", "2")]) == "| a | b |\n|---|---|\n| 1 | 2 |"
