"""A checkpoint with its own code (auto_map), which the server runs only with `--trust-remote-code`."""

import json
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file
from torch.nn.functional import gelu, linear, unfold

from encoder_contract.checkpoint import model_fingerprint
from encoder_service.families.choice import load_family
from encoder_service.families.model import LoadOptions
from prefill_client import BlockingClient, RowRequest
from testing.families import TEXT
from testing.photos import photo, pixels
from testing.server_process import running
from tests.waiting import PATIENCE_S

WIDTH, SIDE, PATCH = TEXT["hidden_size"], 64, 16
CODE = {
    "configuration_tile.py": """
from transformers import CONFIG_MAPPING, PreTrainedConfig

class TileConfig(PreTrainedConfig):
    model_type = "tile_vl"
    sub_configs = {"text_config": CONFIG_MAPPING["llama"]}

    def __init__(self, text_config=None, image_token_id=0, **named):
        self.text_config = CONFIG_MAPPING["llama"](**(text_config or {}))
        self.image_token_id = image_token_id
        super().__init__(**named)
""",
    "modeling_tile.py": """
import torch
from torch import nn
from transformers import AutoModel, PreTrainedModel
from transformers.modeling_outputs import BaseModelOutputWithPooling

from .configuration_tile import TileConfig

class TileForConditionalGeneration(PreTrainedModel):
    config_class = TileConfig

    def __init__(self, config):
        super().__init__(config)
        width = config.text_config.hidden_size
        self.patches = nn.Conv2d(3, width, 16, 16)
        self.language_model = AutoModel.from_config(config.text_config)
        self.lm_head = nn.Linear(width, config.text_config.vocab_size, bias=False)
        self.post_init()

    def get_decoder(self):
        return self.language_model

    def get_input_embeddings(self):
        return self.language_model.get_input_embeddings()

    def get_output_embeddings(self):
        return self.lm_head

    def get_image_features(self, pixel_values, return_dict=True):
        rows = nn.functional.gelu(self.patches(pixel_values)).flatten(2).transpose(1, 2)
        return BaseModelOutputWithPooling(pooler_output=rows)

    def forward(self, input_ids, pixel_values, attention_mask=None):
        embeds = self.get_input_embeddings()(input_ids)
        rows = self.get_image_features(pixel_values).pooler_output
        places = (input_ids == self.config.image_token_id)[..., None].expand_as(embeds)
        embeds = embeds.masked_scatter(places, rows)
        return self.lm_head(self.language_model(inputs_embeds=embeds).last_hidden_state)
""",
    "image_processing_tile.py": """
import torch
from transformers import BaseImageProcessor, BatchFeature

class TileImageProcessor(BaseImageProcessor):
    model_input_names = ["pixel_values"]

    def __init__(self, side=64, **named):
        super().__init__(**named)
        self.side = side

    def preprocess(self, images, return_tensors=None, **_):
        sized = [
            torch.nn.functional.interpolate(image[None].float(), (self.side, self.side), mode="area")
            for image in images
        ]
        return BatchFeature({"pixel_values": torch.cat(sized) / 127.5 - 1})
""",
    "processing_tile.py": """
from transformers import BatchFeature, ProcessorMixin

class TileProcessor(ProcessorMixin):
    image_processor_class = "AutoImageProcessor"
    tokenizer_class = "AutoTokenizer"

    def __init__(self, image_processor=None, tokenizer=None, **named):
        super().__init__(image_processor, tokenizer, **named)
        self.image_token = tokenizer.image_token

    def __call__(self, images=None, text=None, return_tensors=None):
        rows = (self.image_processor.side // 16) ** 2
        said = [prompt.replace(self.image_token, self.image_token * rows) for prompt in text]
        images = self.image_processor(images)
        return BatchFeature({**self.tokenizer(said, return_tensors=return_tensors), **images})
""",
}


@pytest.fixture
def folder(kept_family: Callable[..., Path], tmp_path: Path) -> Path:
    """A checkpoint whose classes are in its folder and not in `transformers`. It makes one tile an image."""
    folder = tmp_path / "tile"
    folder.mkdir()
    for name, code in CODE.items():
        (folder / name).write_text(code)
    for name in ("tokenizer.json", "tokenizer_config.json"):
        (folder / name).write_bytes((kept_family("paligemma") / name).read_bytes())
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
    text = transformers.LlamaConfig(**TEXT)
    config = {
        "model_type": "tile_vl",
        "auto_map": {
            "AutoConfig": "configuration_tile.TileConfig",
            "AutoModelForImageTextToText": "modeling_tile.TileForConditionalGeneration",
        },
        "dtype": "float32",
        "image_token_id": tokenizer.convert_tokens_to_ids(tokenizer.image_token),
        "text_config": text.to_dict(),
    }
    images = {"auto_map": {"AutoImageProcessor": "image_processing_tile.TileImageProcessor"}, "side": SIDE}
    processor = {"auto_map": {"AutoProcessor": "processing_tile.TileProcessor"}}
    for name, content in (
        ("config.json", config),
        ("preprocessor_config.json", images),
        ("processor_config.json", processor),
    ):
        (folder / name).write_text(json.dumps(content))
    torch.manual_seed(0)
    parts = {
        "patches": torch.nn.Conv2d(3, WIDTH, PATCH, PATCH),
        "language_model": transformers.LlamaModel(text),
        "lm_head": torch.nn.Linear(WIDTH, text.vocab_size, bias=False),
    }
    weights = {
        f"{part}.{name}": t for part, module in parts.items() for name, t in module.state_dict().items()
    }
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    return folder


