"""An engine refuses a service of another model before its weights load, with both values in the message."""

import asyncio
import json
import shutil
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import huggingface_hub
import pytest
from safetensors.torch import load_file, save_file
from vllm.engine.arg_utils import EngineArgs

from encoder_contract.checkpoint import model_fingerprint
from encoder_contract.errors import ModelMismatchError
from encoder_contract.processor import ProcessorSettings
from prefill_client import BlockingClient
from prefill_client.vllm import service_check
from prefill_client.vllm.cache_manager import EncoderServiceCacheManager
from prefill_client.vllm.middleware import EncoderServiceMiddleware
from prefill_client.vllm.service_check import check_service, folder_of, video_settings
from prefill_client.vllm.videos import UnsupportedVideoError
from prefill_client.vllm.vllm_settings import VllmSettings
from testing.checkpoints import write_checkpoint
from testing.server_process import ServerProcess
from testing.vllm_engine import CONNECTOR
from tests.vllm.conftest import SMALL, checkpoint_of


def config_of(model: Path, endpoint: str, **options: Any) -> Any:
    """Return the configuration that `vllm serve` makes of these flags."""
    extra = {"endpoints": endpoint, **options.pop("extra", {})}
    transfer = {**CONNECTOR, "ec_connector_extra_config": extra, **options.pop("transfer", {})}
    arguments = {"dtype": "float32", "max_model_len": 1024, **options}
    return EngineArgs(str(model), ec_transfer_config=transfer, **arguments).create_engine_config()


def check(config: Any) -> None:
    check_service(VllmSettings.read(config.ec_transfer_config.ec_connector_extra_config), config)


def test_a_service_of_the_same_checkpoint_is_accepted_and_logged(
    checkpoint: Path, service: ServerProcess, monkeypatch: pytest.MonkeyPatch
) -> None:
    logged: list[str] = []
    monkeypatch.setattr(service_check._log, "info", lambda text, *values: logged.append(text % values))
    check(config_of(checkpoint, service.endpoint))
    assert any(service.endpoint in line for line in logged), "the log names the service"


def other_levels(folder: Path) -> Path:
    vision = {"deepstack_visual_indexes": [1, 2]}
    return write_checkpoint(folder, preprocessor=SMALL["qwen3_vl"], vision=vision)


def other_pixels(folder: Path) -> Path:
    return write_checkpoint(folder, preprocessor={"size": {"longest_edge": 32768, "shortest_edge": 1024}})


@pytest.mark.parametrize(
    ("made", "messages"),
    [
        (
            lambda folder: checkpoint_of("qwen2_5_vl", folder),
            ["model_type: the engine has qwen2_5_vl", "patch size"],
        ),
        (
            other_levels,
            ["DeepStack levels: the engine has 2, the service 3", "row width: the engine has 384"],
        ),
        (other_pixels, ["max_pixels: the engine has 32768, the service 65536"]),
    ],
)
def test_another_model_is_refused_with_both_values(
    made: Callable[[Path], Path], messages: list[str], service: ServerProcess, tmp_path: Path
) -> None:
    with pytest.raises(ValueError, match="serves another model") as refused:
        check(config_of(made(tmp_path), service.endpoint))
    assert all(each in str(refused.value) for each in messages)


def test_another_dtype_is_refused(checkpoint: Path, service: ServerProcess) -> None:
    with pytest.raises(ValueError, match="dtype: the engine has bfloat16, the service float32"):
        check(config_of(checkpoint, service.endpoint, dtype="bfloat16"))


def test_another_fingerprint_than_the_configured_one_is_refused(
    checkpoint: Path, service: ServerProcess
) -> None:
    with pytest.raises(ModelMismatchError):
        check(config_of(checkpoint, service.endpoint, extra={"model_fingerprint": "00" * 32}))


def with_processor(checkpoint: Path, folder: Path, changes: dict[str, object]) -> Path:
    """Copy a checkpoint, with changes in its preprocessor_config.json."""
    shutil.copytree(checkpoint, folder)
    path = folder / "preprocessor_config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))
    return folder


def other_weights(folder: Path) -> Path:
    return write_checkpoint(folder, preprocessor=SMALL["qwen3_vl"], seed=1)


