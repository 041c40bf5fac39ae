"""The reference model: `transformers` runs a whole prompt, from pixels, in one forward in float32."""

from collections.abc import Sequence
from pathlib import Path

import torch
import transformers
from torch import Tensor

from encoder_contract.errors import EncoderError
from encoder_contract.geometry import Grid
from encoder_contract.processor import ProcessorSettings
from encoder_service.image.resize import PlainResize, to_patches
from testing.decoding import decode_files, pillow_decoder
from testing.reference_tower import processed


class OneShot:
    """A checkpoint in `transformers`, fed with the server's own pixels and patches."""

    def __init__(self, folder: Path) -> None:
        self.model = transformers.Qwen3VLForConditionalGeneration.from_pretrained(
            folder, dtype=torch.float32
        ).eval()
        self.settings = ProcessorSettings.from_folder(folder)
        self.decoder = pillow_decoder()

    @torch.inference_mode()
    def logits(self, prompt_ids: Sequence[int], images: Sequence[bytes], grids: Sequence[Grid]) -> Tensor:
        """Return the last-token logits [vocab] of a prompt whose images are expanded to their tokens."""
        ids = torch.tensor([list(prompt_ids)])
        output = self.model(
            input_ids=ids,
            pixel_values=self.pixel_values(images, grids),
            image_grid_thw=torch.tensor([list(grid) for grid in grids]),
            mm_token_type_ids=(ids == self.model.config.image_token_id).int(),
            logits_to_keep=1,
        )
        logits = output.logits[0, -1]
        assert isinstance(logits, Tensor)
        return logits

    def pixel_values(self, images: Sequence[bytes], grids: Sequence[Grid]) -> Tensor:
        """Return the images in the format of the Hugging Face processor, from our patches."""
        pixels = [p for p in decode_files(self.decoder, images) if not isinstance(p, EncoderError)]
        return processed(to_patches(pixels, grids, PlainResize(self.settings.geometry)), self.settings)
