"""Writes a checkpoint for `plain_vl`, with random weights, into the folder `model`."""

import json
from pathlib import Path

import torch
from safetensors.torch import save_file

folder = Path("model")
folder.mkdir(exist_ok=True)
save_file({"projector.weight": torch.randn(24, 3 * 16 * 16) / 28}, folder / "model.safetensors")
(folder / "config.json").write_text(
    json.dumps({"model_type": "plain_vl", "hidden_size": 24, "dtype": "float32"})
)
