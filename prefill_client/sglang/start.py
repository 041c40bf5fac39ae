"""Before SGLang serves: whether both packages are loaded, its tower is there, and the service has its model."""

import logging
from pathlib import Path
from typing import Any

import torch
from sglang.srt.environ import envs
from sglang.srt.runtime_context import get_disagg, get_mm, get_model

from encoder_contract.errors import DeadlineError, UnavailableError
from prefill_client.engine.model import EngineModel, check_description, checkpoint_folder
from prefill_client.engine.service import describe
from prefill_client.sglang.settings import Settings

PROCESSORS, MODELS = "prefill_client.sglang.processors", "prefill_client.sglang.models"

_log = logging.getLogger("sglang.encoder_service")


def check_packages() -> None:
    """Raise `ValueError` unless SGLang loads both packages: each makes what only the other can read."""
    variables = (envs.SGLANG_EXTERNAL_MM_PROCESSOR_PACKAGE, envs.SGLANG_EXTERNAL_MODEL_PACKAGE)
    for variable, package in zip(variables, (PROCESSORS, MODELS), strict=True):
        if variable.get() != package:
            raise ValueError(
                f"the encoder service needs {variable.name}={package}, and it is {variable.get()!r}"
            )


def check_configuration(pipeline_stages: int) -> None:
    """Raise `ValueError` for settings of SGLang under which our rows would be wrong, or have no tower beside them."""
    if (get_mm().mm_process_config or {}).get("image"):
        raise ValueError(
            "--mm-process-config changes images in SGLang alone; set it in the checkpoint's "
            "preprocessor_config.json, which the encoder service reads too"
        )
    if pipeline_stages > 1:
        raise ValueError(
            "--pp-size must be 1: a request whose images have no rows must end on all ranks, and only the first "
            "pipeline stage knows of it"
        )
    if get_disagg().language_only:
        raise ValueError(
            "--language-only sends images to SGLang's own encoders; leave it out: the tower has to be there for when "
            "the encoder service is not"
        )


def check_tower(tower: object) -> None:
    """Raise `ValueError` if SGLang has loaded no vision tower."""
    if tower is None:
        raise ValueError(
            "SGLang has no vision tower for this checkpoint, which is marked language_model_only; start it with the "
            "tower, which encodes when the encoder service does not answer"
        )


def engine_model(config: Any, image_processor: Any, dtype: torch.dtype) -> EngineModel:
    """Return what the service's model is compared with; `config` is the checkpoint's."""
    return EngineModel(
        config=config,
        dtype=str(dtype).removeprefix("torch."),
        image_processor=lambda: image_processor,
        folder=_folder,
    )


def check_service(settings: Settings, engine: EngineModel) -> None:
    """Ask the service what it is. SGLang has its own tower, so it starts without a service that does not answer.

    Raises `ValueError` with both values of everything that differs.
    """
    if settings.takes_any_model:
        _log.warning(
            'the service\'s model is not compared with %s, as "model_fingerprint" is "any": if it has other weights, '
            "answers about images are wrong",
            get_model().model_path,
        )
    endpoints = ", ".join(settings.endpoints)
    _log.info("waiting for the encoder service at %s, at most %g s", endpoints, settings.start_timeout_s)
    try:
        description = describe(settings, wait=True)
    except (UnavailableError, DeadlineError) as error:
        _log.warning("SGLang starts without the encoder service: %s", error.message)
    else:
        check_description(settings, engine, description)
        _log.info("images are encoded by the encoder service at %s", endpoints)


def _folder() -> Path:
    model = get_model()
    if model.load_format == "dummy":
        raise ValueError("--load-format dummy makes random weights: no other process has the same")
    return checkpoint_folder(model.model_path, revision=model.revision, cache_dir=model.download_dir)
