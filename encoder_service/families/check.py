"""The parity kit: `python -m encoder_service.families.check FOLDER` compares a model's tower with `transformers`.

It loads the checkpoint twice in float32 on the CPU, as the server does and as a whole model of `transformers`. It
checks that

- rows equal those that reach the language model;
- the numbers of rows computed from sizes are those that images of these sizes have;
- an image's rows have the same bits beside other images;
- a second load has the same fingerprints and bits.
"""

import argparse
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import transformers
from torch import Tensor
from torch.nn.functional import interpolate
from transformers.models.auto.configuration_auto import CONFIG_MAPPING

from encoder_contract.checkpoint import read_config
from encoder_contract.errors import EncoderError
from encoder_contract.settings import ConfigError
from encoder_service.families.choice import check_model, load_family
from encoder_service.families.counted_rows import one_line
from encoder_service.families.model import LoadOptions, VisionModel

MAX_ERROR = 1e-5  # of a row: the norm of the difference over the norm of the true row
SIZES = ((640, 480), (300, 900), (448, 448), (97, 161), (1280, 720))  # of the images whose rows are compared
SIDES = (56, 1400)  # shortest and longest side of the images whose rows are counted, pixels


@dataclass(frozen=True, slots=True)
class Finding:
    """The result of one check. `is_right` is None if it could not be checked."""

    check: str
    found: str
    is_right: bool | None


class WholeModel:
    """The reference: a checkpoint in `transformers`, with its language model."""

    def __init__(self, folder: Path, *, runs_code: bool = False) -> None:
        """Load the checkpoint in float32, with the image processor that the server uses, torchvision's."""
        transformers.utils.logging.disable_progress_bar()
        self.model = transformers.AutoModelForImageTextToText.from_pretrained(
            folder, dtype=torch.float32, local_files_only=True, trust_remote_code=runs_code
        ).eval()
        self._processor = transformers.AutoProcessor.from_pretrained(
            folder, backend="torchvision", local_files_only=True, trust_remote_code=runs_code
        )
        config = self.model.config
        self._placeholder = getattr(config, "image_token_id", None) or config.image_token_index

    def inputs(self, pixels: Tensor) -> Mapping[str, Any]:
        """Return the model's inputs for a prompt that consists of one image, uint8 [H, W, 3]."""
        image = pixels.permute(2, 0, 1)
        outputs = self._processor(images=[image], text=[self._processor.image_token], return_tensors="pt")
        return {
            name: value.float() if value.is_floating_point() else value
            for name, value in outputs.items()
            if name != "labels"
        }

    @torch.inference_mode()
    def rows(self, inputs: Mapping[str, Any]) -> Tensor:
        """Return the embeddings that reach the language model at the image's positions: [rows, width]."""
        decoder_inputs: dict[str, Any] = {}

        def stop(_module: Any, _args: Any, keywords: dict[str, Any]) -> None:
            decoder_inputs.update(keywords)
            raise _ForwardStopped

        hook = self.model.get_decoder().register_forward_pre_hook(stop, with_kwargs=True)
        try:
            self.model(**inputs)
        except _ForwardStopped:
            pass
        finally:
            hook.remove()
        positions = inputs["input_ids"][0] == self._placeholder
        levels = decoder_inputs.get("deepstack_visual_embeds") or ()
        return torch.cat([decoder_inputs["inputs_embeds"][0, positions], *levels], dim=1)


class _ForwardStopped(Exception):  # noqa: N818 - no error: the rest of the forward is not needed
    """The forward has reached the language model."""


def check(folder: Path, *, counted: int = 50, trust_remote_code: bool = False) -> Iterator[Finding]:
    """Yield the findings on a checkpoint folder. `counted` is the number of sizes whose rows are counted.

    `trust_remote_code` is the server's setting of this name. Raises `ConfigError`, `ValueError` or `OSError` for a
    folder that cannot be served.
    """
    check_model(folder)
    options = LoadOptions(device="cpu", dtype="float32", trust_remote_code=trust_remote_code)
    model = load_family(folder, options)
    pixels = [picture(*size, seed) for seed, size in enumerate(SIZES)]
    alone = [_rows(model, image) for image in pixels]
    is_known = model.model_type in CONFIG_MAPPING
    if is_known or (trust_remote_code and "auto_map" in read_config(folder)):
        whole = WholeModel(folder, runs_code=not is_known)
        yield _errors(alone, [whole.rows(whole.inputs(image)) for image in pixels])
    else:
        yield Finding("rows against transformers", "transformers has no such model", None)
    yield _counts(model, _sizes(counted))
    yield _neighbours(model, pixels, alone)
    again = load_family(folder, options)
    same = again.recipe == model.recipe and _equal_bits(_rows(again, pixels[0]), alone[0])
    yield Finding("a second load", "equal fingerprints and bits" if same else "differs", same)


