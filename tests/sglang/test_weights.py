"""Weights that are loaded into a running engine: rows of the weights before them are used no more."""

import shutil
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import partial
from itertools import count
from pathlib import Path
from types import SimpleNamespace
from typing import NamedTuple

import pytest
import torch
from safetensors.torch import load_file, save_file
from sglang.srt.managers import mm_schedule
from sglang.srt.model_executor.model_runner_components.weight_updater import WeightUpdater
from sglang.srt.runtime_context import get_parallel
from torch.distributed import destroy_process_group, init_process_group
from torch.multiprocessing.spawn import spawn

from encoder_contract.checkpoint import model_fingerprint
from prefill_client.sglang import tower
from testing.answers import Part
from testing.photos import photo, with_comment
from testing.sglang_engine import SglangEngine, serving
from tests.engines.answers import PROMPTS, Own, assert_equal
from tests.sglang.conftest import answers_of, checkpoint_of, service_of, variables
from tests.sglang.test_faults import until_served
from tests.sglang.trainers import BUCKET, Tensors, Write, broadcasting, post, send
from tests.vllm.restartable import Restartable

SEEN: list[Part] = [photo(256, 192, 4100, "PNG"), "What is this?"]
NEW: list[Part] = ["x ", photo(200, 240, 4101, "PNG"), "And this?"]
PIXELS = photo(220, 240, 4102)
MOVED: list[Part] = ["y ", PIXELS, "And that?"]
FIRST, SECOND = "one png", "text between"  # prompts that the unchanged engine has answered
WEIGHTS = "model.safetensors"
PATIENCE_S = 300.0
ALONE = SimpleNamespace(world_size=1)


class Versions(NamedTuple):
    """Checkpoints whose weights a trainer writes, and the answers of engines that were started on them."""

    other: Path
    of_other: Own
    frozen: Path
    """The tower of the engine's start, and the language model of `other`."""
    of_frozen: Own


@pytest.fixture(scope="session")
def versions(checkpoint: Path, tmp_path_factory: pytest.TempPathFactory) -> Versions:
    folder = tmp_path_factory.mktemp("versions")
    other = checkpoint_of("qwen3_vl", folder / "other", seed=3)
    frozen = shutil.copytree(other, folder / "frozen")
    weights = tensors_of(other, "language_model", "lm_head") | tensors_of(checkpoint, "visual.")
    save_file(weights, frozen / WEIGHTS, {"format": "pt"})
    return Versions(other, answers_of(other, [SEEN, NEW, MOVED]), frozen, answers_of(frozen, [SEEN, NEW]))


def tensors_of(folder: Path, *parts: str) -> Tensors:
    """Return the tensors of a checkpoint whose names have one of these parts."""
    tensors = load_file(folder / WEIGHTS)
    return {name: each for name, each in tensors.items() if any(part in name for part in parts)}


@pytest.mark.story("a trained tower gets no rows of the old one")
@pytest.mark.story("a frozen tower goes on")
def test_the_own_tower_encodes_while_it_has_other_weights_than_the_service(
    engine: SglangEngine, service: Restartable, checkpoint: Path, own: Own, versions: Versions
) -> None:
    other, own_other, frozen, own_frozen = versions
    moved = Restartable(other)
    moved.endpoint = service.endpoint
    engine.ask(SEEN)  # its rows are in the engine's cache
    try:
        engine.load(frozen)
        before = engine.fetched(), engine.by_own_tower()
        assert_equal(engine.ask(SEEN), own_frozen(SEEN))
        assert engine.fetched() == before[0] + 1, "the rows of before the update are dropped"
        assert engine.by_own_tower() == before[1], "the tower is the same, so the service encodes"
        assert engine.log.read_text().count("left the vision weights as they are") == 1

        engine.load(other)
        before = engine.fetched(), engine.by_own_tower("weights")
        for parts in (SEEN, NEW):
            assert_equal(engine.ask(parts), own_other(parts))
        assert (engine.fetched(), engine.by_own_tower("weights")) == (before[0], before[1] + 2)
        assert engine.log.read_text().count("the vision weights changed") == 1

        service.kill()
        moved.start()
        deadline = time.monotonic() + PATIENCE_S
        asks = count()
        while engine.fetched() == before[0]:
            assert time.monotonic() < deadline, engine.log.read_text()
            # A new file each time: the engine keeps the rows that its own tower made while it did not ask the service.
            image = with_comment(PIXELS, next(asks))
            assert_equal(engine.ask(["y ", image, "And that?"]), own_other(MOVED))
        assert moved.encodes() >= 1

        engine.load(checkpoint)  # before the service: its rows are those of the other tower
        before = engine.fetched(), engine.by_own_tower()
        assert_equal(engine.ask(PROMPTS[FIRST]), own(PROMPTS[FIRST]))
        assert (engine.fetched(), engine.by_own_tower()) == (before[0], before[1] + 1)
    finally:
        if moved.server is not None:
            moved.kill()
            service.start()
        engine.load(checkpoint)
    until_served(engine)
    before = engine.fetched(), engine.by_own_tower()
    for name in (FIRST, SECOND):
        assert_equal(engine.ask(PROMPTS[name]), own(PROMPTS[name]))
    assert engine.fetched() == before[0] + 3
    assert engine.by_own_tower() == before[1]


