"""The towers of `transformers`: the parity kit on each family, and reading only parts of large checkpoints."""

import ctypes
import json
import mmap
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors import safe_open

from encoder_contract.geometry import Grid
from encoder_service.families import check
from encoder_service.families.choice import load_family
from encoder_service.families.counted_rows import CountedRows
from encoder_service.families.model import LoadOptions, OneByOne
from testing.families import CHECKPOINTS
from testing.family_table import OWN, PAGE, PLACE, in_sglang

OPTIONS = LoadOptions(device="cpu", dtype="float32")
# In the usual run: a family that counts rows on black images, one with native sizes, and one with a fixed size.
USUAL = ("llama4", "mistral3", "paligemma")
MAX_TIME = 1.05  # of `get_image_features`

pytestmark = pytest.mark.slow


@pytest.mark.parametrize(
    "model_type",
    [name if name in USUAL else pytest.param(name, marks=pytest.mark.families) for name in CHECKPOINTS],
)
def test_a_family_passes_the_parity_kit(kept_family, model_type):
    findings = list(check.check(kept_family(model_type), counted=6 if model_type in USUAL else 50))
    assert len(findings) == 4
    assert [finding for finding in findings if not finding.is_right] == []


def test_the_page_has_the_findings_on_every_family():
    found = PLACE.search(PAGE.read_text())
    page = found[0] if found else ""
    assert re.findall(r"^\| `(\w+)` \|", page, re.MULTILINE) == [*OWN, *CHECKPOINTS]
    assert len(re.findall(r"\| 50 sizes, 0 wrong \| equal bits \|", page)) == len([*OWN, *CHECKPOINTS])
    times = re.findall(r"^\| .* `transformers` \| .* \| ([\d.]+) \| [^|]+ \|$", page, re.MULTILINE)
    assert len(times) == len(CHECKPOINTS)
    assert max(map(float, times)) <= MAX_TIME
    said = [in_sglang(model_type) for model_type in (*OWN, *CHECKPOINTS)]
    assert re.findall(r"^\| `.* \| ([^|]+) \|$", page, re.MULTILINE) == said


def test_the_kit_finds_wrong_rows_and_counts(kept_family, monkeypatch, capsys):
    folder = kept_family("paligemma")

    def wrong(folder: Path, options: LoadOptions) -> OneByOne:
        model = load_family(folder, options)
        assert isinstance(model, OneByOne)
        encode, count = model.encode_image, model.rows
        monkeypatch.setattr(model, "encode_image", lambda inputs: encode(inputs) * 1.0001)
        model.geometry = CountedRows(lambda width, height: Grid(1, count(width, height) + (width < 100), 1))
        return model

    monkeypatch.setattr(check, "load_family", wrong)
    monkeypatch.setattr(check, "SIZES", ((640, 480), (300, 900)))
    assert check.main([str(folder), "--sizes", "6"]) == 1
    lines = capsys.readouterr().out.splitlines()
    assert [line.split()[-1] for line in lines] == ["WRONG", "WRONG", "ok", "ok"]


def test_the_kit_reports_an_unusable_folder_in_one_line(tmp_path, capsys):
    assert check.main([str(tmp_path)]) == 2
    assert len(capsys.readouterr().err.splitlines()) == 1


def test_bfloat16_rows_are_near_those_of_float32(kept_family):
    folder = kept_family("mistral3")
    pixels = check.picture(400, 300, 0)
    exact = check._rows(load_family(folder, OPTIONS), pixels)
    rounded = check._rows(load_family(folder, LoadOptions(device="cpu", dtype="bfloat16")), pixels)
    assert rounded.dtype is torch.bfloat16
    assert torch.cosine_similarity(exact, rounded.float()).min() > 0.99


LANGUAGE_MODEL_BYTES = 2 << 30
LOAD = """
import sys
from pathlib import Path
from encoder_service.families.choice import load_family
from encoder_service.families.model import LoadOptions
load_family(Path(sys.argv[1]), LoadOptions(device="cpu", dtype="float32"))
"""


def test_only_the_vision_part_of_a_large_checkpoint_is_read(kept_family, tmp_path):
    """The language model is a hole of 2 GiB in the file. Any part of it that were read would be in the page cache."""
    small = kept_family("paligemma")
    for path in small.iterdir():
        if path.suffix == ".json":
            (tmp_path / path.name).write_bytes(path.read_bytes())
    config = json.loads((small / "config.json").read_text())
    text = config["text_config"]
    text |= {"num_hidden_layers": 80, "intermediate_size": 28672, "layer_types": 40 * text["layer_types"]}
    (tmp_path / "config.json").write_text(json.dumps(config))
    large = tmp_path / "model.safetensors"
    write_sparse(large, small / "model.safetensors")
    assert large.stat().st_blocks * 512 < 0.05 * large.stat().st_size
    subprocess.run([sys.executable, "-c", LOAD, str(tmp_path)], check=True, timeout=300)
    assert cached_bytes(large) < 0.05 * large.stat().st_size


def write_sparse(path, small):
    """Write a checkpoint with the vision part of `small` and a language model that is a hole in the file."""
    header, parts, offset = {}, [], 0
    with safe_open(small, framework="pt") as shard:
        for name in shard.keys():  # noqa: SIM118 - not a mapping
            if "language_model" in name:
                continue
            tensor = shard.get_tensor(name).contiguous()
            parts.append(tensor.numpy().tobytes())
            header[name] = {
                "dtype": "F32",
                "shape": list(tensor.shape),
                "data_offsets": [offset, offset + len(parts[-1])],
            }
            offset += len(parts[-1])
    values = LANGUAGE_MODEL_BYTES // 4
    header["model.language_model.layers.0.mlp.up_proj.weight"] = {
        "dtype": "F32",
        "shape": [values // 128, 128],
        "data_offsets": [offset, offset + 4 * values],
    }
    content = json.dumps({"__metadata__": {"format": "pt"}, **header}).encode()
    content += b" " * (-len(content) % 8)
    with path.open("wb") as file:
        file.write(len(content).to_bytes(8, "little") + content + b"".join(parts))
        file.truncate(file.tell() + 4 * values)


def cached_bytes(path):
    """Return how much of a file is in the page cache."""
    with path.open("r+b") as file, mmap.mmap(file.fileno(), 0) as view:
        pages = -(-len(view) // mmap.PAGESIZE)
        resident = (ctypes.c_ubyte * pages)()
        here = ctypes.addressof(ctypes.c_ubyte.from_buffer(view))
        libc = ctypes.CDLL(None, use_errno=True)
        failed = libc.mincore(ctypes.c_void_p(here), ctypes.c_size_t(len(view)), resident)
        assert not failed, os.strerror(ctypes.get_errno())
        return sum(page & 1 for page in resident) * mmap.PAGESIZE