@pytest.mark.story("a service of another model")
def test_another_checkpoint_is_refused_with_both_fingerprints(
    checkpoint: Path, service: ServerProcess, tmp_path: Path
) -> None:
    other = other_weights(tmp_path)
    with pytest.raises(ValueError, match="serves another model: model fingerprint") as refused:
        check(config_of(other, service.endpoint))
    fingerprints = model_fingerprint(other), model_fingerprint(checkpoint)
    assert all(each.hex() in str(refused.value) for each in fingerprints)


@pytest.mark.parametrize(
    ("setting", "value"),
    [("image_mean", [0.48, 0.46, 0.41]), ("image_std", [0.27, 0.26, 0.28]), ("rescale_factor", 0.00392)],
)
def test_another_image_processor_is_refused_with_both_fingerprints(
    checkpoint: Path, service: ServerProcess, tmp_path: Path, setting: str, value: object
) -> None:
    other = with_processor(checkpoint, tmp_path / "other", {setting: value})
    with pytest.raises(ValueError, match=r"serves another model: image processor \(image_mean") as refused:
        check(config_of(other, service.endpoint))
    fingerprints = [ProcessorSettings.from_folder(folder).fingerprint for folder in (other, checkpoint)]
    assert all(each.hex() in str(refused.value) for each in fingerprints)


def test_a_processor_that_the_service_does_not_implement_cannot_be_compared(
    checkpoint: Path, service: ServerProcess, tmp_path: Path
) -> None:
    other = with_processor(checkpoint, tmp_path / "other", {"resample": 2})
    with pytest.raises(ValueError, match=r"cannot be compared .*resample = 2 is not supported"):
        check(config_of(other, service.endpoint))


