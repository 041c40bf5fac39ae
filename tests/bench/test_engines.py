"""The benchmark of engines: its loads, the order of its cells, what it stores, and a small run of real engines."""

import json
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from bench.engines import BENCHMARK, CELLS, RATIOS, figures_of, oldest_first, restrict, rows_of
from bench.engines_parts.generators import OfferedLoad, chats
from bench.engines_parts.sides import STEPS, Cores, Side
from bench.harness.results import ROOT
from encoder_service.metrics import ScrapeError
from testing.engine_environments import VLLM_PYTHON
from testing.processes import EngineProcess, free_port
from tests.bench.benchmark_run import figures_of_run


def images_of(found: list[list[dict[str, Any]]]) -> list[str]:
    return [part["image_url"]["url"] for parts in found for part in parts if part["type"] == "image_url"]


def texts_of(found: list[list[dict[str, Any]]]) -> list[str]:
    return [part["text"] for parts in found for part in parts if part["type"] == "text"]


@pytest.mark.parametrize(("repeated", "distinct"), [(0.5, 10), (0.8, 4)])
def test_a_load_repeats_its_share_of_images_and_no_text(repeated: float, distinct: int) -> None:
    load = OfferedLoad(20, 8, repeated=repeated)
    found = chats(load, seed=3)
    assert len(images_of(found)) == 20
    assert len(set(images_of(found))) == distinct == load.distinct
    assert len(set(texts_of(found))) == 20
    assert chats(load, seed=3) == found


def test_images_are_shared_documents_and_chats_in_turn() -> None:
    """A prefix cache answers for a chat, whose image comes first, and not for a document behind a new text."""
    assert [parts[0]["type"] for parts in chats(OfferedLoad(6, repeated=0.5), seed=1)] == [
        "image_url",
        "text",
    ] * 3


def test_no_two_seeds_share_an_image_or_a_text() -> None:
    one, two = chats(OfferedLoad(8, repeated=0.5), seed=1), chats(OfferedLoad(8, repeated=0.5), seed=2)
    assert not set(images_of(one)) & set(images_of(two))
    assert not set(texts_of(one)) & set(texts_of(two))


def side(requests_per_s: float, p99_ms: float, failed: int = 0) -> dict[str, Any]:
    figures = {"requests_per_s": requests_per_s, "ttft_p50_ms": 1.0, "ttft_p99_ms": p99_ms, "tpot_ms": 1.0}
    figures |= {"itl_ms": 1.0, "e2e_p50_ms": 1.0, "failed": failed}
    return {"loads": {"c32": figures, "c128": figures}, "waiting_core_percent": requests_per_s}


def cell(**sides: dict[str, Any]) -> dict[str, Any]:
    return {"measured_at": "2026-01-01", "sides": sides}


def test_figures_are_ratios_of_the_measured_cells_and_count_our_failures() -> None:
    cells = {
        "vllm-new": cell(own=side(4.0, 300.0, failed=7), ours=side(5.0, 200.0, failed=1)),
        "vllm-most": cell(own=side(4.0, 300.0), ours=side(8.0, 100.0)),
    }
    found = figures_of(cells)
    assert (found["new_requests"], found["new_p99"]) == (1.25, 1.5)
    assert (found["most_requests"], found["most_p99"]) == (2.0, 3.0)
    assert found["failed_at_128"] == 1, "those of our side only"
    assert found["waiting_core_percent"] == 5.0, "that of the cell with new images"
    assert found["cells"] == cells
    assert "fleet_requests" not in found, "not measured"
    assert "failed_at_128" not in figures_of({})


def test_every_ratio_is_of_a_cell_that_is_measured_so() -> None:
    for ratio in RATIOS.values():
        measured = CELLS[ratio.cell]
        assert {ratio.above, ratio.below} <= set(measured.sides)
        assert ratio.load in measured.loads
    assert {figure.key for figure in BENCHMARK.figures} == {*RATIOS, "failed_at_128", "waiting_core_percent"}


