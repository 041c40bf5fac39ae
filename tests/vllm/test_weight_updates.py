"""Weights that are written into a running engine: a frozen tower goes on, and no rows of other weights are used."""

import logging
import shutil
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from copy import copy
from dataclasses import dataclass
from functools import partial
from itertools import count
from pathlib import Path
from typing import Any

import httpx
import pytest
import torch
from safetensors.torch import load_file, save_file
from vllm.distributed.ec_transfer import get_ec_transfer
from vllm.distributed.weight_transfer import WeightTransferEngineFactory
from vllm.distributed.weight_transfer.base import WeightTransferEngine
from vllm.distributed.weight_transfer.sharded_rdt_engine import (
    ShardedRDTWeightTransferEngine,
    ShardedRDTWeightTransferInitInfo,
)
from vllm.model_executor.model_loader.checkpoint_weight_patch import (
    CheckpointWeightPatch,
    load_checkpoint_weight_patches,
)
from vllm.model_executor.model_loader.reload import finalize_layerwise_reload, initialize_layerwise_reload

from encoder_contract.checkpoint import model_fingerprint
from prefill_client import BlockingClient
from prefill_client.vllm.image_name import producer_of
from prefill_client.vllm.weight_updates import LEAVE_WEIGHTS, QUERY
from prefill_client.vllm.worker_weights import tower_digest
from testing.photos import photo
from testing.vllm_engine import CHUNK_TOKENS, Answer, Part, VllmEngine
from tests.engines.answers import assert_equal, prompt
from tests.vllm.http_engine import serving
from tests.vllm.restartable import Restartable
from tests.vllm.test_middleware import assert_equal as http_equal
from tests.vllm.test_middleware import content, top

PARTS, OTHERS = prompt(7100, 2), prompt(7200, 2)
ACROSS: list[Part] = [
    "The prefill of this image takes two steps, not one alone: ",
    photo(256, 256, 7401, "PNG"),
]
WEIGHTS = "model.safetensors"
PATIENCE_S = 300.0


def trained_from(base: Path, folder: Path, part: str) -> Path:
    """Write a checkpoint in which the tensors of one part have other values."""
    shutil.copytree(base, folder)
    tensors = load_file(base / WEIGHTS)
    noise = torch.Generator().manual_seed(1)
    for name, tensor in tensors.items():
        if part in name and "weight" in name:
            tensor *= 1 + 0.2 * torch.rand(tensor.shape, generator=noise)
    save_file(tensors, folder / WEIGHTS, {"format": "pt"})
    return folder


@dataclass
class Folder:
    """What `FromFolder` loads."""

    folder: str = ""
    part: str = ""


class FromFolder(WeightTransferEngine):  # type: ignore[misc]
    """A backend of vLLM's weight transfer that loads tensors from a folder, as its NCCL backend does from a trainer."""

    init_info_cls = update_info_cls = Folder

    def init_transfer_engine(self, init_info: Folder) -> None:
        """Rehearse the loading, as the backend `sharded_rdt` does."""
        config = copy(self.vllm_config)
        config.parallel_config = copy(config.parallel_config)
        config.parallel_config.distributed_executor_backend = "ray"
        engine = ShardedRDTWeightTransferEngine(self.config, config, self.device, self.model)
        tensors = load_file(Path(init_info.folder) / WEIGHTS)
        dtypes = [str(each.dtype).removeprefix("torch.") for each in tensors.values()]
        shapes = [[*each.shape] for each in tensors.values()]
        engine._bake(ShardedRDTWeightTransferInitInfo(names=[*tensors], dtype_names=dtypes, shapes=shapes))

    def start_weight_update(self) -> None:
        initialize_layerwise_reload(self.model)

    def update_weights(self, update_info: dict[str, Any]) -> None:
        self.receive_weights(self.parse_update_info(update_info))

    def receive_weights(self, update_info: Folder) -> None:
        for name, tensor in load_file(Path(update_info.folder) / WEIGHTS).items():
            if update_info.part in name:
                self.model.load_weights([(name, tensor)])

    def finish_weight_update(self) -> None:
        finalize_layerwise_reload(self.model, self.model_config)

    def shutdown(self) -> None: ...


