"""Checks, before the weights load, that the service makes rows for this engine's model."""

import logging
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from encoder_contract.checkpoint import configuration_fingerprint
from encoder_contract.errors import DeadlineError, UnavailableError
from prefill_client.blocking import BlockingClient
from prefill_client.transport.connection import Description
from prefill_client.vllm.engine_checkpoint import fingerprints_of, folder_of
from prefill_client.vllm.settings import Settings
from prefill_client.vllm.shared_store import RowKind

if TYPE_CHECKING:
    from vllm.config import VllmConfig

_log = logging.getLogger("vllm.encoder_service")

Difference = tuple[str, object, object]
"""(what differs, the engine's value, the service's value)."""


def check_service(settings: Settings, config: "VllmConfig") -> None:
    """Compare the service with this engine.

    Raises `ValueError` with both values of everything that differs, and `UnavailableError` if no server answers within
    `start_timeout_s`. An engine with its own tower may start without one.
    """
    refuse_configuration(config)
    if settings.takes_any_model:
        _log.warning(
            'the service\'s model is not compared with %s, as "model_fingerprint" is "any": if it has other weights, '
            "answers about images are wrong",
            config.model_config.model,
        )
    try:
        description = _describe(settings)
    except (UnavailableError, DeadlineError) as error:
        if settings.without_service != "own_tower":
            raise
        _log.warning("the engine starts without the encoder service: %s", error.message)
    else:
        check_description(settings, config, description)


def check_description(settings: Settings, config: "VllmConfig", description: Description) -> None:
    """Raise `ValueError` with both values of everything in which a service and this engine differ.

    The first time in a process, this reads the vision tensors of the engine's checkpoint.
    """
    differing = [each for each in differences(config.model_config, description) if each[1] != each[2]]
    if not differing and not settings.takes_any_model:
        differing = [*_other_checkpoint(config, description)]
    if differing:
        told = "; ".join(
            f"{what}: the engine has {ours}, the service {theirs}" for what, ours, theirs in differing
        )
        raise ValueError(
            f"the encoder service at {', '.join(settings.endpoints)} serves another model: {told}"
        )


def refuse_configuration(config: "VllmConfig") -> None:
    """Raise `ValueError` for settings of the engine with which our rows would be wrong or could not be read."""
    _refuse_everywhere(config)
    multimodal = config.model_config.multimodal_config
    if multimodal.mm_processor_kwargs or multimodal.media_io_kwargs:
        raise ValueError(
            "--mm-processor-kwargs and --media-io-kwargs change images in the engine alone; set them in the "
            "checkpoint's preprocessor_config.json, which the encoder service reads too"
        )


def refuse_sharing(config: "VllmConfig") -> None:
    """Raise `ValueError` for settings with which this engine cannot share the rows of its tower."""
    _refuse_everywhere(config)
    if config.model_config.multimodal_config.mm_processor_cache_type == "shm":
        raise ValueError(
            "--mm-processor-cache-type shm is not supported with ec_both: the scheduler does not see the images"
        )
    if not hasattr(config.model_config.hf_config.vision_config, "spatial_merge_size"):
        model_type = config.model_config.hf_config.model_type
        raise ValueError(f"ec_both does not support {model_type}: its images have no grid")


def _refuse_everywhere(config: "VllmConfig") -> None:
    transfer = config.ec_transfer_config
    if not transfer.is_ec_consumer:
        raise ValueError(
            "ec_role must be ec_consumer, or ec_both for an engine that shares its own tower's embeddings"
        )
    if config.model_config.multimodal_config is None:
        raise ValueError(f"{config.model_config.model} does not accept images")
    if config.lora_config is not None and getattr(config.lora_config, "enable_tower_connector_lora", False):
        raise ValueError(
            "LoRA on the vision tower is not supported: the service encodes with the checkpoint's own weights"
        )
    if config.parallel_config.pipeline_parallel_size > 1:
        raise ValueError(
            "--pipeline-parallel-size above 1 is not supported: the engine would never release the rows of images; "
            "use --tensor-parallel-size"
        )
    if config.parallel_config.nnodes > 1:
        raise ValueError(
            "an engine with workers on several hosts is not supported: they cannot map the same shared memory"
        )


def row_kind(config: "VllmConfig") -> RowKind:
    """Return the kind of row that this engine's own tower makes."""
    model = config.model_config
    vision = model.hf_config.vision_config
    levels = len(getattr(vision, "deepstack_visual_indexes", None) or ())
    width = model.hf_config.get_text_config().hidden_size * (1 + levels)
    return RowKind(width, str(model.dtype).removeprefix("torch."), vision.spatial_merge_size)


def differences(model: Any, description: Description) -> Iterator[Difference]:
    """Yield the properties that decide the rows of an image: the values of the engine's checkpoint and the service."""
    from vllm.transformers_utils.processor import cached_image_processor_from_config

    vision, geometry = model.hf_config.vision_config, description.geometry
    hidden = model.hf_config.get_text_config().hidden_size
    levels = len(getattr(vision, "deepstack_visual_indexes", None) or ())
    yield "model_type", model.hf_config.model_type, description.model_type
    yield "dtype", str(model.dtype).removeprefix("torch."), description.dtype
    yield "hidden size", hidden, description.hidden
    yield "DeepStack levels", levels, description.deepstack_levels
    yield "row width", hidden * (1 + levels), description.width
    yield "patch size", vision.patch_size, geometry.patch_size
    yield "merge size", vision.spatial_merge_size, geometry.merge_size
    processor = cached_image_processor_from_config(model)
    yield "processor's patch size", processor.patch_size, geometry.patch_size
    yield "processor's merge size", processor.merge_size, geometry.merge_size
    yield "min_pixels", processor.size["shortest_edge"], geometry.min_pixels
    yield "max_pixels", processor.size["longest_edge"], geometry.max_pixels


def _other_checkpoint(config: "VllmConfig", description: Description) -> Iterator[Difference]:
    """Yield the fingerprints if the service encodes with another checkpoint than the engine's.

    A service that only stores has the fingerprint of its `--model-fingerprint`; without that it cannot be compared.
    """
    try:
        folder = folder_of(config)
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


def _describe(settings: Settings) -> Description:
    endpoints = ", ".join(settings.endpoints)
    wait = settings.without_service != "own_tower"
    timeout_s = settings.start_timeout_s if wait else settings.submit_timeout_s
    _log.info("waiting for the encoder service at %s, at most %g s", endpoints, timeout_s)
    with BlockingClient.connect(
        settings.endpoints,
        model_fingerprint=settings.demanded_fingerprint,
        credentials=settings.credentials,
        timeout_s=timeout_s,
        wait=wait,
    ) as client:
        return client.description
