"""The engine's own model: its checkpoint folder, its fingerprints, and its `Producer` for rows that it shares."""

import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

import blake3
import vllm

from encoder_contract.checkpoint import NOT_OF_ROWS, weights_fingerprint
from encoder_contract.producer import Producer
from prefill_client.engine.model import EngineModel, checkpoint_folder

if TYPE_CHECKING:
    from vllm.config import VllmConfig


def folder_of(config: "VllmConfig") -> Path:
    """Return the folder; a model of the Hugging Face Hub is looked up, or fetched to, where vLLM keeps it.

    Raises `ValueError` for weights that are no checkpoint's, and `OSError` when the model is neither here nor fetched.
    """
    if config.load_config.load_format == "dummy":
        raise ValueError("--load-format dummy makes random weights: no other process has the same")
    model, load = config.model_config, config.load_config
    return checkpoint_folder(
        model.model,
        revision=model.revision,
        cache_dir=load.download_dir,
        ignore_patterns=load.ignore_patterns,
    )


def engine_model(config: "VllmConfig") -> EngineModel:
    """Return what the service's model is compared with."""
    from vllm.transformers_utils.processor import cached_image_processor_from_config

    model = config.model_config
    return EngineModel(
        config=model.hf_config,
        dtype=str(model.dtype).removeprefix("torch."),
        image_processor=lambda: cached_image_processor_from_config(model),
        folder=lambda: folder_of(config),
        lays_out_images=True,
    )


# The settings for the tower that change rows by more than the order of a sum.
_TOWER_SETTINGS = ("mm_encoder_attn_dtype", "mm_encoder_fp8_scale_path", "mm_processor_kwargs")


def producer_of_engine(config: "VllmConfig") -> Producer:
    """Return the producer. Reads the vision tensors of the checkpoint: under a second per GB once they are in memory.

    It does not cover the number of ranks of the tower, or its device: these change rows only by rounding, and all
    engines that share rows have those of the first writer, bit for bit. Raises `ValueError` or `OSError` if there is
    no checkpoint of safetensors files.
    """
    from vllm.transformers_utils.processor import cached_image_processor_from_config

    model = config.model_config
    quantized = getattr(model.hf_config, "quantization_config", None)
    tower = {
        "quantization": [model.quantization, quantized],
        **{name: getattr(model.multimodal_config, name) for name in _TOWER_SETTINGS},
    }
    described = [model.hf_config.architectures, _config_of_towers(model.hf_config), tower]
    return Producer(
        model=_digest_of(described),
        weights=weights_fingerprint(folder_of(config)),
        processor=_digest_of(cached_image_processor_from_config(model).to_dict()),
        dtype=str(model.dtype).removeprefix("torch."),
        implementation=f"vllm {vllm.__version__}",
    )


def _config_of_towers(config: Any) -> dict[str, Any]:
    """Return what a configuration says of anything but the language model."""
    return {name: value for name, value in config.to_dict().items() if name not in NOT_OF_ROWS}


def _digest_of(value: Any) -> bytes:
    return blake3.blake3(json.dumps(value, sort_keys=True, default=str).encode()).digest()