def _rows(model: VisionModel, pixels: Tensor) -> Tensor:
    grid = model.geometry.grid(pixels.shape[1], pixels.shape[0])
    [rows] = model.encode(model.inputs([pixels], [grid]), [grid])
    return rows


def _errors(rows: Sequence[Tensor], truth: Sequence[Tensor]) -> Finding:
    name = "rows against transformers"
    for own, true in zip(rows, truth, strict=True):
        if own.shape != true.shape:
            return Finding(name, f"{tuple(own.shape)} instead of {tuple(true.shape)}", is_right=False)
    pairs = zip(torch.cat(list(rows)).double(), torch.cat(list(truth)).double(), strict=True)
    worst = max(float((own - true).norm() / true.norm()) for own, true in pairs)
    return Finding(name, f"{len(rows)} images, largest error {worst:.1e}", worst <= MAX_ERROR)


def _counts(model: VisionModel, sizes: Sequence[tuple[int, int]]) -> Finding:
    wrong = [size for size in sizes if _promised(model, size) != _made(model, size)]
    first = f", first {wrong[0][0]}x{wrong[0][1]}" if wrong else ""
    return Finding("rows counted from sizes", f"{len(sizes)} sizes, {len(wrong)} wrong{first}", not wrong)


def _promised(model: VisionModel, size: tuple[int, int]) -> int | None:
    try:
        return model.geometry.tokens(model.geometry.grid(*size))
    except EncoderError:
        return None


def _made(model: VisionModel, size: tuple[int, int]) -> int | None:
    """Return the number of rows that the tower makes of an image of this size; None if it refuses the image."""
    try:
        return len(_rows(model, picture(*size, seed=0)))
    except (EncoderError, ValueError):
        return None


def _neighbours(model: VisionModel, pixels: Sequence[Tensor], alone: Sequence[Tensor]) -> Finding:
    grids = [model.geometry.grid(image.shape[1], image.shape[0]) for image in pixels]
    together = model.encode(model.inputs(pixels, grids), grids)
    same = all(_equal_bits(one, other) for one, other in zip(together, alone, strict=True))
    found = "equal bits" if same else "other bits"
    return Finding("rows beside other images", f"{len(pixels)} images in one call, {found}", same)


def _equal_bits(one: Tensor, other: Tensor) -> bool:
    return one.shape == other.shape and torch.equal(one.view(torch.uint8), other.view(torch.uint8))


def _sizes(count: int) -> list[tuple[int, int]]:
    """Return random but fixed sizes (width, height), with as many small sides as large ones."""
    low, high = torch.tensor(SIDES).log()
    sides = torch.rand(count, 2, generator=torch.Generator().manual_seed(0)) * (high - low) + low
    return [(int(width), int(height)) for width, height in sides.exp()]


def picture(width: int, height: int, seed: int) -> Tensor:
    """Return a random but fixed picture without sharp edges, uint8 [height, width, 3]."""
    small = torch.randint(0, 256, (1, 3, 8, 8), generator=torch.Generator().manual_seed(seed))
    large = interpolate(small.float(), size=(height, width), mode="bicubic")
    return large.round().clamp(0, 255).byte()[0].permute(1, 2, 0).contiguous()


def main(arguments: Sequence[str] | None = None) -> int:
    """Print the findings. Return 1 if one is wrong, 2 if the folder cannot be served."""
    parser = argparse.ArgumentParser(prog="python -m encoder_service.families.check", description=__doc__)
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.add_argument("folder", type=Path, help="a Hugging Face checkpoint folder")
    parser.add_argument(
        "--sizes", type=int, default=50, help="how many sizes are counted (default %(default)s)"
    )
    parser.add_argument(
        "--trust-remote-code",
        action="store_true",
        help="run the code in the checkpoint, as serve does with it",
    )
    options = parser.parse_args(arguments)
    right = True
    try:
        for finding in check(
            options.folder, counted=options.sizes, trust_remote_code=options.trust_remote_code
        ):
            right = right and finding.is_right is not False
            verdict = {True: "ok", False: "WRONG", None: "-"}[finding.is_right]
            print(f"{finding.check:<26} {finding.found:<48} {verdict}", flush=True)
    except ConfigError as error:
        print(one_line(error), file=sys.stderr)
        return 2
    except Exception as error:  # noqa: BLE001 - transformers raises many types
        print(f"{options.folder}: {type(error).__name__}: {one_line(error)}", file=sys.stderr)
        return 2
    return 0 if right else 1


if __name__ == "__main__":
    sys.exit(main())