def test_an_encoder_gets_as_many_cores_as_its_share_of_a_request() -> None:
    loads = {"image": {"ttft_p50_ms": 180.0}, "text": {"ttft_p50_ms": 100.0, "e2e_p50_ms": 160.0}}
    found = figures_of({"vllm-stages": {"measured_at": "2026-01-01", "sides": {"own": {"loads": loads}}}})
    assert found["vllm_encoder_cores"] == 0.5, "80 ms to encode, 160 ms to prefill and decode"
    assert "sglang_encoder_cores" not in found, "not measured"


def test_a_run_begins_with_the_cells_that_were_measured_longest_ago(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr("bench.engines.PYTHONS", {"vllm": tmp_path, "sglang": tmp_path / "missing"})
    names = [name for name in CELLS if name.startswith("vllm-")]
    assert oldest_first({}) == names, "only those of the engine that is installed"
    known = {name: {"measured_at": f"2026-01-{10 + number}"} for number, name in enumerate(names)}
    known[names[0]] = {"measured_at": "2026-02-01"}
    del known[names[3]]
    assert oldest_first(known) == [names[3], *(name for name in names[1:] if name != names[3]), names[0]]


def test_a_cell_is_restricted_to_sides_and_loads() -> None:
    small = restrict(CELLS["vllm-new"], ["ours"], ["c8"], 4)
    assert (small.sides, [*small.loads], small.loads["c8"].requests) == (("ours",), ["c8"], 4)
    assert rows_of(cell(own=side(1.0, 2.0)))[0] == ["c32", "own", 1.0, 1.0, 2.0, 1.0, 1.0, 1.0, 0]


@contextmanager
def side_with_metrics(folder: Path) -> Iterator[Side]:
    """Yield a side whose only engine is an HTTP server of the files in `folder`."""
    (folder / "health").touch()
    port, side = free_port(), Side("own", Cores(frozenset(), frozenset()))
    command = [sys.executable, "-m", "http.server", str(port), "--bind", "127.0.0.1", "--directory", folder]
    side.engines = [EngineProcess(f"http://127.0.0.1:{port}", command, {})]
    side.has_metrics = True
    try:
        side.engines[0].wait_until_it_answers()
        yield side
    finally:
        side.engines[0].stop()


@pytest.mark.process
def test_steps_are_those_since_the_last_call_and_their_absence_is_an_error(tmp_path: Path) -> None:
    with side_with_metrics(tmp_path) as side:
        metrics = tmp_path / "metrics"
        metrics.write_text(f"{STEPS} 7\n")
        assert side.steps() == 7
        metrics.write_text(f"{STEPS} 9\n")
        assert side.steps() == 2
        metrics.write_text("vllm:num_requests_running 1\n")
        with pytest.raises(ScrapeError, match=f"no metric {STEPS}"):
            side.steps()
        metrics.unlink()
        with pytest.raises(ScrapeError):
            side.steps()
        side.has_metrics = False
        assert side.steps() is None, "as SGLang, which is started without metrics"


@pytest.mark.process
@pytest.mark.slow
@pytest.mark.skipif(not VLLM_PYTHON.exists(), reason="no .venv-vllm: make test-vllm")
def test_real_engines_answer_the_generator_on_the_cores_of_their_side() -> None:
    command = ["-m", "bench.engines", "--cells", "vllm-most", "--sides", "ours", "encoder"]
    found = figures_of_run([*command, "--loads", "c8", "--requests", "4", "--json"])["cells"]["vllm-most"]
    assert found["commands"]["c8"].startswith("vllm bench serve --backend openai-chat ")
    assert str(ROOT) not in json.dumps(found)
    for measured in found["sides"].values():
        assert measured["loads"]["c8"]["failed"] == 0
        assert measured["cores"] == len(os.sched_getaffinity(0))
        assert all(mib > 0 for mib in measured["peak_mib"].values())
    assert found["sides"]["ours"]["encodes_per_image"] == 1
