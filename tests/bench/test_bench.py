"""`make bench` survives failing benchmarks, and stores the newest result of each benchmark and machine."""

import shutil
import subprocess
from dataclasses import replace
from pathlib import Path

import pytest

import bench.__main__
from bench.__main__ import LIMIT_S, WORTH_STARTING_S, _limit_s, main, measure
from bench.harness import results, runner
from bench.harness.benchmark import DEVICES, Benchmark, benchmark, markdown, names
from bench.harness.results import ROOT, Result, store, stored
from bench.harness.runner import END_S, run
from bench.sizing import BENCHMARK as SIZING
from docs.benchmarks import looked_up
from tests.waiting import PATIENCE_S

pytestmark = pytest.mark.process

GOOD = Result("store", "a machine", "ok", "python -m bench.store", "2026-01-02", figures={"hit_shm_ms": 1.25})


def stand_in(how: str, *, in_steps: bool = False) -> Benchmark:
    """Return a benchmark that "ends", "fails" or "waits"."""
    asks, program = "What does it measure?", "tests.bench.stand_in"
    return Benchmark(how, asks, limit_s=PATIENCE_S, program=program, in_steps=in_steps)


def test_a_benchmark_that_fails_or_times_out_has_a_result() -> None:
    failed = run(stand_in("fails"), "a machine", dry_run=False, limit_s=PATIENCE_S)
    assert (failed.status, failed.error) == ("failed with exit code 1", "1 failed: two: no kernel")
    late = run(stand_in("waits"), "a machine", dry_run=False, limit_s=0.1)
    assert late.status == "timed out"


def test_a_result_has_figures_versions_and_command() -> None:
    result = run(SIZING, "a machine", dry_run=False, limit_s=PATIENCE_S)
    assert result.status == "ok", result.error
    assert result.command == "python -m bench.sizing --json"
    assert result.versions.keys() >= {"torch", "python", "commit"}
    assert all(looked_up(figure.key, result.figures) is not None for figure in SIZING.figures)


def test_a_run_takes_under_twenty_minutes_and_no_benchmark_over_ten() -> None:
    """A benchmark that hangs ends at its limit; benchmarks that do not fit into the run are left out."""
    assert LIMIT_S + END_S < 20 * 60
    assert _limit_s([SIZING], LIMIT_S - 30, None) == 30
    assert not _limit_s([SIZING], LIMIT_S - WORTH_STARTING_S + 1, None)
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


def test_uncommitted_code_is_measured_only_with_dirty_or_in_a_dry_run(
    repository: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    measured: list[bool] = []

    def measure(_: object, dry_run: bool, **__: object) -> list[Result]:
        measured.append(dry_run)
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
    assert main(["--only", "sizing", "--dirty"]) == main(["--only", "sizing", "--dry-run"]) == 0
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


def test_a_run_stores_what_succeeded_and_no_dry_run(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    measure([stand_in("ends")], dry_run=True, folder=tmp_path)
    assert stored(tmp_path) == []
    measure([stand_in("fails"), stand_in("ends")], dry_run=False, folder=tmp_path)
    [result] = stored(tmp_path)
    assert result.benchmark == "ends"
    printed = capsys.readouterr().out
    assert "failed with exit code 1: 1 failed: two: no kernel" in printed
    assert f"{result.hardware}; {result.measured_at}, commit {result.versions['commit']}\n" in printed


def test_a_benchmark_in_steps_that_fails_stores_what_it_measured(tmp_path: Path) -> None:
    measure([stand_in("fails", in_steps=True)], dry_run=False, folder=tmp_path)
    [result] = stored(tmp_path)
    assert (result.status, result.error) == ("failed with exit code 1", "1 failed: two: no kernel")
    assert result.figures == {"one": {"ms": 1.5}}, "a truncated line is no figure"


class KilledError(Exception):
    """The end of the process that runs benchmarks."""


@pytest.mark.cuda
def test_a_call_that_is_killed_has_stored_what_was_measured(tmp_path: Path) -> None:
    def store_until_killed(result: Result) -> None:
        store(result, tmp_path)
        if result.figures:
            raise KilledError

    with pytest.raises(KilledError):
        run(
            stand_in("waits", in_steps=True),
            "a machine",
            dry_run=False,
            limit_s=PATIENCE_S,
            logs=tmp_path,
            so_far=store_until_killed,
        )
    [result] = stored(tmp_path)
    assert (result.status, result.figures) == ("stopped", {"one": {"ms": 1.5}})


def test_a_slow_benchmark_shows_what_it_printed_last(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(runner, "PROGRESS_S", 0.0)
    looks = iter((False, True))

    def stop_later(_: Result) -> None:
        if next(looks):
            raise KilledError

    waits = stand_in("waits", in_steps=True)
    with pytest.raises(KilledError):
        run(waits, "a machine", dry_run=False, limit_s=PATIENCE_S, logs=tmp_path, so_far=stop_later)
    assert ' s: {"' in capsys.readouterr().out


def test_a_benchmark_in_steps_is_stopped_some_time_after_its_budget(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(runner, "LATE_S", 0.1)
    late = run(stand_in("waits", in_steps=True), "a machine", dry_run=False, limit_s=0.1, logs=tmp_path)
    assert late.status == "timed out"
    assert " --budget-s 0.1 " in late.command


def test_a_budget_is_shared_in_proportion_to_limits() -> None:
    small, large = replace(SIZING, limit_s=10), replace(SIZING, limit_s=30)
    assert _limit_s([small, large], 0, 100) == 25
    assert _limit_s([large], 5, 100) == 95, "what the first one left"
    assert not _limit_s([large], 100, 100)


def test_a_wrong_name_is_answered_with_the_right_ones(capsys: pytest.CaptureFixture[str]) -> None:
    for device in DEVICES:
        with pytest.raises(SystemExit):
            main(["--device", device, "--only", "no-such"])
        assert (
            f"no benchmark of {device}: no-such; there are {', '.join(names(device))}"
            in capsys.readouterr().err
        )


def test_every_module_declares_a_benchmark_under_its_own_name() -> None:
    modules = {path.stem for path in (ROOT / "bench").glob("*.py")} - {"__init__", "__main__", "gpu"}
    assert {benchmark(name).name for name in names("cpu")} == modules
    parts = {path.stem for path in (ROOT / "bench/gpu_parts").glob("*.py")} - {
        "__init__",
        "probe",
        "predicted",
    }
    assert {*names("cuda")} == parts
    assert not modules & parts, "results are named after benchmarks"


def test_markdown_tables_have_a_head() -> None:
    assert markdown(("a", "b"), [("1", "2")]) == "| a | b |\n|---|---|\n| 1 | 2 |"
