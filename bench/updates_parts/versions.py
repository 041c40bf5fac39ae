"""Versions of a model, and those that an engine may have had while it answered a request."""

import math
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from time import monotonic

import torch
from safetensors.torch import load_file, save_file

from prefill_client.plugin.weights import VisionWeights
from testing.checkpoints import write_checkpoint
from testing.engine_flags import add_video_processor

START, FROZEN, TRAINED = "start", "frozen", "trained"
"""The weights at the start; those with another language model; those with another tower."""
PREPROCESSOR = {"size": {"longest_edge": 65536, "shortest_edge": 1024}}
WEIGHTS = "model.safetensors"
# Four blocks as wide as those of Qwen3-VL-8B, 0.3 GB.
COMPARED_VISION = {"depth": 4, "hidden_size": 1152, "intermediate_size": 4304, "num_heads": 16}
ROUNDS = 3


def write_versions(folder: Path) -> dict[str, Path]:
    """Write a tiny checkpoint of each version. Each of the others has one part of a second checkpoint."""
    start, other = (
        add_video_processor(
            write_checkpoint(folder / f"seed{seed}", seed=seed, preprocessor=PREPROCESSOR), "qwen3_vl"
        )
        for seed in range(2)
    )
    found = {START: start}
    for version, has_other_tower in ((FROZEN, False), (TRAINED, True)):
        found[version] = shutil.copytree(start, folder / version)
        tensors = {
            name: tensor
            for checkpoint in (start, other)
            for name, tensor in load_file(checkpoint / WEIGHTS).items()
            if checkpoint == start or ("visual." in name) == has_other_tower
        }
        save_file(tensors, found[version] / WEIGHTS, {"format": "pt"})
    return found


def comparison_ms_per_gb(folder: Path) -> float:
    """Return the milliseconds that comparing an unchanged tower takes, per GB of its tensors: a median."""
    model = write_checkpoint(folder, vision=COMPARED_VISION, text_layers=1)
    tensors = load_file(model / WEIGHTS)
    weights = VisionWeights(model, torch.float32)
    before, found = weights.fingerprint, []
    for number in range(1 + ROUNDS):
        for _ in weights.noting(tensors.items()):
            pass
        compared = weights.take_compared()
        if number:  # the first also reads the file
            found.append(1e12 * compared.took_s / compared.size_bytes)
    if weights.fingerprint != before:
        raise RuntimeError(f"equal tensors have another fingerprint: {weights.why_unknown}")
    return round(median(found), 1)


@dataclass(slots=True)
class Period:
    """A version that an engine may have from `began_s` to `ended_s`."""

    version: str
    began_s: float
    ended_s: float = math.inf


class Timeline:
    """The versions that an engine has had. One thread updates it; others may ask."""

    def __init__(self, version: str) -> None:
        self._periods = [Period(version, -math.inf)]

    @contextmanager
    def update(self, version: str) -> Iterator[None]:
        """Note an update that takes as long as a `with` block: meanwhile the engine may have either version."""
        before = self._periods[-1]
        self._periods.append(Period(version, monotonic()))
        yield
        before.ended_s = monotonic()

    def between(self, began_s: float, ended_s: float) -> set[str]:
        """Return the versions that the engine may have had at any time between these two of `monotonic`."""
        return {
            period.version
            for period in self._periods
            if period.began_s <= ended_s and began_s <= period.ended_s
        }
