"""Configurations with which SGLang refuses to start, and the reasons that it gives."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from testing.engine_flags import SGLANG_VARIABLES
from testing.processes import StartError
from testing.sglang_engine import SglangEngine
from tests.sglang.conftest import checkpoint_of, variables
from tests.vllm.restartable import Restartable


def refusal(model: Path, *flags: str, environment: dict[str, str]) -> str:
    """Start an engine that ends by itself, and return its log."""
    engine = SglangEngine(model, *flags, environment=environment)
    try:
        with pytest.raises(StartError, match="did not start"):
            engine.wait_until_it_answers()
        return engine.log.read_text()
    finally:
        engine.stop()


@pytest.mark.story("a service of another model")
def test_a_service_of_another_checkpoint_is_refused_with_both_fingerprints(
    service: Restartable, tmp_path: Path
) -> None:
    other = checkpoint_of("qwen3_vl", tmp_path, seed=1)
    log = refusal(other, environment=variables(service.endpoint))
    assert "serves another model: model fingerprint: the engine has" in log


@pytest.mark.story("image settings or adapters that the engine alone has")
def test_settings_that_change_images_in_sglang_alone_are_refused(
    checkpoint: Path, service: Restartable
) -> None:
    config = '{"image": {"max_pixels": 4096}}'
    log = refusal(checkpoint, "--mm-process-config", config, environment=variables(service.endpoint))
    assert "--mm-process-config changes images only in SGLang" in log


@pytest.mark.story("no tower in the engine")
def test_a_checkpoint_without_a_tower_is_refused(service: Restartable, tmp_path: Path) -> None:
    model = checkpoint_of("qwen3_vl", tmp_path)
    config = json.loads((model / "config.json").read_text())
    (model / "config.json").write_text(json.dumps({**config, "language_model_only": True}))
    log = refusal(model, environment=variables(service.endpoint))
    assert "SGLang has no vision tower, because the checkpoint is marked language_model_only" in log


@pytest.mark.story("pipeline parallel")
def test_pipeline_stages_are_refused(checkpoint: Path, service: Restartable) -> None:
    log = refusal(checkpoint, "--pp-size", "2", environment=variables(service.endpoint))
    assert "--pp-size must be 1" in log


@pytest.mark.story("no tower in the engine")
def test_an_engine_that_would_drop_its_tower_is_refused(checkpoint: Path, service: Restartable) -> None:
    log = refusal(checkpoint, "--language-only", environment=variables(service.endpoint))
    assert "--language-only sends images to SGLang's own encoders; remove it" in log


@pytest.mark.story("a configuration that cannot work")
@pytest.mark.parametrize("package", ["SGLANG_EXTERNAL_MM_PROCESSOR_PACKAGE", "SGLANG_EXTERNAL_MODEL_PACKAGE"])
def test_one_package_without_the_other_is_refused(
    checkpoint: Path, service: Restartable, package: str
) -> None:
    environment = variables(service.endpoint)
    del environment[package]
    log = refusal(checkpoint, environment=environment)
    assert f"the encoder service needs {package}=prefill_client.sglang." in log


@pytest.mark.story("a configuration that cannot work")
@pytest.mark.parametrize("package", ["processors", "models"])
def test_a_package_that_does_not_support_the_release_stops_sglang(package: str) -> None:
    program = f"""
from importlib import metadata
version = metadata.version
metadata.version = lambda name: "0.5.24" if name == "sglang" else version(name)
from sglang.srt.managers.multimodal_processor import import_processors
from sglang.srt.models.registry import import_model_classes
{"import_processors" if package == "processors" else "import_model_classes"}("prefill_client.sglang.{package}")
"""
    environment = {**os.environ, **SGLANG_VARIABLES}
    ran = subprocess.run(
        [sys.executable, "-c", program], env=environment, capture_output=True, text=True, check=False
    )
    assert ran.returncode != 0
    assert "prefill_client.sglang supports SGLang >=0.5.21,<0.5.24, but 0.5.24 is installed" in ran.stderr
