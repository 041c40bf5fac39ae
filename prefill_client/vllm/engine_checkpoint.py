"""The checkpoint folder that an engine loads, and the fingerprints of a service that encodes with it."""

from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING

from encoder_contract.checkpoint import model_fingerprints

if TYPE_CHECKING:
    from vllm.config import VllmConfig

# Of a repository on the Hugging Face Hub: what fingerprints are made of.
_FILES = ["config.json", "*.safetensors", "*.safetensors.index.json"]

fingerprints_of = cache(model_fingerprints)
"""`encoder_contract.checkpoint.model_fingerprints`; each process reads the vision weights of a folder once."""


def folder_of(config: "VllmConfig") -> Path:
    """Return the folder; a model of the Hugging Face Hub is looked up, or fetched to, where vLLM keeps it.

    Raises `ValueError` for weights that are no checkpoint's, and `OSError` when the model is neither here nor fetched.
    """
    if config.load_config.load_format == "dummy":
        raise ValueError("--load-format dummy makes random weights: no other process has the same")
    model = config.model_config
    if (folder := Path(model.model)).is_dir():
        return folder
    from huggingface_hub import constants, snapshot_download

    fetched = snapshot_download(
        model.model,
        revision=model.revision,
        cache_dir=config.load_config.download_dir,
        allow_patterns=_FILES,
        ignore_patterns=config.load_config.ignore_patterns,
        local_files_only=constants.HF_HUB_OFFLINE,
    )
    return Path(fetched)
