"""Loading a tower: refusals and their messages, what is read, and what the fingerprint covers."""

import json
import shutil
import subprocess
import sys

import pytest
import torch
from safetensors.torch import load_file, save_file

from encoder_contract.checkpoint import model_fingerprint, vision_tensors
from encoder_contract.geometry import Grid
from encoder_contract.processor import ProcessorSettings
from encoder_service.vision import load_tower
from encoder_service.vision.layers import Linear, packing_available
from encoder_service.vision.pointwise import PlainPointwise
from testing.reference_tower import random_patches
from tests.towers import load

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def original(kept_checkpoint):
    return kept_checkpoint(depth=2, vision={"deepstack_visual_indexes": [0]})


@pytest.fixture
def folder(original, tmp_path):
    return shutil.copytree(original, tmp_path / "copy")


def edit_config(folder, **changes):
    config = json.loads((folder / "config.json").read_text())
    for name, value in changes.items():
        part = config if name in config else config["vision_config"]
        part[name] = value
    (folder / "config.json").write_text(json.dumps(config))


def edit_tensors(folder, change):
    tensors = load_file(folder / "model.safetensors")
    change(tensors)
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})


def test_an_unsupported_model_type_is_refused_with_the_list(folder):
    edit_config(folder, model_type="llava")
    with pytest.raises(ValueError, match=r"'llava' is not supported .*qwen3_vl, .*qwen2_5_vl, qwen3_5"):
        load(folder)


def test_settings_that_the_network_does_not_support_are_refused(folder):
    edit_config(folder, hidden_act="relu")
    with pytest.raises(ValueError, match="hidden_act 'relu' is not supported"):
        load(folder)


@pytest.mark.parametrize("levels", [[0, 0], [1, 0], [2]])
def test_deepstack_levels_that_are_not_blocks_in_order_are_refused(folder, levels):
    edit_config(folder, deepstack_visual_indexes=levels)
    with pytest.raises(ValueError, match=r"deepstack_visual_indexes .* must be block numbers in order"):
        load(folder)


def test_missing_left_over_and_misshapen_tensors_are_all_named(folder):
    def change(tensors):
        del tensors["model.visual.blocks.1.attn.qkv.bias"]
        tensors["model.visual.blocks.9.norm1.weight"] = torch.ones(3)
        tensors["model.visual.merger.norm.weight"] = torch.ones(3)

    edit_tensors(folder, change)
    with pytest.raises(ValueError) as error:
        load(folder)
    for problem in (
        "missing: blocks.1.attn.qkv.bias",
        "left over: blocks.9.norm1.weight",
        "of shape (3,) instead of (144,): merger.norm.weight",
    ):
        assert problem in str(error.value)


def test_tensors_are_named_as_in_the_checkpoint(kept_checkpoint, tmp_path):
    def change(tensors):
        del tensors["visual.blocks.0.mlp.up_proj.weight"]
        tensors["visual.merger.ln_q.weight"] = torch.ones(3)

    folder = shutil.copytree(kept_checkpoint("qwen2_5_vl", depth=2), tmp_path / "copy")
    edit_tensors(folder, change)
    with pytest.raises(ValueError) as error:
        load(folder)
    assert "missing: blocks.0.mlp.up_proj.weight" in str(error.value)
    assert "of shape (3,) instead of (160,): merger.ln_q.weight" in str(error.value)


def test_an_incomplete_checkpoint_folder_is_refused(original, kept_checkpoint, tmp_path):
    with pytest.raises(FileNotFoundError, match=r"config\.json is missing"):
        load_tower(tmp_path, device="cpu", dtype="float32", processor=ProcessorSettings.from_folder(original))
    folder = shutil.copytree(kept_checkpoint(depth=2, shards=3), tmp_path / "sharded")
    lost = sorted(folder.glob("*.safetensors"))[1]
    lost.unlink()
    with pytest.raises(FileNotFoundError, match=lost.name):
        load(folder)


def test_a_damaged_weight_file_is_refused_by_name(folder):
    (folder / "model.safetensors").write_bytes(b"not a tensor in sight")
    with pytest.raises(ValueError, match=r"model\.safetensors is not a safetensors file"):
        load(folder)


@pytest.mark.parametrize("option", [{"device": "tpu"}, {"device": "cuda:0"}, {"dtype": "int8"}])
def test_options_that_cannot_be_served_are_refused(folder, option):
    with pytest.raises(ValueError, match=str(next(iter(option.values())))):
        load(folder, **option)


def test_loading_does_not_import_torchs_compiler(original):
    """Importing it takes as long as everything else together."""
    script = f"""
import sys
from encoder_contract.processor import ProcessorSettings
from encoder_service.vision import load_tower
load_tower({str(original)!r}, device="cpu", dtype="float32", processor=ProcessorSettings.from_folder({str(original)!r}))
sys.exit("torch._dynamo" in sys.modules)
"""
    assert subprocess.run([sys.executable, "-c", script], check=False).returncode == 0