class IntoMemory(FromFolder):
    """A backend that writes into parameters, of which an engine without a tower has none for vision."""

    def receive_weights(self, update_info: Folder) -> None: ...


class Live:
    """An engine with its service, whose checkpoints change."""

    def __init__(self, checkpoint: Path, **options: Any) -> None:
        self.checkpoint = checkpoint
        self.service = Restartable(checkpoint)
        self.service.start()
        self.engine = VllmEngine(checkpoint, self.service.endpoint, **options)

    @property
    def told(self) -> str | None:
        told: str | None
        (told,) = self.call(QUERY)
        return told

    def call(self, method: Any, **options: Any) -> Any:
        return self.engine.llm.collective_rpc(method, kwargs=options)

    def load(self, folder: Path) -> None:
        self.call("reload_weights", weights_path=str(folder))

    def own(self, parts: Any) -> Answer:
        """Return the answer of the engine's own tower, which none of vLLM's caches has."""
        self.engine.forget()
        answer = self.engine.ask(parts, own=True)
        self.engine.forget()
        return answer

    def serve(self, model: Path) -> None:
        """Replace the service by one of another checkpoint, at the same address."""
        self.service.kill()
        endpoint, self.service = self.service.endpoint, Restartable(model)
        self.service.endpoint = endpoint
        self.service.start()
        self.engine.client.close()
        self.engine.client = BlockingClient.connect(endpoint)
        self.engine.producer = producer_of(self.engine.client.description, "")

    def close(self) -> None:
        self.engine.close()
        self.service.kill()


