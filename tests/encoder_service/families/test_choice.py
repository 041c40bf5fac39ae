"""Which family serves a folder, and the one-line error at start if none does."""

import json
import shutil
from dataclasses import replace
from importlib.metadata import EntryPoint

import pytest
import torch
from safetensors.torch import load_file, save_file

from encoder_service.config import ConfigError
from encoder_service.devices.model import load_model
from encoder_service.families import choice
from encoder_service.families.choice import GROUP, check_model, load_family
from encoder_service.families.model import LoadOptions

GENERIC = "encoder_service.families.generic"
OPTIONS = LoadOptions(device="cpu", dtype="float32")


@pytest.fixture
def folder(kept_family, tmp_path):
    """A checkpoint that a test may change."""
    return shutil.copytree(kept_family("paligemma"), tmp_path / "model")


def change_config(folder, **values):
    path = folder / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | values))


def change_weights(folder, change):
    path = folder / "model.safetensors"
    save_file(change(load_file(path)), path, metadata={"format": "pt"})


def refusal(config, folder):
    """Check that a server does not start on this folder; return its message."""
    with pytest.raises(ConfigError) as refused:
        load_model(replace(config, model=folder))
    message = str(refused.value)
    assert message.startswith(f"--model {folder}: ")
    assert "\n" not in message
    return message


@pytest.mark.parametrize(
    ("changed", "said"),
    [
        ({"model_type": "llama", "vision_config": None}, "config.json has no vision_config"),
        ({"model_type": "llama"}, "model_type 'llama' has no vision part"),
        ({"model_type": "siglip"}, "model_type 'siglip' has no vision part"),
        ({"model_type": "my_vl"}, "knows no model_type 'my_vl'"),
        (
            {"model_type": "my_vl", "auto_map": {"AutoConfig": "my.Config"}},
            "is not run without --trust-remote-code",
        ),
        ({"model_type": None}, "names no model_type"),
        ({"image_token_index": None}, "image_token_index"),
    ],
    ids=["text", "text with more", "no language model", "unknown", "remote code", "no type", "damaged"],
)
def test_the_reason_why_a_model_is_not_served_is_one_line(config, folder, changed, said):
    change_config(folder, **changed)
    assert said in refusal(config, folder)


def test_code_in_a_checkpoint_is_never_run(config, folder, tmp_path):
    mark = tmp_path / "was here"
    change_config(folder, model_type="my_vl", auto_map={"AutoConfig": "my.Config"})
    for name in ("my.py", "configuration_my.py", "processing_my.py"):
        (folder / name).write_text(f"open({str(mark)!r}, 'w')\n")
    refusal(config, folder)
    assert not mark.exists()


def test_missing_weights_of_the_vision_part_are_named(config, folder):
    change_weights(folder, lambda found: {name: t for name, t in found.items() if "projector" not in name})
    said = refusal(config, folder)
    assert "2 tensors of the vision part are missing" in said
    assert "multi_modal_projector.linear.weight" in said


def test_weights_of_the_language_model_may_be_missing(folder):
    whole = load_family(folder, OPTIONS)
    change_weights(folder, lambda found: {n: t for n, t in found.items() if "language_model" not in n})
    assert load_family(folder, OPTIONS).recipe == whole.recipe


@pytest.mark.parametrize(
    ("lost", "said"),
    [
        ("model.safetensors", "neither model.safetensors.index.json nor model.safetensors"),
        ("tokenizer.json", "tokenizer"),
        ("processor_config.json", "processor"),
    ],
)
def test_a_file_that_is_missing_is_refused(config, folder, lost, said):
    (folder / lost).unlink()
    assert said in refusal(config, folder)


def test_a_weight_file_that_ends_early_is_refused(config, folder):
    path = folder / "model.safetensors"
    path.write_bytes(path.read_bytes()[:-1000])
    assert "is cut off" in refusal(config, folder)


def test_a_quantised_language_model_beside_a_full_vision_part_is_served(folder):
    whole = load_family(folder, OPTIONS)
    change_config(folder, quantization_config={"quant_method": "fp8", "weight_block_size": [128, 128]})

    def quantised(found):
        name = next(name for name in found if "language_model" in name and name.endswith("q_proj.weight"))
        return found | {name: found[name].to(torch.float8_e4m3fn), f"{name}_scale_inv": torch.ones(1, 1)}

    change_weights(folder, quantised)
    assert load_family(folder, OPTIONS).recipe == whole.recipe


@pytest.mark.parametrize("kind", [torch.float8_e4m3fn, torch.int8, torch.uint8])
def test_a_quantised_vision_part_is_refused(config, folder, kind):
    def quantised(found):
        name = next(name for name in found if "vision_tower" in name and name.endswith("q_proj.weight"))
        return found | {name: found[name].to(kind)}

    change_weights(folder, quantised)
    assert "q_proj.weight is " in refusal(config, folder)


def test_weights_beside_a_scale_are_quantised(config, folder):
    change_weights(folder, lambda found: found | {"vision_tower.x.weight_scale": torch.ones(1)})
    assert "the vision part" in refusal(config, folder)


def test_without_transformers_the_error_says_what_to_install(config, folder, monkeypatch):
    monkeypatch.setattr(choice, "find_spec", lambda name: None)
    with pytest.raises(ConfigError, match=r"pip install '\.\[transformers\]'"):
        check_model(folder)
    check_model(config.model)  # the server's own towers do not need transformers


def test_two_plug_ins_for_a_model_are_refused(folder, monkeypatch):
    points = [EntryPoint("paligemma", f"{package}:load", GROUP) for package in ("one", "two")]
    monkeypatch.setattr(choice, "entry_points", lambda **_: points)
    with pytest.raises(
        ConfigError, match="several plug-ins serve model_type 'paligemma': one:load, two:load"
    ):
        check_model(folder)


def test_settings_and_versions_change_the_processors_fingerprint(folder, monkeypatch):
    first = load_family(folder, OPTIONS).recipe
    monkeypatch.setattr(f"{GENERIC}.torchvision.__version__", "0.0.1")
    other_torchvision = load_family(folder, OPTIONS).recipe
    assert other_torchvision.model == first.model
    assert other_torchvision.processor != first.processor
    monkeypatch.undo()
    monkeypatch.setattr(f"{GENERIC}.transformers.__version__", "5.99.0")
    other_transformers = load_family(folder, OPTIONS).recipe
    assert other_transformers.model == first.model
    assert other_transformers.processor != first.processor
    monkeypatch.undo()
    path = folder / "processor_config.json"
    settings = json.loads(path.read_text())
    settings["image_processor"]["image_mean"] = [0.4, 0.5, 0.5]
    path.write_text(json.dumps(settings))
    assert load_family(folder, OPTIONS).recipe.processor not in (first.processor, other_torchvision.processor)