@pytest.mark.parametrize("device", ["cuda:1", "cuda"])
@pytest.mark.cuda
def test_the_chosen_gpu_is_current_before_anything_runs_there(folder, monkeypatch, device):
    """Triton's kernels run on the current device, wherever their tensors are."""
    current = []
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "set_device", current.append)
    with pytest.raises(ValueError, match="cannot run here"):
        load(folder, device=device, dtype="bfloat16", attention="flash2")
    assert current == ([torch.device("cuda:1")] if device == "cuda:1" else [])


def test_a_processor_of_another_patch_size_is_refused(folder):
    settings = json.loads((folder / "preprocessor_config.json").read_text())
    (folder / "preprocessor_config.json").write_text(json.dumps(settings | {"patch_size": 14}))
    with pytest.raises(ValueError, match=r"patches of 14 .* config\.json says 16"):
        load(folder)


def test_only_vision_tensors_are_read(folder):
    def change(tensors):
        for name in tensors:
            if not name.startswith("model.visual."):
                tensors[name] = torch.full_like(tensors[name], float("nan"))

    names = vision_tensors(folder)
    assert "patch_embed.proj.weight" in names
    assert not any("language_model" in name or "lm_head" in name for name in names)
    before = load(folder)
    edit_tensors(folder, change)
    patches = random_patches([Grid(1, 4, 4)], 768)
    assert torch.equal(
        before.encode(patches, [Grid(1, 4, 4)])[0], load(folder).encode(patches, [Grid(1, 4, 4)])[0]
    )


def test_a_config_without_default_values_loads(folder):
    config = json.loads((folder / "config.json").read_text())
    for name in (
        "hidden_act",
        "in_channels",
        "num_position_embeddings",
        "rope_parameters",
        "temporal_patch_size",
    ):
        config["vision_config"].pop(name)
    (folder / "config.json").write_text(json.dumps(config))
    assert load(folder).spec.position_side == 48


def test_fingerprint_is_the_same_however_the_folder_is_sharded(kept_checkpoint):
    one, many = (kept_checkpoint(depth=2, shards=shards) for shards in (1, 4))
    assert model_fingerprint(one) == model_fingerprint(many)
    assert len(model_fingerprint(one)) == 32


def test_fingerprint_ignores_the_language_model_and_nothing_else(folder):
    known = {model_fingerprint(folder)}

    def language(tensors):
        tensors["lm_head.weight"] += 1

    edit_tensors(folder, language)
    assert model_fingerprint(folder) in known

    def vision(tensors):
        tensors["model.visual.blocks.0.norm1.bias"][7] += 1e-6

    edit_tensors(folder, vision)
    assert model_fingerprint(folder) not in known
    known.add(model_fingerprint(folder))
    edit_config(folder, rope_parameters={"rope_type": "axial", "rope_theta": 20000.0})
    assert model_fingerprint(folder) not in known
    known.add(model_fingerprint(folder))
    edit_config(folder, model_type="qwen3_5", deepstack_visual_indexes=[])
    assert model_fingerprint(folder) not in known


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_on_the_cpu_weights_are_packed_where_supported(original, dtype):
    module = load(original, dtype=dtype)._module
    products = [part for part in module.modules() if isinstance(part, Linear)]
    packed = packing_available(getattr(torch, dtype))
    assert packed or dtype != "float32" or not torch._C._has_mkldnn
    assert [part._packed is not None for part in products] == [packed] * len(products)
    assert all((part.weight.numel() == 0) == packed for part in products), "the weights are held twice"


def test_a_packed_product_is_as_exact_as_float32():
    torch.manual_seed(1)
    product, x = Linear(288, 96), torch.randn(300, 288)
    product.weight.data, product.bias.data = torch.randn(96, 288), torch.randn(96)
    weight, bias, residual = product.weight.double(), product.bias.double(), torch.randn(300, 96)
    exact = x.double() @ weight.t() + bias
    product.pack(256)
    with torch.inference_mode():
        for found, wanted in (
            (product(x), exact),
            (product.gelu_tanh(x), torch.nn.functional.gelu(exact, approximate="tanh")),
            (product.gelu_erf(x, PlainPointwise()), torch.nn.functional.gelu(exact)),
            (product.plus(residual.clone(), x), exact + residual),
        ):
            assert (found - wanted).abs().max() <= 1e-5 * exact.abs().max()


def test_weights_that_are_overwritten_later_do_not_change_the_tower(folder):
    tower, grid = load(folder), Grid(1, 8, 8)
    patches = random_patches([grid], tower.spec.patch_values)
    before = [rows.clone() for rows in tower.encode(patches, [grid])]
    path = folder / "model.safetensors"
    size = path.stat().st_size
    with path.open("r+b") as file:
        file.seek(size // 2)
        file.write(bytes(size - size // 2))
    assert all(map(torch.equal, tower.encode(patches, [grid]), before))
