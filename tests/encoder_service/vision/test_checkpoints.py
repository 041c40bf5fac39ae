"""The checkpoints that tests and benchmarks write: `transformers` loads them, and their images affect tokens."""

import json

import pytest
import torch
import transformers

from testing.checkpoints import SPECIAL_TOKENS, write_checkpoint

pytestmark = pytest.mark.slow


@pytest.mark.parametrize("model_type", ["qwen3_vl", "qwen3_vl_moe", "qwen2_5_vl", "qwen3_5", "qwen4_exp"])
def test_transformers_loads_every_tensor_of_a_sharded_checkpoint(tmp_path, model_type):
    folder = write_checkpoint(tmp_path, model_type, shards=3)
    assert len(list(folder.glob("*.safetensors"))) >= 3
    _, report = transformers.AutoModelForImageTextToText.from_pretrained(folder, output_loading_info=True)
    assert not any(report.values())
    assert json.loads((folder / "config.json").read_text())["model_type"] == model_type


def test_the_same_seed_gives_the_same_weights_and_another_seed_others(tmp_path):
    bodies = [
        write_checkpoint(tmp_path / str(number), seed=seed).joinpath("model.safetensors").read_bytes()
        for number, seed in enumerate((5, 5, 6))
    ]
    assert bodies[0] == bodies[1]
    assert bodies[0] != bodies[2]


def test_next_token_depends_on_the_image(tmp_path):
    model = transformers.AutoModelForImageTextToText.from_pretrained(write_checkpoint(tmp_path))
    pad = model.config.image_token_id
    tokens = torch.tensor([[72, *[pad] * 24, 73]])
    logits = []
    for seed in (0, 1):
        pixels = torch.randn(96, 3 * 2 * 16 * 16, generator=torch.Generator().manual_seed(seed))
        with torch.no_grad():
            output = model(
                input_ids=tokens,
                pixel_values=pixels,
                image_grid_thw=torch.tensor([[1, 8, 12]]),
                mm_token_type_ids=(tokens == pad).int(),
            )
        logits.append(output.logits[0, -1])
    assert (logits[0] - logits[1]).std() > 0.05 * logits[0].std()


def test_tokenizer_keeps_special_tokens_whole_and_round_trips_any_text(tmp_path):
    tokenizer = transformers.AutoTokenizer.from_pretrained(write_checkpoint(tmp_path))
    text = "<|im_start|>user\n<|vision_start|><|image_pad|><|vision_end|>Grüße, 世界<|im_end|>"
    tokens = tokenizer(text)["input_ids"]
    assert tokenizer.decode(tokens) == text
    assert tokens.count(256 + SPECIAL_TOKENS.index("<|image_pad|>")) == 1
