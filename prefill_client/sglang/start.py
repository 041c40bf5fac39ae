"""Checks at SGLang's start: both packages are loaded, SGLang has its tower, and the service has SGLang's model."""

import logging
from functools import partial
from pathlib import Path
from typing import Any

import torch
from sglang.srt.environ import envs
from sglang.srt.runtime_context import get_disagg, get_mm, get_model

from prefill_client.plugin.model import EngineModel, check_description, checkpoint_folder
from prefill_client.plugin.service import check_at_start
from prefill_client.sglang.sglang_settings import MODELS, PROCESSORS, SglangSettings

_log = logging.getLogger("sglang.encoder_service")


def check_packages() -> None:
    """Raise `ValueError` unless SGLang loads both packages, because each one needs the other."""
    variables = (envs.SGLANG_EXTERNAL_MM_PROCESSOR_PACKAGE, envs.SGLANG_EXTERNAL_MODEL_PACKAGE)
    for variable, package in zip(variables, (PROCESSORS, MODELS), strict=True):
        if variable.get() != package:
            raise ValueError(
                f"the encoder service needs {variable.name}={package}, but it is {variable.get()!r}"
            )


def check_configuration(pipeline_stages: int) -> None:
    """Raise `ValueError` for settings of SGLang that make the service's rows wrong or leave SGLang without a tower."""
    if (get_mm().mm_process_config or {}).get("image"):
        raise ValueError(
            "--mm-process-config changes images only in SGLang; set it in the checkpoint's preprocessor_config.json, "
            "which the encoder service reads too"
        )
    if pipeline_stages > 1:
        raise ValueError(
            "--pp-size must be 1: a request whose images have no rows must end on all ranks, but only the first "
            "pipeline stage knows about it"
        )
    if get_disagg().language_only:
        raise ValueError(
            "--language-only sends images to SGLang's own encoders; remove it, because SGLang needs its tower for when "
            "the encoder service does not answer"
        )


def check_tower(tower: object) -> None:
    """Raise `ValueError` if SGLang has loaded no vision tower."""
    if tower is None:
        raise ValueError(
            "SGLang has no vision tower, because the checkpoint is marked language_model_only; start SGLang with its "
            "tower, which encodes images when the encoder service does not answer"
        )


def engine_model(config: Any, image_processor: Any, dtype: torch.dtype) -> EngineModel:
    """Return the engine's model, to compare the service's with. `config` is the checkpoint's configuration."""
    return EngineModel(
        config=config,
        dtype=str(dtype).removeprefix("torch."),
        image_processor=lambda: image_processor,
        folder=checkpoint_of_engine,
    )


def check_service(settings: SglangSettings, engine: EngineModel) -> None:
    """Compare the service's model with SGLang's. Does nothing if no service answers, because SGLang has its own tower.

    Raises `ValueError` with both values of every difference.
    """
    check = partial(check_description, settings, engine)
    check_at_start(settings, check, _log, model=get_model().model_path, required=False)


def checkpoint_of_engine() -> Path:
    """Return the folder of SGLang's checkpoint. An update of the weights from disk changes what SGLang names.

    Raises `ValueError` for weights that come from no checkpoint, and `OSError` if a model cannot be found or fetched.
    """
    model = get_model()
    if model.load_format == "dummy":
        raise ValueError("--load-format dummy creates random weights, which no other process has")
    return checkpoint_folder(model.model_path, revision=model.revision, cache_dir=model.download_dir)
