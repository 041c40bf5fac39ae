"""The benchmarks of a GPU without a GPU: each runs, imports only what it measures, and reports what failed."""

import json
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from bench.__main__ import main
from bench.gpu import BENCHMARKS
from bench.gpu_parts.probe import Probe
from bench.gpu_parts.tower import SQUARE, note_fastest
from bench.harness.benchmark import names
from bench.harness.budget import TimeBudget
from bench.harness.results import ROOT
from bench.harness.runner import figures_in
from docs.benchmarks import looked_up

pytestmark = pytest.mark.slow

# Modules that a machine with torch may lack, and which of them each part needs for its measurements.
OPTIONAL = {
    *("transformers", "tokenizers", "safetensors", "blake3", "xxhash", "cachetools", "grpc", "grpc_health"),
    *("google", "grpc_reflection", "redis", "prometheus_client", "PIL", "nvidia", "rich", "pytest", "psutil"),
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
    "group": TOWER | CHECKPOINT,
    "edge": SERVER,  # needs no GPU, and runs on machines with one too
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
                import bench.__main__
                importlib.import_module("bench.edge" if part == "edge" else f"bench.gpu_parts.{part}")
            except BaseException as error:
                print(part, repr(error), traceback.format_exc(), file=sys.stderr, flush=True)
                os._exit(1)
            print(part, flush=True)
        os._exit(0)
    os.waitpid(child, 0)
"""


@pytest.mark.timeout(900)
@pytest.mark.cuda
def test_a_dry_run_runs_every_benchmark_and_stores_nothing(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "bench", "--device", "cuda", "--dry-run", "--out", tmp_path]
    ran = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=890, check=False)
    assert ran.returncode == 0, ran.stdout + ran.stderr[-3000:]
    assert not list(tmp_path.glob("*.json")), "figures of a dry run mean nothing"
    for benchmark in BENCHMARKS:
        figures = figures_in(tmp_path / f"{benchmark.name}.log")
        assert figures.pop("left_out") == [], benchmark.name
        assert figures, f"{benchmark.name} measured nothing"
        declared = benchmark.figures
        assert not declared or any(looked_up(each.key, figures) is not None for each in declared)
        for name in {
            "driver": ("launch_us",),
            "load": ("vit_ms", "reserved_mib", "allocated_mib"),
            "group": ("group_ms",),
        }.get(benchmark.name, ()):
            assert any(name in values for values in figures.values()), name
    assert figures_in(tmp_path / "server.log")["720p, from the device tier"]["passed"]


def test_the_first_calls_on_a_gpu_fit_a_quarter_of_an_hour() -> None:
    """Of 900 s, starts and transfers take two minutes, and a benchmark may end late."""

    def calls(*arguments: str) -> list[tuple[int, list[str]]]:
        command = ["make", "--dry-run", "gpu-first", *arguments]
        printed = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True).stdout
        found = re.findall(r"--device cuda .*?--budget-s (\d+) --only ([\w ]+?) +(?:--|\|\|)", printed)
        return [(int(seconds), only.split()) for seconds, only in found]

    assert sum(seconds for seconds, _ in calls()) <= 600
    ran = [name for _, only in calls() for name in only]
    assert sorted(ran) == sorted({*names("cuda")} - {"sanitize"})
    assert calls("CALL=3", "OUT=folder") == [(200, ["load", "decode", "server"])]


@pytest.mark.skipif(torch.cuda.is_available(), reason="this machine has a GPU")
def test_without_a_gpu_one_line_says_so(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--device", "cuda", "--dirty"]) == 2
    [line] = capsys.readouterr().err.splitlines()
    assert "torch finds no CUDA device; --dry-run" in line


@pytest.mark.timeout(600)
@pytest.mark.cuda
def test_parts_import_without_the_modules_that_they_do_not_need() -> None:
    # Parts that need the same modules share a process: importing transformers takes seconds.
    by_missing: dict[tuple[str, ...], list[str]] = {}
    for part in (parts := [*names("cuda"), "edge"]):
        by_missing.setdefault(tuple(sorted(OPTIONAL - NEEDED.get(part, set()))), []).append(part)
    sets = [(together, missing) for missing, together in by_missing.items()]
    command = [sys.executable, "-c", IMPORTS, json.dumps(sets)]
    ran = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert sorted(ran.stdout.split()) == sorted(parts), ran.stderr[-3000:]


def probe(folder: Path, budget_s: float = 60.0) -> Probe:
    return Probe(TimeBudget(budget_s), folder, dry=True)


@pytest.mark.cuda
def test_each_measurement_and_each_failure_is_printed_at_once(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    def refuse() -> dict[str, float]:
        raise RuntimeError("no kernel")

    part = probe(tmp_path)
    assert part.attempt("a", lambda: {"ms": 1.0})
    assert json.loads(capsys.readouterr().out) == {"a": {"ms": 1.0}}
    assert not part.attempt("b", refuse)
    assert json.loads(capsys.readouterr().out) == {"b": {"failed": "RuntimeError: no kernel"}}
    part.note("c", passed=False)
    assert part.failed() == {"b": "RuntimeError: no kernel", "c": "not passed"}
    late = probe(tmp_path, budget_s=-1)
    assert not late.attempt("d", refuse)
    assert late.budget.left_out == ["d"]
    assert not late.failed()


def test_the_fastest_variant_of_a_case_is_noted_beside_transformers(tmp_path: Path) -> None:
    part = probe(tmp_path)
    part.note(SQUARE, ms=1.0, tflops=700.0)
    part.note("720p, default", ms=9.0, tflops=300.0)
    part.note("720p, flash3", ms=8.0, tflops=350.0)
    note_fastest(part, "720p", ["default", "flash3", "sdpa"])
    assert part.figures["720p"] == {"variant": "flash3", "ms": 8.0, "of_square": 0.5}
    part.note("720p, transformers", ms=16.0, host_ms=1.0)
    note_fastest(part, "720p", ["default", "flash3", "sdpa"])
    assert part.figures["720p"]["ratio"] == 2
    note_fastest(part, "1080p", ["default"])
    assert "1080p" not in part.figures, "not measured"
