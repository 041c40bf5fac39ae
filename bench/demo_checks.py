"""The demo's promises: the same logits as `transformers` in one go, each row once, each image encoded once."""

from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
import transformers
from encoder_contract.digest import content_digest
from encoder_contract.geometry import Grid
from encoder_service.decode import Decoder
from encoder_service.preprocess import to_patches
from torch import Tensor

from encoder_service.processor import ProcessorSettings

# Float32 rounding: the tower's rows differ by up to 1e-5 of their size from those of `transformers`.
MAX_LOGIT_ERROR = 5e-5

Turn = Mapping[str, Any]
Result = tuple[str, bool, str]


def check(model: Path, files: Sequence[Sequence[Path]], turns: Sequence[Turn], folder: Path) -> list[Result]:
    """Return (promise, kept, what was found); `files` holds each turn's images, those of earlier turns included."""
    results: list[Result] = [
        ("both turns were answered", len(turns) == len(files), f"{len(turns)} of {len(files)}")
    ]
    one_shot = OneShot(model)
    for number, (turn, images) in enumerate(zip(turns, files, strict=False)):
        theirs = one_shot.logits(turn, [file.read_bytes() for file in images])
        ours = torch.from_numpy(np.load(folder / f"logits-{number}.npy"))
        error = float((ours - theirs).abs().max() / theirs.abs().max())
        results.append(
            (f"turn {number + 1} has the one-shot logits", error <= MAX_LOGIT_ERROR, f"error {error:.1e}")
        )
        results.append(each_row_once(number, turn))
        results.append(only_new_encoded(number, turn, turns[:number], images))
    return results


def each_row_once(number: int, turn: Turn) -> Result:
    """Check that over all chunks every row of every image came exactly once."""
    came = Counter(
        (w["image"], row)
        for run in turn["runs"]
        for w in run["windows"]
        for row in range(w["row_begin"], w["row_end"])
    )
    wanted = Counter(
        (image, row) for image, told in enumerate(turn["images"]) for row in range(told["tokens"])
    )
    return f"turn {number + 1} fetched every row once", came == wanted, f"{sum(came.values())} rows"


def only_new_encoded(number: int, turn: Turn, before: Sequence[Turn], images: Sequence[Path]) -> Result:
    """Check that the images the server encoded in this turn are exactly those that no turn before had."""
    seen = {image["digest"] for earlier in before for image in earlier["images"]}
    new = {content_digest(file.read_bytes()).hex() for file in images} - seen
    not_held = {image["digest"] for image in turn["images"] if not image["cached"]}
    encoded = {arrival["digest"] for arrival in turn["arrivals"] if arrival["source"] == "encoded"}
    kept = not_held == new and encoded <= new
    return (
        f"turn {number + 1} encoded exactly its new images",
        kept,
        f"{len(not_held)} encoded, {len(new)} new",
    )


class OneShot:
    """`transformers` running a whole prompt in one go, pixels in."""

    def __init__(self, folder: Path) -> None:
        self.model = transformers.Qwen3VLForConditionalGeneration.from_pretrained(
            folder, dtype=torch.float32
        ).eval()
        self.settings = ProcessorSettings.from_folder(folder)
        self.decoder = Decoder(device="cpu")

    @torch.inference_mode()
    def logits(self, turn: Turn, images: Sequence[bytes]) -> Tensor:
        """Return the last-token logits [vocab] of a turn's prompt."""
        ids = torch.tensor([turn["prompt_ids"]])
        grids = [Grid(*image["grid"]) for image in turn["images"]]
        output = self.model(
            input_ids=ids,
            pixel_values=self.pixel_values(images, grids),
            image_grid_thw=torch.tensor(grids),
            mm_token_type_ids=(ids == self.model.config.image_token_id).int(),
            logits_to_keep=1,
        )
        logits = output.logits[0, -1]
        assert isinstance(logits, Tensor)
        return logits

    def pixel_values(self, images: Sequence[bytes], grids: Sequence[Grid]) -> Tensor:
        """Return [patches, 3 × 2 × p × p] as the Hugging Face processor lays a still image out, from our patches."""
        pixels = self.decoder.decode(images)
        patches = torch.cat(to_patches(pixels, grids, self.settings.geometry))
        settings, side = self.settings, self.settings.geometry.patch_size
        mean = torch.tensor(settings.mean)[:, None]
        std = torch.tensor(settings.std)[:, None]
        normalised = (patches.view(-1, 3, side * side) * settings.rescale_factor - mean) / std
        return normalised[:, :, None].expand(-1, 3, 2, -1).reshape(len(patches), -1)
