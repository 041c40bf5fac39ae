"""Writes seeded LoRA adapters in PEFT's format."""

import json
import re
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file

RANK = 8
STRENGTH = 0.5  # of a layer's output, on average: answers differ clearly from those of the base model
_ADAPTED = re.compile(
    r"language_model\..*\.(q_proj|k_proj|v_proj|o_proj|gate_proj|up_proj|down_proj)\.weight"
)


def write_adapter(folder: Path, checkpoint: Path, seed: int) -> Path:
    """Write an adapter of all linear layers of a checkpoint's language model, and return its folder."""
    generator = torch.Generator().manual_seed(seed)
    tensors: dict[str, torch.Tensor] = {}
    weights = load_file(checkpoint / "model.safetensors")
    adapted = {name: match[1] for name in sorted(weights) if (match := _ADAPTED.search(name))}
    for name in adapted:
        outputs, inputs = weights[name].shape
        layer = f"base_model.model.{name.removesuffix('.weight')}"
        tensors[f"{layer}.lora_A.weight"] = torch.randn(RANK, inputs, generator=generator) / inputs**0.5
        tensors[f"{layer}.lora_B.weight"] = (
            STRENGTH * torch.randn(outputs, RANK, generator=generator) / RANK**0.5
        )
    folder.mkdir()
    save_file(tensors, folder / "adapter_model.safetensors", metadata={"format": "pt"})
    config = {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "base_model_name_or_path": str(checkpoint),
        "r": RANK,
        "lora_alpha": RANK,
        "lora_dropout": 0.0,
        "bias": "none",
        "target_modules": sorted(set(adapted.values())),
    }
    (folder / "adapter_config.json").write_text(json.dumps(config, indent=2) + "\n")
    return folder
