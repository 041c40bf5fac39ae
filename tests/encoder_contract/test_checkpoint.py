"""A checkpoint folder: vision tensors, and the fingerprints that are part of every address."""

import json
from pathlib import Path
from typing import Any

import pytest

from encoder_contract.checkpoint import model_fingerprint, require_files, vision_tensors

QWEN3 = {
    "depth": 27,
    "hidden_size": 1152,
    "intermediate_size": 4304,
    "num_heads": 16,
    "out_hidden_size": 4096,
    "num_position_embeddings": 2304,
}
VISION: dict[str, dict[str, Any]] = {
    "qwen3_vl": {**QWEN3, "deepstack_visual_indexes": [8, 16, 24]},
    "qwen3_vl_moe": {**QWEN3, "deepstack_visual_indexes": [8, 16, 24]},
    "qwen2_5_vl": {
        "depth": 32,
        "hidden_size": 1280,
        "intermediate_size": 3420,
        "num_heads": 16,
        "out_hidden_size": 3584,
        "in_chans": 3,
        "window_size": 112,
        "fullatt_block_indexes": [7, 15, 23, 31],
    },
    "qwen3_5": {**QWEN3, "rope_parameters": {"rope_type": "axial", "rope_theta": 20000.0}},
}
QWEN3_VL = "2a8ac695f48e2166"
PINNED = {
    "qwen3_vl": QWEN3_VL,
    "qwen3_vl_moe": QWEN3_VL,
    "qwen2_5_vl": "cc4f0181cfa24023",
    "qwen3_5": "d2cc376b14bc05e4",
}
"""The first 16 digits."""
POINTER = b"version https://git-lfs.github.com/spec/v1\noid sha256:4d7a\nsize 9000\n"
Tensors = dict[str, tuple[str, list[int], bytes]]
"""By full name: element type, shape, bytes."""


def tensors_of(prefix: str) -> Tensors:
    return {
        "lm_head.weight": ("F32", [1], bytes(4)),
        f"{prefix}blocks.0.norm1.weight": ("BF16", [3], b"normed"),
        f"{prefix}patch_embed.proj.weight": ("F32", [2, 3], bytes(range(24))),
    }


def safetensors(tensors: Tensors) -> bytes:
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    data = b""
    for name, (dtype, shape, content) in tensors.items():
        offsets = [len(data), len(data) + len(content)]
        header[name] = {"dtype": dtype, "shape": shape, "data_offsets": offsets}
        data += content
    encoded = json.dumps(header).encode()
    return len(encoded).to_bytes(8, "little") + encoded + data


def write(folder: Path, model_type: str = "qwen3_vl", prefix: str = "model.visual.") -> Path:
    config = {"model_type": model_type, "vision_config": VISION[model_type]}
    (folder / "config.json").write_text(json.dumps(config))
    (folder / "model.safetensors").write_bytes(safetensors(tensors_of(prefix)))
    return folder


@pytest.mark.parametrize("model_type", VISION)
def test_fingerprints_are_pinned(model_type: str, tmp_path: Path) -> None:
    folder = write(tmp_path, model_type)
    assert model_fingerprint(folder).hex()[:16] == PINNED[model_type]


OTHER: dict[str, Any] = {
    "model_type": "gemma3",
    "mm_tokens_per_image": 256,
    "text_config": {"hidden_size": 4},
    "vision_config": {"model_type": "siglip_vision_model"},
}
OTHER_TENSORS: Tensors = {
    "language_model.model.layers.0.mlp.up_proj.weight": ("F32", [1], bytes(4)),
    "model.language_model.embed_tokens.weight": ("F32", [1], bytes(4)),
    "lm_head.weight": ("F32", [1], bytes(4)),
    "multi_modal_projector.mm_input_projection_weight": ("F32", [1], b"proj"),
    "vision_tower.vision_model.encoder.layers.0.layer_norm1.bias": ("F32", [1], b"bias"),
}


def write_other(folder: Path, config: dict[str, Any] | None = None, tensors: Tensors | None = None) -> Path:
    """Write a checkpoint of a family that has no tower of the server's own."""
    (folder / "config.json").write_text(json.dumps({**OTHER, **(config or {})}))
    (folder / "preprocessor_config.json").write_text(json.dumps({"image_mean": [0.5, 0.5, 0.5]}))
    (folder / "model.safetensors").write_bytes(safetensors({**OTHER_TENSORS, **(tensors or {})}))
    return folder


def test_a_fingerprint_of_another_family_covers_all_but_the_language_model(tmp_path: Path) -> None:
    known = {model_fingerprint(write_other(tmp_path))}
    tuned: Tensors = {name: ("F32", [1], b"tune") for name in OTHER_TENSORS if "lang" in name or "lm" in name}
    assert len(tuned) == 3
    text = {"text_config": {"hidden_size": 8}, "quantization_config": {"quant_method": "fp8"}}
    assert model_fingerprint(write_other(tmp_path, text, tuned)) in known
    for name in OTHER_TENSORS.keys() - tuned.keys():
        changed = model_fingerprint(write_other(tmp_path, tensors={name: ("F32", [1], b"else")}))
        assert changed not in known
        known.add(changed)
    for config in ({"mm_tokens_per_image": 64}, {"vision_config": {}}, {"model_type": "paligemma"}):
        changed = model_fingerprint(write_other(tmp_path, config))
        assert changed not in known
        known.add(changed)
    write_other(tmp_path)
    (tmp_path / "preprocessor_config.json").write_text(json.dumps({"image_mean": [0.4, 0.5, 0.5]}))
    assert model_fingerprint(tmp_path) not in known


