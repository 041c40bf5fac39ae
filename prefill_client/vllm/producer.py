"""Who an engine is to the store it shares: fingerprints of all that decides the rows of its own tower."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import blake3
import vllm

from encoder_contract.producer import Producer

if TYPE_CHECKING:
    from vllm.config import VllmConfig

# Where checkpoints keep their vision tensors; the first is the older layout of Qwen2.5-VL.
_PREFIXES = ("visual.", "model.visual.")
_PIECE_BYTES = 16 << 20
# Of an engine's settings for its tower, those that change rows by more than the order of a sum.
_TOWER_SETTINGS = ("mm_encoder_attn_dtype", "mm_encoder_fp8_scale_path", "mm_processor_kwargs")


def producer_of_engine(config: "VllmConfig") -> Producer:
    """Return the producer. Reads the vision tensors of the checkpoint: under a second per GB once they are in memory.

    How many ranks the tower runs on, and on which device, is no part of it: rows then differ by rounding alone, and
    whoever shares them has those of the first writer, bit for bit. Raises `ValueError` when there is no checkpoint of
    safetensors files.
    """
    from vllm.transformers_utils.processor import cached_image_processor_from_config

    model = config.model_config
    quantized = getattr(model.hf_config, "quantization_config", None)
    tower = {
        "quantization": [model.quantization, quantized],
        **{name: getattr(model.multimodal_config, name) for name in _TOWER_SETTINGS},
    }
    described = [model.hf_config.architectures, model.hf_config.vision_config.to_dict(), tower]
    return Producer(
        model=_digest_of(described),
        weights=_digest_of_weights(_folder(config)),
        processor=_digest_of(cached_image_processor_from_config(model).to_dict()),
        dtype=str(model.dtype).removeprefix("torch."),
        implementation=f"vllm {vllm.__version__}",
    )


def _folder(config: "VllmConfig") -> Path:
    if config.load_config.load_format == "dummy":
        raise ValueError(
            "--load-format dummy is not supported: embeddings of random weights cannot be shared"
        )
    model = config.model_config
    if (folder := Path(model.model)).is_dir():
        return folder
    from huggingface_hub import snapshot_download

    # By now vLLM has fetched it.
    return Path(snapshot_download(model.model, revision=model.revision, local_files_only=True))


def _digest_of(value: Any) -> bytes:
    return blake3.blake3(json.dumps(value, sort_keys=True, default=str).encode()).digest()


def _digest_of_weights(folder: Path) -> bytes:
    """Return BLAKE3 over names, types, shapes and bytes of the vision tensors, in the order of their names."""
    tensors = dict(each for path in folder.glob("*.safetensors") for each in _vision_tensors(path))
    if not tensors:
        raise ValueError(f"{folder} has no safetensors files with the tensors of a vision tower")
    hasher = blake3.blake3(max_threads=blake3.blake3.AUTO)
    for name in sorted(tensors):
        path, entry, begin = tensors[name]
        first, last = entry["data_offsets"]
        hasher.update(json.dumps([name, entry["dtype"], entry["shape"], last - first]).encode())
        with path.open("rb") as file:
            file.seek(begin + first)
            for place in range(first, last, _PIECE_BYTES):
                hasher.update(file.read(min(_PIECE_BYTES, last - place)))
    return hasher.digest()


def _vision_tensors(path: Path) -> Iterator[tuple[str, tuple[Path, dict[str, Any], int]]]:
    """Yield each by its name without prefix: its file, its entry in the header, and where the file's data begins."""
    with path.open("rb") as file:
        length = int.from_bytes(file.read(8), "little")
        entries = json.loads(file.read(length))
    for name, entry in entries.items():
        for prefix in _PREFIXES:
            if name.startswith(prefix):
                yield name.removeprefix(prefix), (path, entry, 8 + length)
