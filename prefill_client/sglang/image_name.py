"""The data that an image carries from SGLang's tokenizer to its schedulers: its name, and the file."""

from dataclasses import dataclass
from typing import Any, Self

import torch
from torch import Tensor

from encoder_contract.geometry import Grid
from prefill_client.images import Image, Submitted

KEY = "encoder_service"
"""The key of the name in the data that SGLang's items carry for their model."""


@dataclass(frozen=True, slots=True)
class SglangImageName:
    """The name of an image that was submitted to the service.

    `digest` names the file and `address` the rows (32 bytes each). `endpoint` is the server that has the image.
    """

    digest: bytes
    address: bytes
    endpoint: str
    grid: Grid
    tokens: int

    @classmethod
    def of_answer(cls, answer: Submitted) -> Self:
        """Return the name of a submitted image."""
        assert answer.grid is not None, "an answer without an error has a grid"
        return cls(answer.digest, answer.address, answer.endpoint, answer.grid, answer.tokens)

    @classmethod
    def of_item(cls, item: Any) -> Self | None:
        """Return the name in an item of SGLang; None for an item that SGLang has processed itself.

        Callers may send processed images with arbitrary data, so a name without a file, or an invalid one, is ignored.
        """
        if not isinstance(item.feature, Tensor) or item.feature.dtype != torch.uint8:
            return None
        try:
            digest, address, endpoint, grid, tokens = item.model_specific_data[KEY]
            return cls(bytes.fromhex(digest), bytes.fromhex(address), str(endpoint), Grid(*grid), int(tokens))
        except (KeyError, TypeError, ValueError):
            return None

    def as_data(self) -> dict[str, Any]:
        """Return the model data of an item: the grid, under SGLang's own key, and the name."""
        named = [self.digest.hex(), self.address.hex(), self.endpoint, list(self.grid), self.tokens]
        return {"image_grid_thw": torch.tensor([list(self.grid)]), KEY: named}

    def image(self, file: bytes) -> Image:
        """Return the image with its file, to submit it again."""
        return Image(file, self.digest, self.grid, self.tokens)


def file_as_feature(file: bytes) -> Tensor:
    """Return a file as a tensor, uint8 [bytes], which SGLang transports like pixels."""
    return torch.frombuffer(bytearray(file), dtype=torch.uint8)


def file_of(item: Any) -> bytes:
    """Return the file of an item that has a name."""
    file: bytes = item.feature.cpu().numpy().tobytes()
    return file