def test_an_engine_without_updates_takes_no_rows_of_other_weights(checkpoint: Path, tmp_path: Path) -> None:
    """Once its caches were emptied, the tokenizer compares no weights: it cannot know whether others were loaded."""
    with service_of(checkpoint_of("qwen3_vl", tmp_path / "other", seed=3)) as moved:
        moved.kill()  # its address is known
        with serving(checkpoint, environment=variables(moved.endpoint, start_timeout_s=1.0)) as engine:
            by_itself = engine.ask(SEEN)
            engine.forget()
            moved.start()
            deadline = time.monotonic() + PATIENCE_S
            while moved.encodes() == 0:
                assert time.monotonic() < deadline, engine.log.read_text()
                assert_equal(engine.ask(SEEN), by_itself)
                engine.forget()
            assert engine.fetched() == 0


def by_tensors(engine: SglangEngine, *, load_format: str | None = None) -> AbstractContextManager[Write]:
    return nullcontext(partial(send, load_format=load_format))


@pytest.mark.story("a trained tower gets no rows of the old one")
@pytest.mark.parametrize(
    "trainer",
    [by_tensors, partial(by_tensors, load_format=BUCKET), broadcasting],
    ids=["tensors", "bucket", "group"],
)
def test_rows_follow_the_tensors_that_a_trainer_writes(
    engine: SglangEngine,
    checkpoint: Path,
    own: Own,
    versions: Versions,
    trainer: Callable[[SglangEngine], AbstractContextManager[Write]],
) -> None:
    with trainer(engine) as write:
        assert_rows_follow(engine, write, checkpoint, own, versions)


def assert_rows_follow(
    engine: SglangEngine, write: Write, checkpoint: Path, own: Own, versions: Versions
) -> None:
    """Write a frozen tower, a trained one in two parts, and the first one again, and compare every answer."""
    seen: list[Part] = PROMPTS[FIRST]
    assert_equal(engine.ask(seen), own(seen))  # its rows are in the engine's cache
    write(engine, load_file(versions.frozen / WEIGHTS))
    assert_by_service(engine, SEEN, versions.of_frozen)

    trained = [*tensors_of(versions.other, "visual.").items()]
    write(engine, dict(trained[::2]))
    before = engine.fetched()
    engine.ask(SEEN)
    assert engine.fetched() == before, "the engine has a part of the new tower"
    write(engine, dict(trained[1::2]))
    for parts in (SEEN, NEW):
        assert_by_own_tower(engine, parts, versions.of_other)

    write(engine, tensors_of(checkpoint, "visual."))
    assert_by_service(engine, NEW, versions.of_frozen)
    write(engine, load_file(checkpoint / WEIGHTS))
    assert_by_service(engine, seen, own)


def assert_by_service(engine: SglangEngine, parts: list[Part], own: Own) -> None:
    before = engine.fetched(), engine.by_own_tower()
    assert_equal(engine.ask(parts), own(parts))
    assert (engine.fetched(), engine.by_own_tower()) == (before[0] + 1, before[1])


def assert_by_own_tower(engine: SglangEngine, parts: list[Part], own: Own | None = None) -> None:
    before = engine.fetched(), engine.by_own_tower("weights")
    answer = engine.ask(parts)
    if own is not None:
        assert_equal(answer, own(parts))
    assert (engine.fetched(), engine.by_own_tower("weights")) == (before[0], before[1] + 1)


@pytest.mark.story("weights that are written without names")
@pytest.mark.attack("weights that are written without the names of the checkpoint")
def test_weights_without_names_are_unknown_until_every_vision_tensor_is_named(
    engine: SglangEngine, checkpoint: Path, own: Own
) -> None:
    parts = PROMPTS[FIRST]
    assert_parameters_are_compared(engine, checkpoint, own)

    # Every parameter of the merger gets random values.
    others = [
        *("model.", "lm_head", "rotary", "visual.patch_embed", "visual.pos_embed"),
        *("visual.blocks", "visual.deepstack"),
    ]
    post(engine, "weights_checker", action="reset_tensors", skip_tensor_list=others)
    engine.forget()
    assert_by_own_tower(engine, parts)
    send(engine, load_file(checkpoint / WEIGHTS))
    assert_by_service(engine, parts, own)


