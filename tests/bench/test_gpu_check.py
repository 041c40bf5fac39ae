"""The GPU check without a GPU: every part runs, imports only what it measures, and reports what failed."""

import json
import math
import subprocess
import sys
from functools import partial
from pathlib import Path

import pytest

from bench import gpu_check as gpu
from bench.gpu_parts.probe import Probe
from bench.harness.results import ROOT, store

pytestmark = pytest.mark.slow

# Modules that a machine with torch may lack, and which of them each part needs for its measurements.
OPTIONAL = {
    "transformers",
    "tokenizers",
    "safetensors",
    "blake3",
    "xxhash",
    "cachetools",
    "grpc",
    "grpc_health",
    "google",
    "grpc_reflection",
    "redis",
    "prometheus_client",
    "PIL",
    "nvidia",
    "rich",
    "pytest",
    "psutil",
    "fastapi",
}
TOWER = {"safetensors", "blake3", "cachetools", "google"}
CHECKPOINT = {"transformers", "tokenizers", "PIL", "psutil"}  # to write a tiny one
SERVER = TOWER | CHECKPOINT | {"xxhash", "grpc", "grpc_health", "prometheus_client"}
NEEDED: dict[str, set[str]] = {
    "attention": TOWER,
    "tower": TOWER | CHECKPOINT,
    "decode": {"PIL", "cachetools"},
    "server": SERVER,
    "load": SERVER,
    "edge": SERVER,
    "group": TOWER | CHECKPOINT,
}
# A process that has torch forks a child for each set of missing modules; the child hides them and imports the parts.
IMPORTS = """
import importlib, json, os, sys, traceback
import torch

class Without:
    def __init__(self, finder, missing):
        self._finder, self._missing = finder, missing

    def __getattr__(self, name):
        return getattr(self._finder, name)

    def find_spec(self, name, *where):
        return None if name.partition(".")[0] in self._missing else self._finder.find_spec(name, *where)

for parts, missing in json.loads(sys.argv[1]):
    if not (child := os.fork()):
        sys.meta_path = [Without(finder, missing) for finder in sys.meta_path]
        for part in parts:
            try:
                import bench.gpu_check
                importlib.import_module(f"bench.gpu_parts.{part}")
            except BaseException as error:
                print(part, repr(error), traceback.format_exc(), file=sys.stderr, flush=True)
                os._exit(1)
            print(part, flush=True)
        os._exit(0)
    os.waitpid(child, 0)
"""


def found(part: str, **values: object) -> dict[str, object]:
    return {"part": part, **values}


def probe(folder: Path, budget_s: float = math.inf) -> Probe:
    return Probe("env", folder, folder, budget_s=budget_s, dry=True)


@pytest.mark.timeout(900)
def test_a_dry_run_runs_every_part_and_ends_with_a_short_summary(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "bench.gpu_check", "--dry-run", "--out", tmp_path]
    ran = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=890, check=False)
    lines = gpu.read(tmp_path / "gpu.jsonl")
    assert ran.returncode == 0, [line for line in lines if "failed" in line] or ran.stderr[-3000:]
    assert {line["part"] for line in lines} == set(gpu.PARTS)
    for part in gpu.PARTS:
        rows = [line for line in lines if line["part"] == part]
        assert len(rows) > 1, f"{part} measured nothing"
        assert not any("skipped" in row for row in rows), part
        assert "seconds" in rows[-1]
    assert any(line.get("from") == "device tier" and line["passed"] for line in lines)
    for part, names in {
        "driver": {"launch_us"},
        "load": {"vit_ms", "service_over_bare_tower", "reserved_mib", "allocated_mib"},
        "group": {"group_ms"},
        "edge": {"new_ms", "lag_p99_ms", "upload_far_s"},
    }.items():
        assert any(names <= set(line) for line in lines if line["part"] == part), part
    summary = (tmp_path / "summary.txt").read_text()
    assert len(summary) <= gpu.MAX_SUMMARY
    assert ran.stdout.endswith(f"{summary}\n")
    assert gpu.main(["--keep", str(tmp_path / "gpu.jsonl")]) == 2, "figures of a dry run mean nothing"


