"""Checks the demo's promises: the logits of `transformers` in one forward, each row once, each image encoded once."""

from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch

from encoder_contract.digest import content_digest
from encoder_contract.geometry import Grid
from testing.reference_model import OneShot

# Float32 rounding: the tower's rows differ by up to 1e-5 of their size from those of `transformers`.
MAX_LOGIT_ERROR = 5e-5

Turn = Mapping[str, Any]
Result = tuple[str, bool, str]


def check(
    model: Path, files: Sequence[Sequence[Path]], turns: Sequence[Turn], encodes: int, folder: Path
) -> list[Result]:
    """Return (promise, kept, finding). `files` has the images of each turn, including those of earlier turns."""
    results: list[Result] = [
        ("both turns were answered", len(turns) == len(files), f"{len(turns)} of {len(files)}")
    ]
    reference_model = OneShot(model)
    for number, (turn, images) in enumerate(zip(turns, files, strict=False)):
        expected = reference_model.logits(
            turn["prompt_ids"],
            [file.read_bytes() for file in images],
            [Grid(*image["grid"]) for image in turn["images"]],
        )
        ours = torch.from_numpy(np.load(folder / f"logits-{number}.npy"))
        error = float((ours - expected).abs().max() / expected.abs().max())
        results.append(
            (f"turn {number + 1} has the one-shot logits", error <= MAX_LOGIT_ERROR, f"error {error:.1e}")
        )
        results.append(each_row_once(number, turn))
        results.append(only_new_encoded(number, turn, turns[:number], images))
    distinct = {content_digest(file.read_bytes()) for file in files[-1]}
    found = f"the server counted {encodes} encodes of {len(distinct)} images"
    return [*results, ("each image was encoded once", encodes == len(distinct), found)]


def each_row_once(number: int, turn: Turn) -> Result:
    """Check that the chunks together got every row of every image exactly once."""
    arrived = Counter(
        (w["image"], row)
        for run in turn["runs"]
        for w in run["windows"]
        for row in range(w["row_begin"], w["row_end"])
    )
    wanted = Counter(
        (index, row) for index, image in enumerate(turn["images"]) for row in range(image["tokens"])
    )
    return f"turn {number + 1} fetched every row once", arrived == wanted, f"{sum(arrived.values())} rows"


def only_new_encoded(number: int, turn: Turn, before: Sequence[Turn], images: Sequence[Path]) -> Result:
    """Check that the server encoded exactly the images that are new in this turn."""
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
