"""An engine knows its model fingerprint after updates: it is that of a checkpoint with the same tensors, or unknown."""

import shutil
from collections.abc import Callable, Iterable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from encoder_contract.checkpoint import model_fingerprint
from prefill_client.plugin.weights import VisionWeights

FILE = "model.safetensors"
Tensors = dict[str, Tensor]


def update(weights: VisionWeights, tensors: Tensors | Iterable[tuple[str, Tensor]]) -> bytes | None:
    """Write tensors, as an engine does, and return the fingerprint."""
    for _ in weights.noting(tensors.items() if isinstance(tensors, dict) else tensors):
        pass
    return weights.fingerprint


def saved(folder: Path, base: Path, tensors: Tensors) -> Path:
    """Write a checkpoint of these tensors."""
    shutil.copytree(base, folder)
    save_file(tensors, folder / FILE, {"format": "pt"})
    return folder


def trained(tensors: Tensors, by: float = 1e-3) -> Tensors:
    """Return the same tensors with a trained tower."""
    return {name: each + by if "visual." in name else each for name, each in tensors.items()}


@pytest.fixture
def tensors(checkpoint: Path) -> Tensors:
    return load_file(checkpoint / FILE)


def test_a_frozen_tower_keeps_its_fingerprint(checkpoint: Path, tensors: Tensors) -> None:
    weights = VisionWeights(checkpoint, torch.float32)
    fingerprint = model_fingerprint(checkpoint)
    language = {name: each + 1 for name, each in tensors.items() if "visual." not in name}
    assert update(weights, language) == fingerprint
    assert weights.take_compared().tensors == 0, "no vision tensor was named"
    assert update(weights, tensors | language) == fingerprint
    compared = weights.take_compared()
    assert compared.tensors == len(tensors) - len(language)
    assert compared.size_bytes == sum(each.nbytes for name, each in tensors.items() if "visual." in name)
    assert weights.take_compared().tensors == 0


def test_a_trained_tower_has_the_fingerprint_of_its_saved_checkpoint(
    checkpoint: Path, tensors: Tensors, tmp_path: Path
) -> None:
    weights = VisionWeights(checkpoint, torch.float32)
    for step in range(1, 4):
        after = trained(tensors, step * 1e-3)
        folder = saved(tmp_path / str(step), checkpoint, after)
        parts = list(after.items())
        update(weights, parts[::2])
        assert update(weights, parts[1::2]) == model_fingerprint(folder)
    one = next(name for name in tensors if "visual." in name)
    after[one] = after[one] * 2
    folder = saved(tmp_path / "one", checkpoint, after)
    assert update(weights, {one: after[one]}) == model_fingerprint(folder)
    assert update(weights, tensors) == model_fingerprint(checkpoint)


def test_memory_that_the_update_uses_again_changes_nothing(
    checkpoint: Path, tensors: Tensors, tmp_path: Path
) -> None:
    after = trained(tensors)
    buffer = torch.empty(max(each.numel() for each in after.values()))

    def through_one_buffer() -> Iterable[tuple[str, Tensor]]:
        for name, tensor in after.items():
            yield name, buffer[: tensor.numel()].view(tensor.shape).copy_(tensor)

    weights = VisionWeights(checkpoint, torch.float32)
    assert update(weights, through_one_buffer()) == model_fingerprint(
        saved(tmp_path / "a", checkpoint, after)
    )


def test_the_type_of_a_tensor_matters_only_if_values_are_lost(
    checkpoint: Path, tensors: Tensors, tmp_path: Path
) -> None:
    half = {name: each.bfloat16() for name, each in tensors.items()}
    base = saved(tmp_path / "half", checkpoint, half)
    finer = {name: each.float() for name, each in half.items()}
    assert update(VisionWeights(base, torch.float32), finer) == model_fingerprint(base)
    assert update(VisionWeights(base, torch.float32), trained(finer, 1e-5)) is None, (
        "the engine has other values"
    )
    changed = trained(finer)
    rounded = saved(tmp_path / "rounded", base, {name: each.bfloat16() for name, each in changed.items()})
    assert update(VisionWeights(base, torch.bfloat16), changed) == model_fingerprint(rounded)


@pytest.mark.attack("names and tensors that look like those of the checkpoint, and are not")
@pytest.mark.parametrize(
    "written",
    [
        {"model.visual.blocks.0.attn.q_proj.weight": torch.zeros(1)},
        {"base_model.model.model.visual.merger.norm.weight": torch.zeros(1)},
        {"visual.merger.norm.weight": torch.zeros(3)},
        {"visual.merger.norm.weight": torch.zeros(1, device="meta")},
        {"model.visual.": torch.zeros(1)},
    ],
)
def test_what_cannot_be_compared_makes_the_fingerprint_unknown_for_good(
    checkpoint: Path, tensors: Tensors, written: Tensors
) -> None:
    weights = VisionWeights(checkpoint, torch.float32)
    assert update(weights, written) is None
    assert update(weights, tensors) is None, "what it wrote may still be there"
    assert "cannot be compared" in weights.why_unknown


def test_a_part_of_a_tensor_is_in_doubt_until_all_of_it_comes(
    checkpoint: Path, tensors: Tensors, tmp_path: Path
) -> None:
    name = "model.visual.merger.norm.weight"
    part = torch.full_like(tensors[name], torch.nan)
    part[1] = 2
    weights = VisionWeights(checkpoint, torch.float32)
    assert update(weights, {name: part}) is None
    assert "1 vision tensors" in weights.why_unknown
    assert update(weights, tensors) == model_fingerprint(checkpoint)


def test_doubt_ends_when_every_vision_tensor_was_named(checkpoint: Path, tensors: Tensors) -> None:
    weights = VisionWeights(checkpoint, torch.float32)
    weights.doubt()
    vision = [(name, each) for name, each in tensors.items() if "visual." in name]
    assert update(weights, vision[1:]) is None
    assert "1 vision tensors" in weights.why_unknown
    assert update(weights, vision[:1]) == model_fingerprint(checkpoint)


@pytest.mark.attack("a trainer that writes its checkpoints over the engine's own")
def test_a_checkpoint_whose_files_change_is_compared_no_more(
    checkpoint: Path, tensors: Tensors, tmp_path: Path
) -> None:
    folder = saved(tmp_path / "mine", checkpoint, tensors)
    weights = VisionWeights(folder, torch.float32)
    assert update(weights, {}) == model_fingerprint(checkpoint)
    after = trained(tensors)
    save_file(after, folder / FILE, {"format": "pt"})
    assert update(weights, after) is None


def test_a_family_without_a_tower_of_ours_accepts_updates_of_its_language_model(
    kept_family: Callable[..., Path],
) -> None:
    folder = kept_family("internvl")
    tensors = load_file(folder / FILE)
    language = {name: each for name, each in tensors.items() if "language_model" in name}
    weights = VisionWeights(folder, torch.float32)
    assert update(weights, language) == model_fingerprint(folder)
    assert update(weights, tensors) is None