def test_the_first_calls_on_a_gpu_fit_a_quarter_of_an_hour(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of 900 s, starts and transfers take two minutes, and a part may end late."""
    ran: list[str] = []
    monkeypatch.setattr(gpu, "_run_part", lambda part, *_: ran.append(part))
    monkeypatch.setattr(gpu, "_failures", lambda _: "")
    assert gpu.main(["--dry-run", "--first"]) == 0
    assert set(ran) == set(gpu.PARTS) - {"edge", "sanitize"}
    assert sum(seconds for _, seconds in gpu.FIRST) <= 600
    ran.clear()
    assert gpu.main(["--dry-run", "--first", "3"]) == 0
    assert ran == ["load", "decode", "server"]


@pytest.mark.timeout(600)
def test_parts_import_without_the_modules_that_they_do_not_need() -> None:
    # Parts that need the same modules share a process: importing transformers takes seconds.
    by_missing: dict[tuple[str, ...], list[str]] = {}
    for part in gpu.PARTS:
        by_missing.setdefault(tuple(sorted(OPTIONAL - NEEDED.get(part, set()))), []).append(part)
    sets = [(parts, missing) for missing, parts in by_missing.items()]
    command = [sys.executable, "-c", IMPORTS, json.dumps(sets)]
    ran = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert sorted(ran.stdout.split()) == sorted(gpu.PARTS), ran.stderr[-3000:]


def test_each_measurement_and_each_failure_is_one_line(tmp_path: Path) -> None:
    def refuse() -> dict[str, float]:
        raise RuntimeError("no kernel")

    part = probe(tmp_path)
    assert part.attempt({"case": "a"}, lambda: {"ms": 1.0})
    assert not part.attempt({"case": "b"}, refuse)
    late = probe(tmp_path, budget_s=0)
    assert not late.attempt({"case": "c"}, lambda: {"ms": 1.0})
    assert gpu.read(tmp_path / "gpu.jsonl") == [
        found("env", case="a", ms=1.0),
        found("env", case="b", failed="RuntimeError: no kernel"),
        found("env", case="c", skipped="budget"),
    ]


def test_the_summary_is_bounded_and_lists_failures_first(tmp_path: Path) -> None:
    lines = [found(part, case=str(n), ms=float(n)) for part in gpu.PARTS for n in range(500)]
    lines.append(found("sanitize", tool="memcheck", failed="exit code 9"))
    lines.append(found("tests", test="tests/test_a.py::test_b", outcome="failed"))
    said = gpu.summary(lines)
    assert len(said) <= gpu.MAX_SUMMARY
    assert all(f"== {part}" in said for part in gpu.PARTS)
    first = said.splitlines()[:3]
    assert first[0].startswith(f"{len(lines)} measurements, 2 failed")
    assert "exit code 9" in first[1]
    assert "test_b" in first[2]


def test_a_truncated_last_line_counts_as_a_failure(tmp_path: Path) -> None:
    (tmp_path / "gpu.jsonl").write_text('{"part": "env", "ms": 1}\n{"part": "tow')
    whole, half = gpu.read(tmp_path / "gpu.jsonl")
    assert whole == found("env", ms=1)
    assert "half a line" in half["failed"]


def test_the_page_shows_our_fastest_tower_beside_transformers() -> None:
    lines = [
        found("products", product="square 8192", how="plain", ms=1.0, tflops=700.0),
        found("tower", attention="sdpa", graphs=False, case="720p", ms=9.0, tflops=300.0),
        found("tower", attention="flash3", graphs=True, case="720p", ms=8.0, tflops=350.0),
        found("tower", attention="transformers", case="720p", ms=16.0, host_ms=1.0),
    ]
    assert gpu.fastest_table(lines)["rows"] == [("720p", "8.00", "flash3, graphs", "50%", "16.00", "2.00")]


def test_kept_results_are_stored_under_the_name_of_their_machine(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(gpu, "store", partial(store, folder=tmp_path))
    file = tmp_path / "gpu.jsonl"
    about = found("env", hardware="a GPU", versions={"torch": "2.11"}, dry=False)
    file.write_text("\n".join(json.dumps(line) for line in (about, found("tower", seconds=2.5))))
    assert gpu.main(["--keep", str(file)]) == 0
    kept = json.loads((tmp_path / "gpu_check.a-gpu.json").read_text())
    assert kept["seconds"] == 2.5
    assert kept["versions"] == {"torch": "2.11"}
    assert "gpu_check.a-gpu.json" in capsys.readouterr().out


def test_keep_joins_runs_of_one_machine_and_refuses_several_machines(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(gpu, "store", partial(store, folder=tmp_path))
    about = {"versions": {"torch": "2.11"}, "dry": False}
    runs = {
        "one": [found("env", hardware="a GPU", **about), found("tower", case="720p", seconds=2.5)],
        "two": [found("decode", case="720p", seconds=1.5)],
        "elsewhere": [found("env", hardware="another GPU", **about)],
    }
    files = {name: tmp_path / f"{name}.jsonl" for name in runs}
    for name, lines in runs.items():
        files[name].write_text("\n".join(map(json.dumps, lines)))
    assert gpu.main(["--keep", str(files["one"]), str(files["two"])]) == 0
    kept = json.loads((tmp_path / "gpu_check.a-gpu.json").read_text())
    assert kept["seconds"] == 4.0
    assert kept["figures"]["lines"] == runs["one"] + runs["two"]
    assert gpu.main(["--keep", *map(str, files.values())]) == 2
    assert "a GPU; another GPU" in capsys.readouterr().err
