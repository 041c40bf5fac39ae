"""A plug-in refuses a service whose image processor or weights differ from its engine's checkpoint."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
from transformers import AutoConfig, AutoImageProcessor

from encoder_contract.processor import ProcessorSettings
from prefill_client import EncoderClient
from prefill_client.plugin.model import EngineModel, check_description
from prefill_client.plugin.service_settings import ServiceSettings


class Settings(ServiceSettings):
    """The settings of some engine."""

    location = "test"


def engine_of(folder: Path) -> EngineModel:
    return EngineModel(
        config=AutoConfig.from_pretrained(folder),
        dtype="float32",
        image_processor=lambda: AutoImageProcessor.from_pretrained(folder),
        folder=lambda: folder,
    )


def changed(checkpoint: Path, folder: Path, **changes: object) -> Path:
    """Copy a checkpoint, with changes in its preprocessor_config.json."""
    shutil.copytree(checkpoint, folder)
    path = folder / "preprocessor_config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))
    return folder


@pytest.mark.parametrize(
    ("setting", "value"),
    [("image_mean", [0.48, 0.46, 0.41]), ("image_std", [0.27, 0.26, 0.28]), ("rescale_factor", 0.00392)],
)
async def test_another_image_processor_is_refused_with_both_fingerprints(
    checkpoint: Path, client: EncoderClient, tmp_path: Path, setting: str, value: object
) -> None:
    other = changed(checkpoint, tmp_path / "other", **{setting: value})
    settings = Settings(("a-service",))
    check_description(settings, engine_of(checkpoint), client.description)
    with pytest.raises(
        ValueError, match=r"a-service serves another model: image processor \(image_mean"
    ) as refused:
        check_description(settings, engine_of(other), client.description)
    fingerprints = [ProcessorSettings.from_folder(each).fingerprint for each in (other, checkpoint)]
    assert all(each.hex() in str(refused.value) for each in fingerprints)


@pytest.mark.parametrize("change", [{"resample": 2}, {"do_normalize": False}])
async def test_a_processor_that_the_service_does_not_implement_cannot_be_compared(
    checkpoint: Path, client: EncoderClient, tmp_path: Path, change: dict[str, object]
) -> None:
    other = changed(checkpoint, tmp_path / "other", **change)
    with pytest.raises(ValueError, match=f"cannot be compared .*{next(iter(change))} = .* is not supported"):
        check_description(Settings(("a-service",)), engine_of(other), client.description)


async def test_all_differences_are_named(
    kept_checkpoint: Callable[..., Path], client: EncoderClient, tmp_path: Path
) -> None:
    other = changed(kept_checkpoint(seed=7), tmp_path / "other", image_mean=[0.1, 0.2, 0.3])
    with pytest.raises(ValueError, match=r"model fingerprint: .*; image processor"):
        check_description(Settings(("a-service",)), engine_of(other), client.description)
