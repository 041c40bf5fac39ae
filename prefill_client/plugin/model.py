"""An engine's model, and whether the service makes the rows that this model expects."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

from encoder_contract.checkpoint import model_fingerprint
from encoder_contract.processor import ProcessorSettings
from prefill_client.plugin.service_settings import ServiceSettings
from prefill_client.transport.connection import Description

Difference = tuple[str, object, object]
"""(what differs, the engine's value, the service's value)."""

# The files of a repository on the Hugging Face Hub that fingerprints cover, and the settings for videos.
_FILES = ["config.json", "*.safetensors", "*.safetensors.index.json", "*processor_config.json"]

fingerprint_of = cache(model_fingerprint)
"""`encoder_contract.checkpoint.model_fingerprint`; each process reads the vision weights of a folder once."""


@dataclass(frozen=True, slots=True)
class EngineModel:
    """The properties of an engine's checkpoint that decide the rows of an image.

    `config` is the Hugging Face configuration, and `dtype` the type of the engine's rows. `image_processor` and
    `folder` are called when they are needed. `folder` returns the checkpoint's folder; it raises `ValueError` or
    `OSError` if there is none. `lays_out_images`: the engine's own processor can place rows in the prompt if the
    service knows only their number. `fingerprint` is that of the vision weights; empty: those of the checkpoint.
    None: this process does not know them, and another compares.
    """

    config: Any
    dtype: str
    image_processor: Callable[[], Any]
    folder: Callable[[], Path]
    lays_out_images: bool = False
    fingerprint: bytes | None = b""


def checkpoint_folder(
    model: str,
    *,
    revision: str | None,
    cache_dir: str | None,
    ignore_patterns: list[str] | str | None = None,
) -> Path:
    """Return the folder of a checkpoint. A model of the Hugging Face Hub is looked up in, or fetched into, `cache_dir`.

    Raises `OSError` if the model can be neither found nor fetched.
    """
    if (folder := Path(model)).is_dir():
        return folder
    from huggingface_hub import constants, snapshot_download

    folder_name = snapshot_download(
        model,
        revision=revision,
        cache_dir=cache_dir,
        allow_patterns=_FILES,
        ignore_patterns=ignore_patterns,
        local_files_only=constants.HF_HUB_OFFLINE,
    )
    return Path(folder_name)


def check_description(settings: ServiceSettings, engine: EngineModel, description: Description) -> None:
    """Raise `ValueError` with both values of everything in which a service and this engine differ.

    The first time in a process, this reads the vision tensors of the engine's checkpoint.
    """
    found = [each for each in differences(engine, description) if each[1] != each[2]]
    if not found and not settings.takes_any_model:
        found = _different_fingerprints(engine, description)
    if found:
        listed = "; ".join(
            f"{what}: the engine has {engine_value}, the service {service_value}"
            for what, engine_value, service_value in found
        )
        raise ValueError(
            f"the encoder service at {', '.join(settings.endpoints)} serves another model: {listed}"
        )


def _different_fingerprints(engine: EngineModel, description: Description) -> list[Difference]:
    try:
        return [*checkpoint_differences(engine.folder(), description, engine.fingerprint)]
    except (OSError, ValueError) as error:
        raise ValueError(
            f"the service's model cannot be compared with the engine's: {error}. "
            'With "model_fingerprint": "any" the engine takes rows of any model of the same shape'
        ) from error


def differences(engine: EngineModel, description: Description) -> Iterator[Difference]:
    """Yield each property that decides the rows of an image, with the values of the engine and of the service."""
    config, geometry = engine.config, description.geometry
    vision: Any = getattr(config, "vision_config", None)
    hidden = config.get_text_config().hidden_size
    levels = len(getattr(vision, "deepstack_visual_indexes", None) or ())
    yield "model_type", config.model_type, description.model_type
    yield "dtype", engine.dtype, description.dtype
    yield "hidden size", hidden, description.hidden
    yield "DeepStack levels", levels, description.deepstack_levels
    yield "row width", hidden * (1 + levels), description.width
    if geometry is None:
        if not engine.lays_out_images:
            yield "geometry", "that of its image processor", "none: only the service counts this model's rows"
        return
    yield "patch size", vision.patch_size, geometry.patch_size
    yield "merge size", vision.spatial_merge_size, geometry.merge_size
    processor = engine.image_processor()
    yield "processor's patch size", processor.patch_size, geometry.patch_size
    yield "processor's merge size", processor.merge_size, geometry.merge_size
    yield "min_pixels", processor.size["shortest_edge"], geometry.min_pixels
    yield "max_pixels", processor.size["longest_edge"], geometry.max_pixels


def checkpoint_differences(
    folder: Path, description: Description, fingerprint: bytes | None = b""
) -> Iterator[Difference]:
    """Yield the fingerprints in which a checkpoint and a service differ: image processor, and vision weights.

    `fingerprint` replaces the model fingerprint of the checkpoint; None: that is not compared.

    The model fingerprint of a service that counts rows (no geometry) covers the files of the processor. Reads the
    vision tensors of the checkpoint. Raises `OSError` or `ValueError` for a folder that cannot be read.
    """
    pairs = []
    if fingerprint is not None:
        model = fingerprint or fingerprint_of(folder)
        pairs.append(("model fingerprint", model, description.model_fingerprint))
    if description.geometry is not None:
        processor = ProcessorSettings.from_folder(folder).fingerprint
        what = "image processor (image_mean, image_std, rescale_factor, pixel bounds, resampling)"
        pairs.append((what, processor, description.processor_fingerprint))
    for what, checkpoint, served in pairs:
        if checkpoint != served:
            yield what, f"{checkpoint.hex()} of {folder}", f"{served.hex()} of {description.model_name}"