def test_model_fingerprint_any_accepts_every_model_with_a_warning(
    service: ServerProcess, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    logged: list[str] = []
    monkeypatch.setattr(service_check._log, "warning", lambda text, *values: logged.append(text % values))
    check(config_of(other_weights(tmp_path), service.endpoint, extra={"model_fingerprint": "any"}))
    assert any('"any"' in line for line in logged)


@pytest.mark.story("quantised language weights")
def test_a_checkpoint_with_other_language_weights_is_accepted(service: ServerProcess, tmp_path: Path) -> None:
    other = checkpoint_of("qwen3_vl", tmp_path)
    tensors = load_file(other / "model.safetensors")
    tensors["lm_head.weight"] += 1
    save_file(tensors, other / "model.safetensors", metadata={"format": "pt"})
    check(config_of(other, service.endpoint))


def test_unreadable_weights_are_named_with_advice(service: ServerProcess, tmp_path: Path) -> None:
    other = checkpoint_of("qwen3_vl", tmp_path)
    (other / "model.safetensors").unlink()
    with pytest.raises(ValueError, match=r"cannot be compared .*model\.safetensors.*\"any\""):
        check(config_of(other, service.endpoint))
    with pytest.raises(ValueError, match=r"cannot be compared .*--load-format dummy.*\"any\""):
        check(config_of(other, service.endpoint, load_format="dummy"))


def test_a_model_of_the_hub_is_found_in_vllms_cache(
    checkpoint: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", True)
    revision = "5" * 40
    snapshot = tmp_path / "models--org--name" / "snapshots" / revision
    shutil.copytree(checkpoint, snapshot)
    config = config_of(checkpoint, "127.0.0.1:1", download_dir=str(tmp_path))
    config.model_config.model, config.model_config.revision = "org/name", revision
    assert folder_of(config) == snapshot
    config.model_config.revision = "6" * 40
    with pytest.raises(OSError, match="snapshot"):
        folder_of(config)


@pytest.mark.story("pipeline parallel")
def test_pipeline_parallel_is_refused(checkpoint: Path, service: ServerProcess) -> None:
    config = config_of(checkpoint, service.endpoint)
    config.parallel_config.pipeline_parallel_size = 2
    with pytest.raises(ValueError, match="--pipeline-parallel-size above 1 is not supported"):
        check(config)


@pytest.mark.story("several ranks with `external_launcher`")
def test_ranks_with_a_scheduler_each_are_refused(checkpoint: Path, service: ServerProcess) -> None:
    config = config_of(checkpoint, service.endpoint)
    config.parallel_config.distributed_executor_backend = "external_launcher"
    check(config)
    config.parallel_config.world_size = 2
    with pytest.raises(ValueError, match="external_launcher is not supported with several ranks"):
        check(config)


@pytest.mark.story("image settings or adapters that the engine alone has")
def test_lora_on_the_tower_is_refused_and_on_the_language_model_accepted(
    checkpoint: Path, service: ServerProcess
) -> None:
    check(config_of(checkpoint, service.endpoint, enable_lora=True))
    with pytest.raises(ValueError, match="--enable-tower-connector-lora is not supported") as refused:
        check(config_of(checkpoint, service.endpoint, enable_lora=True, enable_tower_connector_lora=True))
    assert len(str(refused.value).splitlines()) == 1


@pytest.mark.parametrize(("modality", "served"), [("image", False), ("video", False), ("audio", True)])
def test_videos_are_refused_beside_an_adapter_that_a_modality_chooses(
    checkpoint: Path, service: ServerProcess, modality: str, served: bool
) -> None:
    config = config_of(checkpoint, service.endpoint, enable_lora=True, default_mm_loras={modality: "folder"})
    check(config)
    client = BlockingClient.connect(service.endpoint)
    try:
        with nullcontext() if served else pytest.raises(UnsupportedVideoError, match="--default-mm-loras"):
            video_settings(config, client.description)
    finally:
        client.close()


@pytest.mark.story("image settings or adapters that the engine alone has")
def test_processor_options_of_the_engine_are_refused(checkpoint: Path, service: ServerProcess) -> None:
    with pytest.raises(ValueError, match="--mm-processor-kwargs"):
        check(config_of(checkpoint, service.endpoint, mm_processor_kwargs={"max_pixels": 4096}))


@pytest.mark.parametrize("role", ["ec_producer", "ec_both"])
def test_a_role_that_produces_rows_is_refused(checkpoint: Path, service: ServerProcess, role: str) -> None:
    with pytest.raises(ValueError, match="ec_role must be ec_consumer"):
        check(config_of(checkpoint, service.endpoint, transfer={"ec_role": role}))


@pytest.mark.story("a configuration that cannot work")
@pytest.mark.parametrize(
    ("extra", "message"),
    [
        ({"endpoint": "x"}, "unknown keys .'endpoint'"),
        ({"endpoints": []}, "endpoints is missing"),
        ({"endpoints": ["127.0.0.1:1", "nowhere"]}, "endpoints: nowhere must be host:port"),
        ({"endpoints": [50051]}, r"endpoints must be host:port, or a list of those, got \[50051\]"),
        ({"endpoints": 50051}, "endpoints must be host:port, or a list of those, got 50051"),
        ({"endpoints": {"127.0.0.1:1": 1}}, "endpoints must be host:port, or a list of those"),
        ({"endpoints": "127.0.0.1:0"}, "endpoints: 127.0.0.1:0 must have the port of a server"),
        ({"endpoints": "dns:unix:/encoder.sock"}, "endpoints: dns:unix:/encoder.sock must be dns:host:port"),
        ({"host_gib": 0}, "host_gib must be a number above 0"),
        ({"device_gib": -1}, "device_gib must be a number of 0 or more"),
        ({"model_fingerprint": "abc"}, "model_fingerprint must be 64 hexadecimal digits"),
        ({"gating": "all"}, "gating must be one of"),
        ({"shared_memory": "yes"}, "shared_memory must be true or false"),
    ],
)
def test_a_wrong_setting_is_named(extra: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        VllmSettings.read({"endpoints": "127.0.0.1:1", **extra})


@pytest.mark.story("a configuration that cannot work")
def test_the_middleware_without_the_connector_is_refused(checkpoint: Path) -> None:
    config = EngineArgs(str(checkpoint), max_model_len=1024).create_engine_config()
    state = SimpleNamespace(vllm_config=config, args=SimpleNamespace(), engine_client=None)
    middleware = EncoderServiceMiddleware(lambda *_: asyncio.sleep(0))
    with pytest.raises(RuntimeError, match="needs EncoderServiceConnector in --ec-transfer-config"):
        middleware._service_of({"app": SimpleNamespace(state=state)})


def test_the_cache_manager_without_the_connector_is_refused(checkpoint: Path) -> None:
    config = EngineArgs(str(checkpoint), max_model_len=1024).create_engine_config()
    with pytest.raises(ValueError, match="needs EncoderServiceConnector"):
        EncoderServiceCacheManager.create_manager(cache_size=1, vllm_config=config)
