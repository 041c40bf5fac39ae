"""Processor settings: read from every layout of a checkpoint folder, and refused if unsupported."""

import json
from typing import Any

import pytest
from transformers import AutoImageProcessor, Qwen2VLImageProcessorPil

from encoder_contract.processor import ProcessorSettings
from testing.checkpoints import QWEN2_5_PREPROCESSOR, QWEN3_PREPROCESSOR


def write(folder, settings, name="preprocessor_config.json"):
    (folder / name).write_text(json.dumps(settings))
    return folder


@pytest.mark.parametrize("layout", ["as published", "as saved", "nested"])
@pytest.mark.parametrize("style", [QWEN2_5_PREPROCESSOR, QWEN3_PREPROCESSOR], ids=["qwen2_5_vl", "qwen3_vl"])
def test_settings_are_read_as_by_transformers(tmp_path, style, layout):
    processor = Qwen2VLImageProcessorPil(**style)
    if layout == "nested":
        write(tmp_path, {"image_processor": processor.to_dict()}, "processor_config.json")
        write(tmp_path, {**style, "patch_size": 99})  # the nested settings win
    elif layout == "as saved":
        processor.save_pretrained(tmp_path)
    else:
        write(tmp_path, style)
    settings = ProcessorSettings.from_folder(tmp_path)
    theirs = AutoImageProcessor.from_pretrained(tmp_path, backend="pil")
    assert settings.geometry.patch_size == theirs.patch_size
    assert settings.geometry.merge_size == theirs.merge_size
    assert settings.geometry.min_pixels == theirs.size["shortest_edge"]
    assert settings.geometry.max_pixels == theirs.size["longest_edge"]
    assert settings.mean == tuple(theirs.image_mean)
    assert settings.std == tuple(theirs.image_std)
    assert settings.rescale_factor == theirs.rescale_factor


def test_top_level_bounds_win_over_size(tmp_path):
    both = {**QWEN3_PREPROCESSOR, "min_pixels": 4096, "max_pixels": 8192}
    geometry = ProcessorSettings.from_folder(write(tmp_path, both)).geometry
    assert (geometry.min_pixels, geometry.max_pixels) == (4096, 8192)


def test_a_processor_config_without_image_settings_is_skipped(tmp_path):
    write(tmp_path, {"processor_class": "Qwen3VLProcessor"}, "processor_config.json")
    assert ProcessorSettings.from_folder(write(tmp_path, QWEN3_PREPROCESSOR)).geometry.patch_size == 16


def test_a_folder_without_settings_names_both_files(tmp_path):
    with pytest.raises(FileNotFoundError, match=r"preprocessor_config.json.*processor_config.json"):
        ProcessorSettings.from_folder(tmp_path)


@pytest.mark.parametrize("missing", ["patch_size", "merge_size", "image_mean", "image_std", "size"])
def test_a_missing_setting_is_named_with_its_file(tmp_path, missing):
    settings = {name: value for name, value in QWEN3_PREPROCESSOR.items() if name != missing}
    expected = "min_pixels" if missing == "size" else missing
    with pytest.raises(ValueError, match=rf"preprocessor_config.json: .*{expected}"):
        ProcessorSettings.from_folder(write(tmp_path, settings))


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("resample", 2),
        ("do_resize", False),
        ("do_rescale", False),
        ("do_normalize", False),
        ("do_convert_rgb", False),
        ("image_processor_type", "CLIPImageProcessor"),
        ("patch_size", "16"),
        ("patch_size", True),
        ("patch_size", 0),
        ("merge_size", 1.5),
        ("min_pixels", 16777217),
        ("image_mean", [0.5, 0.5]),
        ("image_mean", 0.5),
        ("image_mean", [0.5, "x", 0.5]),
        ("image_std", [0.5, 0.0, 0.5]),
        ("image_std", [0.5, float("nan"), 0.5]),
        ("rescale_factor", 0),
        ("rescale_factor", "1/255"),
    ],
)
def test_an_unsupported_processor_setting_is_refused_by_name(tmp_path, name, value):
    with pytest.raises(ValueError, match=name):
        ProcessorSettings.from_folder(write(tmp_path, {**QWEN3_PREPROCESSOR, name: value}))


@pytest.mark.parametrize("content", [b"", b"{", b"[]", b"\xff\xfe\x00"])
def test_a_damaged_file_is_named(tmp_path, content):
    (tmp_path / "preprocessor_config.json").write_bytes(content)
    with pytest.raises(ValueError, match=r"preprocessor_config.json"):
        ProcessorSettings.from_folder(tmp_path)


def test_the_fingerprint_changes_with_every_setting_and_with_nothing_else(tmp_path):
    changes: list[dict[str, Any]] = [
        {},
        {"patch_size": 14},
        {"merge_size": 1},
        {"min_pixels": 65537},
        {"max_pixels": 16777215},
        {"image_mean": [0.5, 0.5, 0.4]},
        {"image_std": [0.5, 0.4, 0.5]},
        {"rescale_factor": 1 / 127.5},
    ]
    prints = [
        ProcessorSettings.from_folder(write(tmp_path, {**QWEN3_PREPROCESSOR, **c})).fingerprint
        for c in changes
    ]
    assert len(set(prints)) == len(changes)
    assert all(len(fingerprint) == 32 for fingerprint in prints)
    unrelated = {
        **QWEN3_PREPROCESSOR,
        "processor_class": "Other",
        "resample": 3,
        "image_processor_type": "Qwen2VLImageProcessor",
    }
    assert ProcessorSettings.from_folder(write(tmp_path, unrelated)).fingerprint == prints[0]


def test_the_fingerprint_is_pinned(tmp_path):
    fingerprint = ProcessorSettings.from_folder(write(tmp_path, QWEN3_PREPROCESSOR)).fingerprint
    assert fingerprint.hex()[:16] == "cb25e65966a84af4"
