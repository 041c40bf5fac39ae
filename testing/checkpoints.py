"""Writes checkpoint folders: real schemas and tensor names, seeded random weights, saved by transformers itself.

What describes a checkpoint can be imported in no time; torch and transformers are imported when one is written.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch
    from torch import Tensor, nn
    from transformers import PreTrainedModel, PreTrainedTokenizerFast

# The markers of Qwen's chat format. They follow a token for each byte: a real tokenizer with a small vocabulary.
SPECIAL_TOKENS = (
    "<|endoftext|>",
    "<|im_start|>",
    "<|im_end|>",
    "<|vision_start|>",
    "<|vision_end|>",
    "<|image_pad|>",
    "<|video_pad|>",
)
VOCABULARY = 512
_SPECIAL_ID = {token: 256 + position for position, token in enumerate(SPECIAL_TOKENS)}

CHAT_TEMPLATE = (
    "{% for message in messages %}<|im_start|>{{ message.role }}\n"
    "{% if message.content is string %}{{ message.content }}{% else %}{% for part in message.content %}"
    "{% if part.type in ('image', 'image_url') %}<|vision_start|><|image_pad|><|vision_end|>"
    "{% elif part.type in ('video', 'video_url') %}<|vision_start|><|video_pad|><|vision_end|>"
    "{% else %}{{ part.text }}{% endif %}{% endfor %}{% endif %}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)

_CLASSES = {
    "qwen3_vl": ("Qwen3VLConfig", "Qwen3VLForConditionalGeneration"),
    "qwen3_vl_moe": ("Qwen3VLMoeConfig", "Qwen3VLMoeForConditionalGeneration"),
    "qwen2_5_vl": ("Qwen2_5_VLConfig", "Qwen2_5_VLForConditionalGeneration"),
    "qwen3_5": ("Qwen3_5Config", "Qwen3_5ForConditionalGeneration"),
    "qwen4_exp": ("Qwen4ExpConfig", "Qwen4ExpForConditionalGeneration"),
}

# As published beside the checkpoints of each family.
QWEN3_PREPROCESSOR: dict[str, Any] = {
    "size": {"longest_edge": 16777216, "shortest_edge": 65536},
    "patch_size": 16,
    "temporal_patch_size": 2,
    "merge_size": 2,
    "image_mean": [0.5, 0.5, 0.5],
    "image_std": [0.5, 0.5, 0.5],
    "processor_class": "Qwen3VLProcessor",
    "image_processor_type": "Qwen2VLImageProcessorFast",
}
QWEN2_5_PREPROCESSOR: dict[str, Any] = {
    "min_pixels": 3136,
    "max_pixels": 12845056,
    "patch_size": 14,
    "temporal_patch_size": 2,
    "merge_size": 2,
    "image_mean": [0.48145466, 0.4578275, 0.40821073],
    "image_std": [0.26862954, 0.26130258, 0.27577711],
    "image_processor_type": "Qwen2VLImageProcessor",
    "processor_class": "Qwen2_5_VLProcessor",
}

# Resizes images to a quarter of a megapixel at most: the tiny tower takes milliseconds for each.
SMALL_IMAGES = {"size": {"shortest_edge": 65536, "longest_edge": 262144}}


def write_checkpoint(
    folder: str | Path,
    model_type: str = "qwen3_vl",
    *,
    depth: int | None = None,
    text_layers: int = 4,
    seed: int = 0,
    dtype: torch.dtype | None = None,
    shards: int = 1,
    vision_only: bool = False,
    vision: Mapping[str, Any] | None = None,
    text: Mapping[str, Any] | None = None,
    preprocessor: Mapping[str, Any] | None = None,
) -> Path:
    """Write a Hugging Face checkpoint folder with seeded random weights and return its path.

    By default the whole model is tiny (a few MB, `depth` 4, float32) with the head size of the real tower.
    With `vision_only` the tower has its published size and depth (bfloat16), and the language model is as small as its
    width allows. `vision` and `text` override fields of the two models' configurations, `preprocessor` those of
    preprocessor_config.json. `shards` is the least number of weight files.
    """
    import torch

    folder = Path(folder)
    dtype = dtype or (torch.bfloat16 if vision_only else torch.float32)
    vision_part = vision_config(model_type, depth, full=vision_only) | dict(vision or {})
    layers = 1 if vision_only else text_layers
    text_part = _text_config(model_type, vision_part["out_hidden_size"], layers) | dict(text or {})
    model = _model(model_type, vision_part, text_part, dtype)
    _fill(model, seed)
    size_bytes = sum(tensor.numel() * tensor.element_size() for tensor in model.state_dict().values())
    for stale in folder.glob("model*.safetensors*"):  # an old index would name other shards
        stale.unlink()
    is_moe = model_type == "qwen3_vl_moe"
    model.save_pretrained(
        folder,
        state_dict=_with_transposed_experts(model.state_dict()) if is_moe else None,
        save_original_format=not is_moe,  # it would transpose the experts back
        max_shard_size=max(size_bytes // shards, 1) if shards > 1 else "50GB",
    )
    settings = dict(QWEN2_5_PREPROCESSOR if model_type == "qwen2_5_vl" else QWEN3_PREPROCESSOR)
    settings.update(preprocessor or {})
    (folder / "preprocessor_config.json").write_text(json.dumps(settings, indent=2) + "\n")
    tokenizer = byte_tokenizer(SPECIAL_TOKENS, bos=None, eos="<|im_end|>", pad="<|endoftext|>")
    tokenizer.chat_template = CHAT_TEMPLATE
    tokenizer.save_pretrained(folder)
    return folder


def vision_config(model_type: str, depth: int | None = None, *, full: bool = False) -> dict[str, Any]:
    """Return the vision part of config.json: as published if `full`, else a tiny one of the same schema."""
    if model_type == "qwen2_5_vl":
        depth = depth or (32 if full else 4)
        stride = max(depth // 4, 2)
        return {
            "depth": depth,
            "hidden_size": 1280 if full else 160,
            "intermediate_size": 3420 if full else 428,
            "num_heads": 16 if full else 2,
            "out_hidden_size": 3584 if full else 128,
            "patch_size": 14,
            "window_size": 112,
            "fullatt_block_indexes": list(range(stride - 1, depth, stride)),
        }
    depth = depth or (27 if full else 4)
    config: dict[str, Any] = {
        "depth": depth,
        "hidden_size": 1152 if full else 144,
        "intermediate_size": 4304 if full else 540,
        "num_heads": 16 if full else 2,
        "out_hidden_size": 4096 if full else 128,
        "num_position_embeddings": 2304,
    }
    if model_type not in ("qwen3_5", "qwen4_exp"):
        config["deepstack_visual_indexes"] = sorted({level * depth // 27 for level in (8, 16, 24)})
    return config


def _text_config(model_type: str, hidden: int, layers: int) -> dict[str, Any]:
    config: dict[str, Any] = {
        "vocab_size": VOCABULARY,
        "hidden_size": hidden,
        "intermediate_size": 256,
        "num_hidden_layers": layers,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "max_position_embeddings": 32768,
        "rope_parameters": {"rope_type": "default", "rope_theta": 1e6, "mrope_section": [6, 5, 5]},
        "bos_token_id": _SPECIAL_ID["<|endoftext|>"],
        "eos_token_id": _SPECIAL_ID["<|im_end|>"],
        "pad_token_id": _SPECIAL_ID["<|endoftext|>"],
    }
    if model_type == "qwen2_5_vl":  # it derives its head size: a quarter of the width
        config["rope_parameters"]["mrope_section"] = [hidden // 32, hidden // 64 * 3, hidden // 64 * 3]
        return config
    config["head_dim"] = 32
    config["rope_parameters"]["mrope_interleaved"] = True
    if model_type == "qwen3_vl_moe":
        # vLLM reads how the router's weights are scaled; transformers always scales them. An expert's matrices are not
        # square, so that a transposed one is noticed.
        config |= {
            "num_experts": 4,
            "num_experts_per_tok": 2,
            "moe_intermediate_size": 96,
            "norm_topk_prob": True,
        }
    if model_type in ("qwen3_5", "qwen4_exp"):
        config |= {
            "linear_key_head_dim": 16,
            "linear_value_head_dim": 16,
            "linear_num_key_heads": 4,
            "linear_num_value_heads": 8,
        }
        config["rope_parameters"] |= {"partial_rotary_factor": 0.5, "mrope_section": [3, 3, 2]}
    if model_type == "qwen4_exp":
        config |= {
            "num_experts": 4,
            "num_experts_per_tok": 2,
            "moe_intermediate_size": 96,
            "shared_expert_intermediate_size": 96,
            "hc_lowrank": 8,
            "indexer_n_heads": 2,
            "indexer_kv_heads": 1,
            "indexer_head_dim": 32,
            "indexer_budget": 64,
            "indexer_compress_ratio": 4,
        }
    return config


def _model(
    model_type: str, vision: dict[str, Any], text: dict[str, Any], dtype: torch.dtype
) -> PreTrainedModel:
    import torch
    import transformers
    from transformers import initialization

    config_name, model_name = _CLASSES[model_type]
    config = getattr(transformers, config_name)(
        vision_config=vision,
        text_config=text,
        image_token_id=_SPECIAL_ID["<|image_pad|>"],
        video_token_id=_SPECIAL_ID["<|video_pad|>"],
        vision_start_token_id=_SPECIAL_ID["<|vision_start|>"],
        vision_end_token_id=_SPECIAL_ID["<|vision_end|>"],
        tie_word_embeddings=False,
        dtype=dtype,
    )
    previous = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        with initialization.no_init_weights():  # filled below
            return getattr(transformers, model_name)(config).eval()
    finally:
        torch.set_default_dtype(previous)


def _fill(model: nn.Module, seed: int) -> None:
    """Fill every parameter so that signals keep their size: unit gain in products, norms near one."""
    import torch

    generator = torch.Generator().manual_seed(seed)
    for name, parameter in sorted(model.named_parameters()):
        noise = torch.randn(parameter.shape, generator=generator)
        parameter.data.copy_(_scaled(name, noise))


def _with_transposed_experts(weights: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return the weights as Qwen3-VL-MoE publishes them: with the transposes of the experts' matrices."""
    experts = (".experts.gate_up_proj", ".experts.down_proj")
    return {
        name: tensor.transpose(1, 2).contiguous() if name.endswith(experts) else tensor
        for name, tensor in weights.items()
    }


def _scaled(name: str, noise: Tensor) -> Tensor:
    if noise.dim() == 1:
        if name.endswith("bias"):
            return noise * 0.1
        centre = 0.0 if name.endswith(("dt_bias", "A_log")) else 1.0
        return centre + 0.1 * noise
    if "embed_tokens" in name or "pos_embed" in name:
        return noise
    fan_in = noise.shape[-1] if "experts" in name else noise[0].numel()
    return noise / math.sqrt(fan_in)


def byte_tokenizer(
    special: Sequence[str], *, bos: str | None, eos: str, pad: str, extra: Mapping[str, str] | None = None
) -> PreTrainedTokenizerFast:
    """Return a tokenizer with a token for each byte and then these special tokens, which it lists as special.

    `extra` names those that it has as attributes instead of a list.
    """
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE(vocab={token: index for index, token in enumerate(alphabet)}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken(token, special=True, normalized=False) for token in special])
    listed = [token for token in special if token not in (bos, eos, pad)] if extra is None else dict(extra)
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, bos_token=bos, eos_token=eos, pad_token=pad, extra_special_tokens=listed
    )