def test_a_fingerprint_covers_code_that_the_configuration_names(tmp_path: Path) -> None:
    folder = write_other(tmp_path)
    (folder / "notes.py").write_text("1")
    plain = model_fingerprint(folder)
    (folder / "notes.py").write_text("2")
    assert model_fingerprint(folder) == plain
    write_other(folder, {"auto_map": {"AutoConfig": "own.Config"}})
    found = {plain, model_fingerprint(folder)}
    for path, code in (("notes.py", "3"), ("own.py", ""), ("parts/layers.py", ""), ("parts/layers.py", "x")):
        (folder / path).parent.mkdir(exist_ok=True)
        (folder / path).write_text(code)
        found.add(model_fingerprint(folder))
    assert len(found) == 6


def test_the_older_prefix_and_shards_do_not_change_the_fingerprint(tmp_path: Path) -> None:
    fingerprint = model_fingerprint(write(tmp_path))
    (tmp_path / "model.safetensors").unlink()
    weight_map = {}
    for number, (name, tensor) in enumerate(reversed(tensors_of("visual.").items())):
        weight_map[name] = f"{number}.safetensors"
        (tmp_path / weight_map[name]).write_bytes(safetensors({name: tensor}))
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))
    assert model_fingerprint(tmp_path) == fingerprint


def test_only_vision_tensors_are_read(tmp_path: Path) -> None:
    tensors = vision_tensors(write(tmp_path))
    assert list(tensors) == ["blocks.0.norm1.weight", "patch_embed.proj.weight"]
    assert [b"".join(tensor.pieces()) for tensor in tensors.values()] == [b"normed", bytes(range(24))]


@pytest.mark.parametrize(
    "content",
    [
        b"",
        b"not a tensor in sight",
        (1 << 40).to_bytes(8, "little"),
        (2).to_bytes(8, "little") + b"[]",
        safetensors({"model.visual.x": ("F32", [1], b"")}).replace(b"shape", b"shade"),
        *(
            safetensors({"model.visual.x": ("F32", [1], b"")}).replace(b"[0, 0]", offsets)
            for offsets in (b"[8, 0]", b"[-1,4]", b'[0,""]', b"null  ")
        ),
    ],
)
def test_a_damaged_file_is_named(content: bytes, tmp_path: Path) -> None:
    write(tmp_path)
    (tmp_path / "model.safetensors").write_bytes(content)
    with pytest.raises(ValueError, match=r"model\.safetensors"):
        model_fingerprint(tmp_path)


@pytest.mark.parametrize(
    "damage", [{"model_type": ["qwen3_vl"]}, {"vision_config": {**QWEN3, "num_position_embeddings": None}}]
)
def test_a_damaged_configuration_is_named(damage: dict[str, Any], tmp_path: Path) -> None:
    path = write(tmp_path) / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | damage))
    with pytest.raises(ValueError, match=r"config\.json is damaged"):
        model_fingerprint(tmp_path)


def test_a_file_that_ends_early_is_named(tmp_path: Path) -> None:
    path = write(tmp_path) / "model.safetensors"
    whole = path.read_bytes()
    for left in (len(whole) - 1, 9, 0):
        path.write_bytes(whole[:left])
        with pytest.raises(ValueError, match=r"model\.safetensors is .*; download the model again"):
            model_fingerprint(tmp_path)
    path.write_bytes(whole[:-1])
    with pytest.raises(ValueError, match=f"is cut off: it has {len(whole) - 1} of {len(whole)} bytes"):
        require_files(tmp_path)


@pytest.mark.parametrize("name", ["config.json", "model.safetensors", "model.safetensors.index.json"])
def test_a_pointer_of_git_lfs_is_no_file(name: str, tmp_path: Path) -> None:
    (write(tmp_path) / name).write_bytes(POINTER)
    with pytest.raises(ValueError, match=rf"{name} is a pointer of Git LFS .* run `git lfs pull` in"):
        model_fingerprint(tmp_path)


@pytest.mark.parametrize("name", ["model.safetensors", "tokenizer.json"])
def test_files_for_the_language_model_are_checked_if_they_are_needed(name: str, tmp_path: Path) -> None:
    """Its shards may be damaged where only rows are computed."""
    write(tmp_path)
    weight_map = {}
    for full_name in tensors_of("model.visual."):
        weight_map[full_name] = "model.safetensors" if full_name.startswith("lm_") else "vision.safetensors"
    vision = {each: tensor for each, tensor in tensors_of("model.visual.").items() if "visual" in each}
    (tmp_path / "vision.safetensors").write_bytes(safetensors(vision))
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))
    (tmp_path / name).write_bytes(POINTER)
    require_files(tmp_path)
    with pytest.raises(ValueError, match=f"{name} is a pointer of Git LFS"):
        require_files(tmp_path, language_model=True)


def test_a_tensor_in_the_index_but_in_no_file_is_named(tmp_path: Path) -> None:
    weight_map = dict.fromkeys(("model.visual.blocks.9.norm1.weight",), "model.safetensors")
    write(tmp_path)
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))
    with pytest.raises(ValueError, match=r"model\.visual\.blocks\.9\.norm1\.weight is missing"):
        model_fingerprint(tmp_path)


def test_a_damaged_index_is_named(tmp_path: Path) -> None:
    (write(tmp_path) / "model.safetensors.index.json").write_text("{}")
    with pytest.raises(ValueError, match=r"model\.safetensors\.index\.json is not an index"):
        model_fingerprint(tmp_path)


def test_a_folder_without_vision_tensors_is_refused(tmp_path: Path) -> None:
    write(tmp_path, prefix="audio.")
    with pytest.raises(ValueError, match="has no vision tensors"):
        model_fingerprint(tmp_path)