@pytest.mark.story("weights that are written without names")
@pytest.mark.attack("a trainer that writes into the engine's memory by RDMA")
def test_what_comes_by_rdma_is_noticed(checkpoint: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """SGLang learns only that an update begins and ends. This test writes as the trainer's network card would."""
    with memory_written_by_others(monkeypatch, checkpoint) as (weights, updater, model), torch.no_grad():
        for part, fingerprint in (("language_model", model_fingerprint(checkpoint)), ("visual", None)):
            updater.begin_weight_update()
            model[part].weight[3, 4] += 1e-3
            updater.end_weight_update(run_post_load=True)
            assert weights.fingerprint == fingerprint


def test_all_ranks_know_the_weights_after_a_session_that_loads_nothing(
    checkpoint: Path, tmp_path: Path
) -> None:
    """It is before the first image. An exception of a rank ends the test."""
    spawn(_session_of_a_rank, (checkpoint, tmp_path / "group"), nprocs=2)


def _session_of_a_rank(rank: int, checkpoint: Path, meeting: Path) -> None:
    init_process_group("gloo", f"file://{meeting}", rank=rank, world_size=2)
    group = SimpleNamespace(world_size=2, ranks=[0, 1], cpu_group=torch.distributed.group.WORLD)
    with (
        pytest.MonkeyPatch.context() as monkeypatch,
        memory_written_by_others(monkeypatch, checkpoint, rank, group) as (weights, updater, _),
    ):
        updater.begin_weight_update()
        updater.end_weight_update(run_post_load=False)
        assert weights.fingerprint == model_fingerprint(checkpoint)
        assert weights.are_those_of_the_start
    destroy_process_group()


@contextmanager
def memory_written_by_others(
    monkeypatch: pytest.MonkeyPatch, checkpoint: Path, rank: int = 0, group: object = ALONE
) -> Iterator[tuple[tower.TowerWeights, WeightUpdater, torch.nn.ModuleDict]]:
    """Yield one rank's weights, SGLang's updater of remote instances, and the model that it writes."""
    model = torch.nn.ModuleDict({part: torch.nn.Linear(8, 8) for part in ("visual", "language_model")})
    monkeypatch.setattr(tower, "remote_instance_transfer_engine_enabled", lambda: True)
    watched = [*tower.UPDATES, (WeightUpdater, "begin_weight_update"), (WeightUpdater, "end_weight_update")]
    for owner, name in watched:
        monkeypatch.setattr(owner, name, getattr(owner, name))  # restored after the test
    updater = WeightUpdater(
        tp_rank=0,
        device="cpu",
        gpu_id=0,
        model_config=None,
        custom_weight_loaders={},
        get_model=lambda: model,
        update_model_fields=lambda: None,
        recapture_cuda_graph=lambda: None,
        get_model_runner=lambda: None,
    )
    weights = tower.TowerWeights(lambda: model["visual"], lambda: checkpoint, torch.float32)
    weights.watch_updates(model)
    mm_schedule.init_mm_embedding_cache()  # as a scheduler does when it starts
    with get_parallel().override(attn_tp_rank=rank, attn_tp_group=group):
        yield weights, updater, model


def assert_parameters_are_compared(
    engine: SglangEngine, checkpoint: Path, own: Own, *, before_last: int = 0
) -> None:
    """Write a parameter of the tower on the last rank, which has `before_last` others, and compare every answer."""
    parts = PROMPTS[FIRST]
    name = "visual.blocks.0.norm1.weight"
    vision = tensors_of(checkpoint, "visual.")
    same = {name: vision[f"model.{name}"]}
    others = [same] * before_last
    send(engine, *others, same, load_format="direct")
    assert_by_service(engine, parts, own)

    unknown = engine.log.read_text().count("the vision weights are unknown")
    send(engine, *others, {name: 2 * same[name]}, load_format="direct")
    send(engine, *others, same, load_format="direct")
    assert_by_own_tower(engine, parts, own)
    assert engine.log.read_text().count("the vision weights are unknown") == unknown + 1
    first, *rest = vision.items()
    send(engine, *[dict(rest)] * (1 + before_last))
    assert_by_own_tower(engine, parts, own)
    send(engine, *[dict([first])] * (1 + before_last))
    assert_by_service(engine, parts, own)