@pytest.fixture(autouse=True)
def _modules(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Give each test its own folder for the code that `transformers` copies."""
    monkeypatch.setenv("HF_MODULES_CACHE", str(tmp_path / "modules"))


def kit(folder: Path, *flags: str) -> "subprocess.CompletedProcess[str]":
    command = [sys.executable, "-m", "encoder_service.families.check", str(folder), *flags]
    return subprocess.run(command, capture_output=True, text=True, timeout=300, check=False)


def change(path: Path, **values: object) -> None:
    path.write_text(json.dumps(json.loads(path.read_text()) | values))


def test_code_that_is_not_trusted_is_refused_and_not_run(folder: Path, tmp_path: Path) -> None:
    mark = tmp_path / "was here"
    for name, code in CODE.items():
        (folder / name).write_text(f"open({str(mark)!r}, 'w')\n{code}")
    refused = kit(folder)
    assert refused.returncode == 2
    (said,) = refused.stderr.splitlines()
    assert "not run without --trust-remote-code: it would have all rights of the server" in said
    assert not mark.exists()


def test_rows_of_trusted_code_equal_those_of_transformers(folder: Path) -> None:
    compared = kit(folder, "--trust-remote-code", "--sizes", "6")
    assert [line.split()[-1] for line in compared.stdout.splitlines()] == ["ok"] * 4, compared.stderr
    assert "rows against transformers  5 images" in compared.stdout


def test_a_server_runs_trusted_code(folder: Path) -> None:
    with (
        running(folder, trust_remote_code="yes", devices="cpu,cpu", store_host_gib=0.05) as server,
        BlockingClient.connect(server.endpoint, timeout_s=PATIENCE_S) as client,
    ):
        (answer,) = client.submit([photo(SIDE, SIDE, 1, "PNG")])
        (outcome,) = client.fetch([RowRequest(answer.digest)], timeout_s=PATIENCE_S)
        rows = torch.from_numpy(np.array(outcome.array))
        assert client.description.model_fingerprint == model_fingerprint(folder)
        assert "code in the checkpoint runs with the rights of this server" in server.log.read_text()
    weights = load_file(folder / "model.safetensors")
    image = torch.from_numpy(pixels(SIDE, SIDE, 1)).permute(2, 0, 1)[None] / 127.5 - 1
    patches = unfold(image, PATCH, stride=PATCH)[0].T
    expected = gelu(linear(patches, weights["patches.weight"].flatten(1), weights["patches.bias"]))
    assert torch.allclose(rows, expected, atol=1e-5)


TRUSTED = LoadOptions(device="cpu", dtype="float32", trust_remote_code=True)


def test_code_of_another_repository_is_refused(folder: Path) -> None:
    reference = "someone/code--image_processing_tile.TileImageProcessor"
    change(folder / "preprocessor_config.json", auto_map={"AutoImageProcessor": reference})
    with pytest.raises(ValueError, match=rf"preprocessor_config.json names code of another .*{reference}"):
        load_family(folder, TRUSTED)


def test_code_without_a_model_for_images_and_text_is_refused(folder: Path) -> None:
    change(folder / "config.json", auto_map={"AutoConfig": "configuration_tile.TileConfig"})
    with pytest.raises(ValueError, match=r"the auto_map in .* has no AutoModelForImageTextToText"):
        load_family(folder, TRUSTED)


def test_the_code_of_a_model_that_transformers_has_is_never_run(
    kept_family: Callable[..., Path], tmp_path: Path
) -> None:
    folder, mark = shutil.copytree(kept_family("paligemma"), tmp_path / "known"), tmp_path / "was here"
    auto_map = {"AutoConfig": "own.Config", "AutoModelForImageTextToText": "own.Model"}
    change(folder / "config.json", auto_map=auto_map)
    change(folder / "processor_config.json", auto_map={"AutoProcessor": "own.Processor"})
    (folder / "own.py").write_text(f"open({str(mark)!r}, 'w')\n")
    assert load_family(folder, TRUSTED).model_type == "paligemma"
    assert not mark.exists()
