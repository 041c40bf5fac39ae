"""Weights that are loaded into a running engine: rows of the weights before them are used no more."""

import shutil
from pathlib import Path

from safetensors.torch import load_file, save_file

from testing.answers import Part
from testing.photos import photo
from testing.sglang_engine import SglangEngine
from tests.sglang.conftest import PROMPTS, Own, answers_of, assert_equal, checkpoint_of
from tests.sglang.counters import by_own_tower, fetched

SEEN: list[Part] = [photo(256, 192, 4100, "PNG"), "What is this?"]
NEW: list[Part] = ["x ", photo(200, 240, 4101, "PNG"), "And this?"]
FIRST, SECOND = "one png", "text between"  # prompts that the unchanged engine has answered
WEIGHTS = "model.safetensors"


def with_tower_of(folder: Path, other: Path, tower: Path) -> Path:
    """Write a checkpoint with the tower of one and the language model of another."""
    shutil.copytree(other, folder)
    language = {name: each for name, each in load_file(other / WEIGHTS).items() if "visual." not in name}
    vision = {name: each for name, each in load_file(tower / WEIGHTS).items() if "visual." in name}
    save_file(language | vision, folder / WEIGHTS, {"format": "pt"})
    return folder


def test_the_own_tower_encodes_while_it_has_other_weights_than_the_service(
    engine: SglangEngine, checkpoint: Path, own: Own, tmp_path: Path
) -> None:
    other = checkpoint_of("qwen3_vl", tmp_path / "other", seed=3)
    frozen = with_tower_of(tmp_path / "frozen", other, checkpoint)
    own_other, own_frozen = answers_of(other, [SEEN, NEW]), answers_of(frozen, [SEEN, NEW])
    engine.ask(SEEN)  # its rows are in the engine's cache
    try:
        engine.load(frozen)
        before = fetched(engine), by_own_tower(engine)
        assert_equal(engine.ask(SEEN), own_frozen(SEEN))
        assert fetched(engine) == before[0] + 1, "the rows of before the update are dropped"
        assert by_own_tower(engine) == before[1], "the tower is the same, so the service encodes"

        engine.load(other)
        before = fetched(engine), by_own_tower(engine, "weights")
        for parts in (SEEN, NEW):
            assert_equal(engine.ask(parts), own_other(parts))
        assert (fetched(engine), by_own_tower(engine, "weights")) == (before[0], before[1] + 2)
        assert engine.log.read_text().count("the vision weights changed") == 1
    finally:
        engine.load(checkpoint)
    before = fetched(engine), by_own_tower(engine)
    for name in (FIRST, SECOND):
        assert_equal(engine.ask(PROMPTS[name]), own(PROMPTS[name]))
    assert fetched(engine) == before[0] + 3
    assert by_own_tower(engine) == before[1]
