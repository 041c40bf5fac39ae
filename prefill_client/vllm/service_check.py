"""Before the weights load: whether the service makes the rows that this engine's model takes."""

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from prefill_client.blocking import BlockingClient
from prefill_client.transport.connection import Description
from prefill_client.vllm.settings import Settings

if TYPE_CHECKING:
    from vllm.config import VllmConfig

Difference = tuple[str, object, object]
"""What it is about, the engine's value, the service's."""


def check_service(settings: Settings, config: "VllmConfig") -> Description:
    """Return what the service says it is.

    Raises `ValueError` with both values of everything that differs, `UnavailableError` when no server answers in
    `start_timeout_s`.
    """
    refuse_configuration(config)
    description = _describe(settings)
    differing = [each for each in differences(config.model_config, description) if each[1] != each[2]]
    if differing:
        told = "; ".join(
            f"{what}: the engine has {ours}, the service {theirs}" for what, ours, theirs in differing
        )
        raise ValueError(
            f"the encoder service at {', '.join(settings.endpoints)} serves another model: {told}"
        )
    return description


def refuse_configuration(config: "VllmConfig") -> None:
    """Raise `ValueError` for settings of the engine under which our rows would be wrong or out of reach."""
    if config.ec_transfer_config.is_ec_producer:
        raise ValueError("ec_role is ec_consumer: the encoder service takes nothing from engines")
    multimodal = config.model_config.multimodal_config
    if multimodal is None:
        raise ValueError(f"{config.model_config.model} takes no images")
    if multimodal.mm_processor_kwargs or multimodal.media_io_kwargs:
        raise ValueError(
            "--mm-processor-kwargs and --media-io-kwargs change images in the engine alone; set them in the "
            "checkpoint's preprocessor_config.json, which the encoder service reads too"
        )
    if config.lora_config is not None and getattr(config.lora_config, "enable_tower_connector_lora", False):
        raise ValueError("LoRA on the vision tower: the encoder service has none")
    if config.parallel_config.nnodes > 1:
        raise ValueError("workers on several hosts cannot map the same rows: one host for each engine")


def differences(model: Any, description: Description) -> Iterator[Difference]:
    """Yield what decides the rows of an image, as the engine's checkpoint has it and as the service says."""
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


def _describe(settings: Settings) -> Description:
    fingerprint = bytes.fromhex(settings.model_fingerprint)
    with BlockingClient.connect(
        settings.endpoints, model_fingerprint=fingerprint, timeout_s=settings.start_timeout_s
    ) as client:
        return client.description
