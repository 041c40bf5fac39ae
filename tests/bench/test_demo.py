"""The demo: it runs end to end, and its checks notice broken promises."""

import copy
from pathlib import Path
from typing import Any

import pytest

from demo import run, video
from demo.checks import each_row_once, only_new_encoded
from demo.report import chunk_row
from encoder_contract.digest import content_digest
from testing.photos import photo

pytestmark = pytest.mark.process


@pytest.fixture
def photos(tmp_path: Path) -> list[Path]:
    folder = tmp_path / "photos"
    folder.mkdir()
    for seed, (width, height, orientation) in enumerate(
        [(200, 120, 1), (96, 220, 6), (150, 150, 3), (300, 90, 8)]
    ):
        (folder / f"{seed}.jpg").write_bytes(photo(width, height, seed, orientation=orientation))
    return sorted(folder.iterdir())


def turn_of(photos: list[Path], *, held: int) -> dict[str, Any]:
    """Return a turn as the prefill process reports it: four tokens an image, two chunks."""
    digests = [content_digest(file.read_bytes()).hex() for file in photos]

    def chunk_run(chunk: int) -> dict[str, Any]:
        windows = [
            {"image": image, "row_begin": 2 * chunk, "row_end": 2 * chunk + 2, "source": "host"}
            for image in range(len(photos))
        ]
        times = {"waited_ms": 2.0, "prefill_ms": 5.0}
        return {"chunk": chunk, "begin": 8 * chunk, "end": 8 * chunk + 8, "windows": windows, **times}

    return {
        "prompt_ids": [0] * 16,
        "images": [{"digest": d, "tokens": 4, "cached": i < held} for i, d in enumerate(digests)],
        "arrivals": [
            {"digest": digest, "source": "host" if image < held else "encoded"}
            for image, digest in enumerate(digests)
        ],
        "runs": [chunk_run(0), chunk_run(1)],
    }


def test_missing_and_duplicate_rows_break_a_promise(photos: list[Path]) -> None:
    turn = turn_of(photos, held=0)
    assert each_row_once(0, turn)[1]
    missing, doubled = copy.deepcopy(turn), copy.deepcopy(turn)
    missing["runs"][1]["windows"][2]["row_end"] -= 1
    doubled["runs"][0]["windows"][1]["row_end"] += 1
    assert not each_row_once(0, missing)[1]
    assert not each_row_once(0, doubled)[1]


def test_images_encoded_twice_or_never_break_a_promise(photos: list[Path]) -> None:
    first, second = turn_of(photos[:2], held=0), turn_of(photos, held=2)
    assert only_new_encoded(0, first, [], photos[:2])[1]
    assert only_new_encoded(1, second, [first], photos)[1]
    again, forgotten = turn_of(photos, held=1), turn_of(photos, held=3)
    assert not only_new_encoded(1, again, [first], photos)[1]
    assert not only_new_encoded(1, forgotten, [first], photos)[1]
    lied = turn_of(photos, held=2)
    lied["arrivals"][0]["source"] = "encoded"
    assert not only_new_encoded(1, lied, [first], photos)[1]


def test_the_table_counts_cached_and_encoded_rows(photos: list[Path]) -> None:
    row = chunk_row(turn_of(photos, held=3)["runs"][1], [True, True, True, False])
    assert row == ("1", "8-16", "0[2:4], 1[2:4], 2[2:4], 3[2:4]", "8", "6", "2", "2.0", "5.0")


@pytest.fixture
def small_models(monkeypatch: pytest.MonkeyPatch) -> None:
    """Make the demos' models as shallow as the promises allow."""
    for demo in (run, video):
        monkeypatch.setattr(demo, "VISION_LAYERS", 4)
        monkeypatch.setattr(demo, "TEXT_LAYERS", 3)  # one for each level of DeepStack


@pytest.mark.usefixtures("small_models")
def test_the_demo_keeps_its_promises(
    photos: list[Path], tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    assert run.demo(photos[0].parent, 37, tmp_path / "demo") == 0
    shown = capfd.readouterr().out
    assert "turn 1: 2 images new, 0 held from before" in shown
    assert "turn 2: 2 images new, 2 held from before" in shown
    assert shown.count("  kept  ") == 8
    assert "BROKEN" not in shown
    assert str(tmp_path / "demo" / "timeline.svg") in shown
    assert {"trace-1.json", "trace-2.json"} <= {file.name for file in (tmp_path / "demo").iterdir()}


@pytest.mark.usefixtures("small_models")
def test_the_demo_with_a_video_keeps_its_promises(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    assert video.demo(tmp_path / "demo") == 0
    shown = capfd.readouterr().out
    assert "turn 1: 20 images new, 0 held from before" in shown
    assert "turn 2: 0 images new, 20 held from before" in shown
    assert shown.count("  kept  ") == 6
    assert "BROKEN" not in shown
    assert "image 19" in (tmp_path / "demo" / "video-timeline.svg").read_text()
