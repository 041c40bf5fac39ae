"""The engine's model: its checkpoint, the kind of its rows, and whether the service makes the same rows."""

import logging
from copy import copy
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from encoder_contract.errors import InvalidRequestError
from encoder_contract.video import VideoSettings
from prefill_client.plugin import model
from prefill_client.plugin.model import EngineModel, checkpoint_folder
from prefill_client.plugin.service import check_at_start
from prefill_client.transport.connection import Description
from prefill_client.vllm.videos import UnsupportedVideoError
from prefill_client.vllm.vllm_settings import VllmSettings

if TYPE_CHECKING:
    from vllm.config import LoadConfig, ModelConfig, VllmConfig

_log = logging.getLogger("vllm.encoder_service")


@dataclass(frozen=True, slots=True)
class RowKind:
    """Width and type of a row."""

    width: int
    dtype: str


def check_service(settings: VllmSettings, config: "VllmConfig") -> None:
    """Compare the service with this engine.

    Raises `ValueError` with both values of everything that differs, and `UnavailableError` if no server answers within
    `start_timeout_s`. An engine with its own tower may start without one.
    """
    check_configuration(config)
    required = not settings.has_own_tower
    check = partial(check_description, settings, config, engine_model(config))
    model_name = config.model_config.model
    check_at_start(settings, check, _log, model=model_name, wait=required, required=required)


def check_description(
    settings: VllmSettings, config: "VllmConfig", engine: EngineModel, description: Description
) -> None:
    """Raise `ValueError` with both values of everything in which a service and this engine differ."""
    model.check_description(settings, engine, description)
    limits = config.model_config.multimodal_config
    if description.geometry is None and not limits.get_limit_per_prompt("image"):
        raise ValueError(
            f"--limit-mm-per-prompt takes no image: vLLM lays out the images of {description.model_type} with its own "
            "processor, so raise the limit; the tower stays loaded"
        )


def check_configuration(config: "VllmConfig") -> None:
    """Raise `ValueError` for settings of the engine with which our rows would be wrong or could not be read."""
    if config.ec_transfer_config is not None and config.ec_transfer_config.is_ec_producer:
        raise ValueError(
            "ec_role must be ec_consumer: the service encodes, and takes no rows of an engine's tower"
        )
    multimodal = config.model_config.multimodal_config
    if multimodal is None:
        raise ValueError(f"{config.model_config.model} does not accept images")
    if config.lora_config is not None and getattr(config.lora_config, "enable_tower_connector_lora", False):
        raise ValueError(
            "--enable-tower-connector-lora is not supported: the service encodes with the checkpoint's own weights; "
            "without it, adapters apply to the language model"
        )
    parallel = config.parallel_config
    if parallel.pipeline_parallel_size > 1:
        raise ValueError(
            "--pipeline-parallel-size above 1 is not supported: the engine would never release the rows of images; "
            "use --tensor-parallel-size"
        )
    if parallel.distributed_executor_backend == "external_launcher" and parallel.world_size > 1:
        raise ValueError(
            "--distributed-executor-backend external_launcher is not supported with several ranks: each has a "
            "scheduler of its own, and the rows of an image do not arrive in all of them before the same step"
        )
    if parallel.nnodes > 1:
        raise ValueError(
            "an engine with workers on several hosts is not supported: they cannot map the same shared memory"
        )
    if multimodal.mm_processor_kwargs or multimodal.media_io_kwargs:
        raise ValueError(
            "--mm-processor-kwargs and --media-io-kwargs change images in the engine alone; set them in the "
            "checkpoint's preprocessor_config.json, which the encoder service reads too"
        )


def video_settings(config: "VllmConfig", description: Description) -> VideoSettings:
    """Return the settings of the checkpoint for videos. Raises `UnsupportedVideoError` if none can be served."""
    if not description.video_decoder:
        raise UnsupportedVideoError("the encoder service takes no videos: send images")
    if config.model_config.multimodal_config.video_pruning_rate:
        raise UnsupportedVideoError(
            "videos cannot be served with --video-pruning-rate: the service prunes no rows"
        )
    if config.lora_config is not None and set(config.lora_config.default_mm_loras or ()) & {"image", "video"}:
        raise UnsupportedVideoError(
            "videos cannot be served with --default-mm-loras of images or videos: vLLM gets their frames as images, "
            "and would choose another adapter"
        )
    try:
        settings = VideoSettings.from_folder(folder_of(config))
    except (OSError, ValueError) as error:
        raise UnsupportedVideoError(f"videos cannot be served: {error}") from error
    if not settings.writes_time:
        raise UnsupportedVideoError(
            f"videos of {description.model_type} cannot be served: vLLM takes no times for a video whose rows come "
            "from outside, so the model would take each for one of two frames a second; send images"
        )
    return settings


def check_limits(config: "VllmConfig", *, images: int, videos: int, pairs: int = 0) -> None:
    """Refuse more images and videos in a prompt than `--limit-mm-per-prompt` allows, and pairs that count as images.

    An engine whose limit for images is 0 has no tower; vLLM then does not count what comes from outside.
    """
    limits = config.model_config.multimodal_config
    most_images, most_videos = limits.get_limit_per_prompt("image"), limits.get_limit_per_prompt("video")
    if not most_images:
        return
    for what, count, most in (("image", images, most_images), ("video", videos, most_videos)):
        if count > most:
            raise InvalidRequestError(
                f"At most {most} {what}(s) may be provided in one prompt, by --limit-mm-per-prompt."
            )
    if videos and images + pairs > most_images:
        raise UnsupportedVideoError(
            f"{images} images and {pairs} pairs of video frames are {images + pairs} images for vLLM, of which "
            f"--limit-mm-per-prompt allows {most_images}: raise that limit, or ask for fewer frames (fps)"
        )


def row_kind(config: "VllmConfig") -> RowKind:
    """Return the kind of row that this engine's own tower makes."""
    engine = config.model_config
    vision = getattr(engine.hf_config, "vision_config", None)
    levels = len(getattr(vision, "deepstack_visual_indexes", None) or ())
    width = engine.hf_config.get_text_config().hidden_size * (1 + levels)
    return RowKind(width, str(engine.dtype).removeprefix("torch."))


def folder_of(config: "VllmConfig") -> Path:
    """Return the checkpoint's folder. A model of the Hugging Face Hub is looked up in, or fetched into, vLLM's cache.

    An update of the weights from disk changes what `config` names. Raises `ValueError` for weights that come from no
    checkpoint, and `OSError` if a model cannot be found or fetched.
    """
    return _folder(config.model_config, config.load_config)


def _folder(model: "ModelConfig", load: "LoadConfig") -> Path:
    if load.load_format == "dummy":
        raise ValueError("--load-format dummy makes random weights: no other process has the same")
    return checkpoint_folder(
        model.model,
        revision=model.revision,
        cache_dir=load.download_dir,
        ignore_patterns=load.ignore_patterns,
    )


def engine_model(config: "VllmConfig") -> EngineModel:
    """Return this engine's model, to compare the service's with. Its checkpoint is the one that `config` names now."""
    from vllm.transformers_utils.processor import cached_image_processor_from_config

    model, load = copy(config.model_config), config.load_config
    return EngineModel(
        config=model.hf_config,
        dtype=str(model.dtype).removeprefix("torch."),
        image_processor=lambda: cached_image_processor_from_config(model),
        folder=lambda: _folder(model, load),
        lays_out_images=True,
    )
