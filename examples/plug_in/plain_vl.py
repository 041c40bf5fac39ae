"""plain_vl: images of 224x224 pixels, each patch of 16x16 pixels projected to a row."""

from pathlib import Path

import torch
from blake3 import blake3
from safetensors.torch import load_file
from torch import Tensor
from torch.nn.functional import interpolate, unfold

from encoder_contract.checkpoint import model_fingerprint, read_config
from encoder_service.families.model import LoadOptions, OneByOne
from encoder_service.keys import Recipe

PROCESSOR = b"plain_vl 1: 224x224, bilinear, -1 to 1"  # raise the number when the code changes rows


class PlainModel(OneByOne):
    """The tower: a projection of patches."""

    def __init__(self, folder: Path, options: LoadOptions) -> None:
        weights = folder / "model.safetensors"
        super().__init__(
            options,
            model_type="plain_vl",
            hidden=read_config(folder)["hidden_size"],
            recipe=Recipe(model_fingerprint(folder), blake3(PROCESSOR).digest(), options.dtype),
        )
        self.projector = load_file(weights)["projector.weight"].to(self.device, self.dtype)

    def rows(self, width: int, height: int) -> int:
        if min(width, height) < 16:
            raise ValueError("both sides must have at least 16 pixels")
        return (224 // 16) ** 2

    def prepare_image(self, pixels: Tensor) -> Tensor:
        image = pixels.permute(2, 0, 1)[None].float()
        resized = interpolate(image, size=(224, 224), mode="bilinear", antialias=True)
        return (resized / 127.5 - 1).to(self.dtype)

    def encode_image(self, inputs: Tensor) -> Tensor:
        patches = unfold(inputs.to(self.device), kernel_size=16, stride=16)[0].T
        return torch.nn.functional.linear(patches, self.projector)


load = PlainModel