@pytest.fixture(scope="module")
def trained(checkpoint: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The checkpoint with a trained tower."""
    return trained_from(checkpoint, tmp_path_factory.mktemp("trained") / "tower", "visual.")


@pytest.fixture(scope="module")
def frozen(checkpoint: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The checkpoint with a trained language model, and its old tower."""
    return trained_from(checkpoint, tmp_path_factory.mktemp("frozen") / "language", "language_model.")


@pytest.fixture(scope="module")
def shared(checkpoint: Path) -> Iterator[Live]:
    with pytest.MonkeyPatch.context() as patched:
        # Both of vLLM's own transports need GPUs.
        patched.setitem(WeightTransferEngineFactory._registry, "ipc", lambda: FromFolder)
        live = Live(checkpoint, weight_transfer_config={"backend": "ipc"})
        yield live
        live.close()


@pytest.fixture
def live(shared: Live, caplog: pytest.LogCaptureFixture) -> Iterator[Live]:
    """The engine with the weights of its start."""
    caplog.set_level(logging.INFO, "vllm.encoder_service")
    yield shared
    shared.load(shared.checkpoint)
    assert shared.told == ""
    shared.engine.forget()


def messages(caplog: pytest.LogCaptureFixture, text: str) -> list[str]:
    return [each.levelname for each in caplog.records if text in each.getMessage()]


@pytest.mark.story("a frozen tower goes on")
def test_a_frozen_tower_goes_on(live: Live, frozen: Path, caplog: pytest.LogCaptureFixture) -> None:
    before = live.engine.ask(PARTS)
    caplog.clear()
    live.load(frozen)
    assert live.told == ""
    assert messages(caplog, "left the vision weights as they are") == ["INFO"]
    live.engine.forget()
    after = live.engine.ask(PARTS)
    assert after.distance(before) > 1e-3, "the language model is another"
    assert_equal(after, live.own(PARTS))


def cached() -> list[str]:
    """Return the images of which the worker in this process has the rows."""
    return sorted(get_ec_transfer()._encoder_cache)


def emptied(worker: Any) -> None:
    worker.model_runner.reset_encoder_cache()


def reloaded(worker: Any, folder: str) -> None:
    worker.model_runner.reload_weights(weights_path=folder)


def paused(live: Live) -> None:
    live.engine.llm.llm_engine.renderer.clear_mm_cache()
    live.engine.core.pause_scheduler("keep")
    live.engine.core.resume_scheduler()


def slept(live: Live, level: int) -> None:
    live.engine.llm.sleep(level, "keep")
    live.engine.llm.wake_up()


EMPTIERS: dict[str, Callable[[Live], Any]] = {
    "/reset_encoder_cache": lambda live: live.engine.core.reset_encoder_cache(),
    "/reset_mm_cache": lambda live: live.engine.llm.llm_engine.reset_mm_cache(),
    "/pause": paused,
    "/sleep, level 1": partial(slept, level=1),
    "/sleep, level 2": partial(slept, level=2),
    "reset_encoder_cache of all workers": lambda live: live.call("reset_encoder_cache"),
    "reload_weights": lambda live: live.load(live.checkpoint),
    "reload_weights of an extension": lambda live: live.call(reloaded, folder=str(live.checkpoint)),
    "reset_encoder_cache of an extension": lambda live: live.call(emptied),
}


def test_no_row_of_the_old_tower_is_left_in_the_engine(live: Live, trained: Path) -> None:
    again = ["Once more: ", *ACROSS[1:]]  # the prefix cache has nothing of it
    live.engine.ask(ACROSS, own=True)
    live.call(load_by_name, folder=str(trained))
    assert_equal(live.engine.ask(again, own=True), live.own(again))


@pytest.mark.parametrize("own", [False, True], ids=["service", "own tower"])
@pytest.mark.parametrize("way", EMPTIERS)
def test_a_request_goes_on_when_vllm_empties_its_encoder_caches(live: Live, way: str, own: bool) -> None:
    """The engine ends at a step that reads rows of which only the scheduler believes that they are cached."""
    expected = live.engine.ask(ACROSS, own=own)
    live.engine.forget()
    live.engine.core.reset_encoder_cache()
    request = live.engine.start(ACROSS, own=own)
    live.engine.run_until(lambda: live.engine.computed(request) == CHUNK_TOKENS)
    assert len(cached()) == 1, "the next step reads it"
    EMPTIERS[way](live)
    assert sorted(live.engine.scheduler.encoder_cache_manager.cached) == cached()
    answer = live.engine.run(request)[request]
    if live.told is None and not own:
        assert answer.reason == "error"
    else:
        assert_equal(answer, expected)


@pytest.mark.story("a trained tower gets no rows of the old one")
def test_a_trained_tower_gets_no_rows_of_the_old_one(
    live: Live, trained: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """No cache of vLLM is emptied: names of the old weights and of the new ones differ."""
    before = live.engine.ask(PARTS)
    waiting, producer = live.engine.start(PARTS), live.engine.producer
    live.load(trained)
    assert live.told == model_fingerprint(trained).hex()
    assert live.engine.run(waiting)[waiting].reason == "error"
    late = live.engine.start(PARTS)
    assert live.engine.run(late)[late].reason == "error"
    assert len(messages(caplog, "changed the vision weights")) == 1

    live.serve(trained)
    assert live.engine.producer != producer
    after = live.engine.ask(PARTS)
    assert after.distance(before) > 1e-3
    assert_equal(after, live.own(PARTS))
    live.load(live.checkpoint)
    live.serve(live.checkpoint)
    assert_equal(live.engine.ask(PARTS), before)
    live.engine.assert_nothing_is_held()


def test_images_wait_until_an_update_of_several_calls_was_compared(live: Live, frozen: Path) -> None:
    live.call("start_weight_update")
    request = live.engine.start(OTHERS)
    live.engine.submit(*(part for part in OTHERS if isinstance(part, bytes)))
    for part in ("language_model.", "visual."):
        for _ in range(50):
            assert live.engine.step() == {}
        assert live.engine.computed(request) == 0
        live.call("update_weights", update_info={"folder": str(frozen), "part": part})
    live.call("finish_weight_update")
    assert live.told == ""
    answer = live.engine.run(request)[request]
    assert_equal(answer, live.own(OTHERS))


def nothing(worker: Any) -> int:
    return 1


def load_by_name(worker: Any, folder: str, part: str = "") -> None:
    tensors = load_file(Path(folder) / WEIGHTS)
    model = worker.get_model()
    initialize_layerwise_reload(model)
    model.load_weights((name, each) for name, each in tensors.items() if part in name)
    finalize_layerwise_reload(model, worker.model_config)


def fail_halfway(worker: Any, folder: str) -> None:
    load_by_name(worker, folder, "visual.blocks.0.")
    raise OSError("the trainer has died")


@pytest.mark.story("weights that are written without names")
@pytest.mark.attack("calls of an extension that write weights in their own way")
def test_what_an_extension_writes_is_noticed(live: Live, trained: Path) -> None:
    live.call(load_by_name, folder=str(trained))
    assert live.told == model_fingerprint(trained).hex()
    for part in ("visual.", "language_model."):
        live.call(load_by_name, folder=str(live.checkpoint), part=part)
    assert live.told == ""
    assert live.call(nothing) == [1]
    assert live.told is None, "nobody can read the weights that vLLM has packed for the CPU"
    live.engine.submit(*(part for part in PARTS if isinstance(part, bytes)))
    refused = live.engine.start(PARTS)
    assert live.engine.run(refused)[refused].reason == "error"
    live.call(load_by_name, folder=str(live.checkpoint))
    assert live.told == ""
    assert_equal(live.engine.ask(PARTS), live.own(PARTS))


@pytest.mark.parametrize("at_once", [True, False])
def test_what_a_trainer_in_the_engines_process_loads_is_noticed(
    live: Live, trained: Path, at_once: bool
) -> None:
    """It calls `load_weights` of the model that it finds in the engine, and the engine core learns nothing of that."""
    model, config = live.engine.model, live.engine.config.model_config

    def load(folder: Path) -> None:
        initialize_layerwise_reload(model)
        tensors = load_file(folder / WEIGHTS)
        for each in [tensors] if at_once else [{name: tensor} for name, tensor in tensors.items()]:
            model.load_weights(each.items())
        finalize_layerwise_reload(model, config)

    waiting = live.engine.start(PARTS)
    load(trained)
    assert live.engine.run(waiting)[waiting].reason == "error"
    assert live.told == model_fingerprint(trained).hex()
    load(live.checkpoint)
    assert live.told == ""
    assert_equal(live.engine.ask(PARTS), live.own(PARTS))


def test_a_backend_that_rehearses_changes_nothing(live: Live, frozen: Path) -> None:
    live.load(frozen)
    live.call("init_weight_transfer_engine", init_info={"folder": str(frozen)})
    live.load(frozen)
    assert live.told == ""
    assert_equal(live.engine.ask(PARTS), live.own(PARTS))


def patch(worker: Any, name: str, index: int, value: float, shape: tuple[int, ...]) -> None:
    values, indices = torch.tensor([value]), torch.tensor([index])
    patches = [CheckpointWeightPatch(name, shape, values.dtype, values, indices)]
    load_checkpoint_weight_patches(worker.get_model(), patches)


@pytest.mark.story("weights that are written without names")
def test_a_part_of_a_tensor_leaves_unknown_weights(live: Live) -> None:
    """As the backend `sparse_nccl` writes it: NaN stands for every element that stays."""
    name = "model.visual.blocks.0.norm1.weight"
    tensor = load_file(live.checkpoint / WEIGHTS)[name]
    live.call(patch, name=name, index=1, value=tensor[1].item(), shape=tuple(tensor.shape))
    assert live.told is None


def test_a_call_while_the_engine_sleeps_reads_no_memory(live: Live) -> None:
    """On a GPU, the weights have no memory then."""
    live.engine.llm.sleep(level=1)
    try:
        assert live.call(nothing) == [1]
        assert live.told == ""
    finally:
        live.engine.llm.wake_up()
    assert live.call(nothing) == [1]
    assert live.told is None


@pytest.mark.attack("a trainer that dies in an update")
def test_an_update_that_fails_leaves_unknown_weights(live: Live, trained: Path) -> None:
    with pytest.raises(OSError, match="the trainer has died"):
        live.call(fail_halfway, folder=str(trained))
    assert live.told is None
    live.load(live.checkpoint)
    assert live.told == ""


def test_memory_of_the_tower_is_compared() -> None:
    model = torch.nn.ModuleDict({part: torch.nn.Linear(8, 8) for part in ("visual", "language_model")})
    before = tower_digest(model)
    with torch.no_grad():
        model["language_model"].weight.mul_(2)
        assert tower_digest(model) == before
        model["visual"].weight[3, 4] += 1e-3
        assert tower_digest(model) not in (before, b"")
        model["visual"].weight[3, 4] -= 1e-3
    model["visual"].bias = torch.nn.Parameter(torch.empty(0))
    assert tower_digest(model) == b""


def test_calls_that_leave_the_weights_are_calls_of_vllms_workers() -> None:
    from vllm.v1.worker.gpu_worker import Worker

    missing = {name for name in LEAVE_WEIGHTS if not hasattr(Worker, name)}
    assert not missing


@pytest.mark.parametrize(
    "options", [{"tensor_parallel_size": 2}, {"limit_mm_per_prompt": {"image": 0, "video": 0}}]
)
def test_other_engines_compare_too(
    checkpoint: Path, frozen: Path, trained: Path, options: dict[str, Any]
) -> None:
    """Two ranks, of which each has a part of the tower, and an engine without a tower."""
    live = Live(checkpoint, **options)
    try:
        before = live.engine.ask(PARTS)
        live.load(frozen)
        if "limit_mm_per_prompt" in options:
            live.call(nothing)  # no memory of a tower could change
        assert live.told == ""
        live.load(trained)
        assert live.told == model_fingerprint(trained).hex()
        live.serve(trained)
        assert live.engine.ask(PARTS).distance(before) > 1e-3
        live.load(checkpoint)
        live.serve(checkpoint)
        live.engine.forget()
        assert_equal(live.engine.ask(PARTS), before)
    finally:
        live.close()


def test_without_a_tower_a_backend_without_names_leaves_unknown_weights(checkpoint: Path) -> None:
    with pytest.MonkeyPatch.context() as patched:
        patched.setitem(WeightTransferEngineFactory._registry, "nccl_m2n", lambda: IntoMemory)
        limits = {"image": 0, "video": 0}
        live = Live(checkpoint, limit_mm_per_prompt=limits, weight_transfer_config={"backend": "nccl_m2n"})
    try:
        for method, options in (
            ("start_weight_update", {}),
            ("update_weights", {"update_info": {"folder": str(checkpoint)}}),
            ("finish_weight_update", {}),
        ):
            assert live.told == ""
            live.call(method, **options)
        assert live.told is None
    finally:
        live.close()


def test_sixteen_chats_go_on_while_a_frozen_tower_is_written(checkpoint: Path, trained: Path) -> None:
    service = Restartable(checkpoint)
    service.start()
    prompts = [content(prompt(7300 + seed, 2)) for seed in range(16)]
    written = threading.Event()
    with serving(checkpoint, service.endpoint, environment={"VLLM_SERVER_DEV_MODE": "1"}) as http:

        def call(method: str, **options: str) -> None:
            body = {"method": method, "kwargs": options}
            assert httpx.post(f"{http.url}/collective_rpc", json=body, timeout=600).status_code == 200

        def chats(index: int) -> int:
            for number in count():
                salt = f"{index} {number}"  # which no cache has
                response = http.chat(prompts[index], cache_salt=salt)
                assert response.status_code == 200, http.log.read_text()
                http_equal(top(response.json()["choices"][0]), expected[index])
                if written.is_set():
                    return number
            raise AssertionError

        first = [http.chat(each) for each in prompts]
        assert {each.status_code for each in first} == {200}, [each.text for each in first]
        expected = [top(each.json()["choices"][0]) for each in first]
        with ThreadPoolExecutor(len(prompts)) as pool:
            running = [pool.submit(chats, index) for index in range(len(prompts))]
            for _ in range(3):
                call("reload_weights", weights_path=str(checkpoint))
                call("reset_encoder_cache")
            written.set()
            for each in running:
                each.result()
        call("reload_weights", weights_path=str(trained))
        refused = http.chat(prompts[0])
        assert (refused.status_code, "retry-after" in refused.headers) == (503, True), refused.text
        moved = Restartable(trained)
        service.kill()
        moved.endpoint = service.endpoint
        moved.start()
        deadline = time.monotonic() + PATIENCE_S
        while (response := http.chat(prompts[0])).status_code == 503:
            assert time.monotonic() < deadline, response.text
        assert response.status_code == 200, response.text
        assert moved.encodes() == 2
        moved.kill()
