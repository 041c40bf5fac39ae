"""An engine's model, and whether the service makes the rows that this model takes."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

from encoder_contract.checkpoint import configuration_fingerprint, model_fingerprints
from prefill_client.engine.settings import ServiceSettings
from prefill_client.transport.connection import Description

Difference = tuple[str, object, object]
"""(what differs, the engine's value, the service's value)."""

# The files of a repository on the Hugging Face Hub that fingerprints are made of, and the settings for videos.
_FILES = ["config.json", "*.safetensors", "*.safetensors.index.json", "*processor_config.json"]

fingerprints_of = cache(model_fingerprints)
"""`encoder_contract.checkpoint.model_fingerprints`; each process reads the vision weights of a folder once."""


@dataclass(frozen=True, slots=True)
class EngineModel:
    """What decides the rows of an image, as an engine's checkpoint has it.

    `config` is the Hugging Face configuration, `dtype` the type of the engine's rows. `image_processor` and `folder`
    are called when they are needed. `folder` returns the checkpoint's, or raises `ValueError` or `OSError`.
    `lays_out_images`: the engine's own processor knows where rows go of which the service tells only the number.
    """

    config: Any
    dtype: str
    image_processor: Callable[[], Any]
    folder: Callable[[], Path]
    lays_out_images: bool = False


def checkpoint_folder(
    model: str,
    *,
    revision: str | None,
    cache_dir: str | None,
    ignore_patterns: list[str] | str | None = None,
) -> Path:
    """Return the folder of a checkpoint; a model of the Hugging Face Hub is looked up in `cache_dir`, or fetched there.

    Raises `OSError` when the model is neither here nor fetched.
    """
    if (folder := Path(model)).is_dir():
        return folder
    from huggingface_hub import constants, snapshot_download

    fetched = snapshot_download(
        model,
        revision=revision,
        cache_dir=cache_dir,
        allow_patterns=_FILES,
        ignore_patterns=ignore_patterns,
        local_files_only=constants.HF_HUB_OFFLINE,
    )
    return Path(fetched)


def check_description(settings: ServiceSettings, engine: EngineModel, description: Description) -> None:
    """Raise `ValueError` with both values of everything in which a service and this engine differ.

    The first time in a process, this reads the vision tensors of the engine's checkpoint.
    """
    differing = [each for each in differences(engine, description) if each[1] != each[2]]
    if not differing and not settings.takes_any_model:
        differing = [*_other_checkpoint(engine, description)]
    if differing:
        told = "; ".join(
            f"{what}: the engine has {ours}, the service {theirs}" for what, ours, theirs in differing
        )
        raise ValueError(
            f"the encoder service at {', '.join(settings.endpoints)} serves another model: {told}"
        )


def differences(engine: EngineModel, description: Description) -> Iterator[Difference]:
    """Yield the properties that decide the rows of an image: the values of the engine's checkpoint and the service."""
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


def _other_checkpoint(engine: EngineModel, description: Description) -> Iterator[Difference]:
    """Yield the fingerprints if the service encodes with another checkpoint than the engine's.

    A service that only stores has the fingerprint of its `--model-fingerprint`; without that it cannot be compared.
    """
    try:
        folder = engine.folder()
        fingerprints = fingerprints_of(folder)
    except (OSError, ValueError) as error:
        raise ValueError(
            f"the service's model cannot be compared with the engine's: {error}. "
            'With "model_fingerprint": "any" the engine takes rows of any model of the same shape'
        ) from error
    theirs = description.model_fingerprint
    if theirs not in fingerprints.values():
        ours = " or ".join(f"{each.hex()} ({precision})" for precision, each in fingerprints.items())
        only_stores = theirs == configuration_fingerprint(folder)
        yield (
            "model fingerprint",
            f"{ours} of {folder}",
            f"{theirs.hex()} of {'no weights (--store-only)' if only_stores else description.model_name}",
        )
