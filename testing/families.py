"""Writes checkpoint folders of the families that `transformers` encodes, with seeded random weights.

Image processors, tile and patch sizes are those of published checkpoints, so that images have as many rows as there.
Towers and language models are shrunk to a few MB.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
import transformers

from testing.checkpoints import byte_tokenizer

VOCABULARY = 512
FIRST_SPECIAL = 256

TEXT: dict[str, Any] = {
    "vocab_size": VOCABULARY,
    "hidden_size": 128,
    "intermediate_size": 256,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "max_position_embeddings": 8192,
    "pad_token_id": FIRST_SPECIAL,
    "eos_token_id": FIRST_SPECIAL + 1,
    "bos_token_id": FIRST_SPECIAL + 2,
}
VISION: dict[str, Any] = {
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
}
SIGLIP = VISION | {"model_type": "siglip_vision_model", "patch_size": 14, "vision_use_head": False}
WITHOUT_HEAD_DIM = {name: value for name, value in TEXT.items() if name != "head_dim"}
GLM_TEXT = {name: value for name, value in TEXT.items() if name not in ("head_dim", "bos_token_id")} | {
    "rope_parameters": {
        "rope_type": "default",
        "rope_theta": 1e4,
        "mrope_section": [4, 2, 2],
        "partial_rotary_factor": 0.5,
    }
}
GLM_VISION = {
    "depth": 2,
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_heads": 2,
    "out_hidden_size": 128,
    "image_size": 336,
    "patch_size": 14,
}
GLM_TOKENS = {
    "image_token_id": "<|image|>",
    "video_token_id": "<|video|>",
    "image_start_token_id": "<|begin_of_image|>",
    "image_end_token_id": "<|end_of_image|>",
    "video_start_token_id": "<|begin_of_video|>",
    "video_end_token_id": "<|end_of_video|>",
}
TILES = tuple(f"<row_{row}_col_{column}>" for row in range(1, 7) for column in range(1, 7))
IDEFICS_TOKENS = ("<fake_token_around_image>", "<image>", "<end_of_utterance>", "<global-img>", *TILES)


@dataclass(frozen=True)
class FamilyCheckpoint:
    """A family's checkpoint: its name, the settings of its configuration and processors, and its special tokens.

    `tokens` maps fields of the configuration to the special token whose id they hold, `named` attributes of the
    tokenizer to special tokens. `published` names a checkpoint with these settings, for readers.
    """

    name: str
    published: str
    image_processor: str
    processor: str
    special: tuple[str, ...]
    text: Mapping[str, Any] = field(default_factory=lambda: TEXT)
    vision: Mapping[str, Any] = field(default_factory=lambda: VISION)
    top: Mapping[str, Any] = field(default_factory=dict)
    tokens: Mapping[str, str] = field(default_factory=dict)
    named: Mapping[str, str] = field(default_factory=dict)
    image_settings: Mapping[str, Any] = field(default_factory=dict)
    processor_settings: Mapping[str, Any] = field(default_factory=dict)
    video_processor: str = ""


CHECKPOINTS = {
    "gemma3": FamilyCheckpoint(
        "Gemma 3",
        "google/gemma-3-4b-it",
        "Gemma3ImageProcessor",
        "Gemma3Processor",
        ("<start_of_image>", "<end_of_image>", "<image_soft_token>"),
        text=TEXT | {"layer_types": ["sliding_attention", "full_attention"], "query_pre_attn_scalar": 32},
        vision=SIGLIP | {"image_size": 896},
        top={"mm_tokens_per_image": 256},
        tokens={
            "image_token_index": "<image_soft_token>",
            "boi_token_index": "<start_of_image>",
            "eoi_token_index": "<end_of_image>",
        },
        named={
            "image_token": "<image_soft_token>",
            "boi_token": "<start_of_image>",
            "eoi_token": "<end_of_image>",
        },
        image_settings={"size": {"height": 896, "width": 896}, "image_seq_length": 256},
        processor_settings={"image_seq_length": 256},
    ),
    "mistral3": FamilyCheckpoint(
        "Mistral Small 3, Pixtral",
        "mistralai/Mistral-Small-3.1-24B-Instruct-2503",
        "PixtralImageProcessor",
        "PixtralProcessor",
        ("[IMG]", "[IMG_BREAK]", "[IMG_END]"),
        text=TEXT | {"model_type": "mistral"},
        vision=VISION | {"model_type": "pixtral", "image_size": 1540, "patch_size": 14, "head_dim": 32},
        top={"spatial_merge_size": 2},
        tokens={"image_token_index": "[IMG]"},
        image_settings={"patch_size": 14, "size": {"longest_edge": 1540}},
        processor_settings={"patch_size": 14, "spatial_merge_size": 2},
    ),
    "internvl": FamilyCheckpoint(
        "InternVL 3.5 (-hf)",
        "OpenGVLab/InternVL3_5-8B-HF",
        "GotOcr2ImageProcessor",
        "InternVLProcessor",
        ("<img>", "</img>", "<IMG_CONTEXT>", "<video>"),
        text=TEXT | {"model_type": "qwen2"},
        vision=VISION | {"image_size": [448, 448], "patch_size": [14, 14]},
        top={"image_seq_length": 256},
        tokens={"image_token_id": "<IMG_CONTEXT>"},
        named={
            "start_image_token": "<img>",
            "end_image_token": "</img>",
            "context_image_token": "<IMG_CONTEXT>",
            "video_token": "<video>",
        },
        image_settings={
            "size": {"height": 448, "width": 448},
            "crop_to_patches": True,
            "min_patches": 1,
            "max_patches": 12,
        },
        processor_settings={"image_seq_length": 256},
        video_processor="InternVLVideoProcessor",
    ),
    "llava_onevision": FamilyCheckpoint(
        "LLaVA-OneVision",
        "llava-hf/llava-onevision-qwen2-7b-ov-hf",
        "LlavaOnevisionImageProcessor",
        "LlavaOnevisionProcessor",
        ("<image>", "<video>"),
        text=TEXT | {"model_type": "qwen2"},
        vision=SIGLIP | {"image_size": 384},
        tokens={"image_token_index": "<image>", "video_token_index": "<video>"},
        processor_settings={"num_image_tokens": 729, "vision_feature_select_strategy": "full"},
        video_processor="LlavaOnevisionVideoProcessor",
    ),
    "qwen2_vl": FamilyCheckpoint(
        "Qwen2-VL",
        "Qwen/Qwen2-VL-7B-Instruct",
        "Qwen2VLImageProcessor",
        "Qwen2VLProcessor",
        ("<|vision_start|>", "<|vision_end|>", "<|image_pad|>", "<|video_pad|>"),
        text=WITHOUT_HEAD_DIM
        | {"rope_parameters": {"rope_type": "default", "rope_theta": 1e6, "mrope_section": [4, 6, 6]}},
        vision={
            "depth": 2,
            "embed_dim": 64,
            "hidden_size": 128,
            "num_heads": 2,
            "mlp_ratio": 2,
            "in_chans": 3,  # SGLang reads it
        },
        tokens={
            "image_token_id": "<|image_pad|>",
            "video_token_id": "<|video_pad|>",
            "vision_start_token_id": "<|vision_start|>",
            "vision_end_token_id": "<|vision_end|>",
        },
        image_settings={"size": {"shortest_edge": 3136, "longest_edge": 12845056}},
        video_processor="Qwen2VLVideoProcessor",
    ),
    "glm4v": FamilyCheckpoint(
        "GLM-4.1V",
        "zai-org/GLM-4.1V-9B-Thinking",
        "Glm4vImageProcessor",
        "Glm4vProcessor",
        tuple(GLM_TOKENS.values()),
        text=GLM_TEXT,
        vision=GLM_VISION,
        tokens=GLM_TOKENS,
        named={"image_token": "<|image|>", "video_token": "<|video|>"},
        image_settings={"size": {"shortest_edge": 12544, "longest_edge": 9633792}},
        video_processor="Glm4vVideoProcessor",
    ),
    "glm46v": FamilyCheckpoint(
        "GLM-4.6V",
        "zai-org/GLM-4.6V-Flash",
        "Glm46VImageProcessor",
        "Glm46VProcessor",
        tuple(GLM_TOKENS.values()),
        text=GLM_TEXT | {"model_type": "glm4v_text"},
        vision=GLM_VISION | {"model_type": "glm4v_vision"},
        tokens=GLM_TOKENS,
        named={"image_token": "<|image|>", "video_token": "<|video|>"},
        image_settings={"size": {"shortest_edge": 12544, "longest_edge": 9633792}},
        video_processor="Glm46VVideoProcessor",
    ),
    "idefics3": FamilyCheckpoint(
        "Idefics 3",
        "HuggingFaceM4/Idefics3-8B-Llama3",
        "Idefics3ImageProcessor",
        "Idefics3Processor",
        IDEFICS_TOKENS,
        text=TEXT | {"model_type": "llama"},
        vision=VISION | {"image_size": 364, "patch_size": 14},
        top={"scale_factor": 2},
        tokens={"image_token_id": "<image>"},
        image_settings={"size": {"longest_edge": 1456}, "max_image_size": {"longest_edge": 364}},
        processor_settings={"image_seq_len": 169},
    ),
    "smolvlm": FamilyCheckpoint(
        "SmolVLM 2",
        "HuggingFaceTB/SmolVLM2-2.2B-Instruct",
        "SmolVLMImageProcessor",
        "SmolVLMProcessor",
        (*IDEFICS_TOKENS, "<video>"),
        text=TEXT | {"model_type": "llama"},
        vision=VISION | {"image_size": 384, "patch_size": 14},
        top={"scale_factor": 3},
        tokens={"image_token_id": "<image>"},
        image_settings={"size": {"longest_edge": 1536}, "max_image_size": {"longest_edge": 384}},
        processor_settings={"image_seq_len": 81},
        video_processor="SmolVLMVideoProcessor",
    ),
    "llama4": FamilyCheckpoint(
        "Llama 4",
        "meta-llama/Llama-4-Scout-17B-16E-Instruct",
        "Llama4ImageProcessor",
        "Llama4Processor",
        (
            "<|image_start|>",
            "<|image_end|>",
            "<|image|>",
            "<|patch|>",
            "<|tile_x_separator|>",
            "<|tile_y_separator|>",
        ),
        text=TEXT | {"intermediate_size_mlp": 256, "num_local_experts": 2},
        vision=VISION
        | {
            "image_size": 336,
            "patch_size": 14,
            "intermediate_size": 256,
            "projector_input_dim": 96,
            "projector_output_dim": 96,
            "vision_output_dim": 96,
        },
        tokens={
            "image_token_index": "<|patch|>",
            "boi_token_index": "<|image_start|>",
            "eoi_token_index": "<|image_end|>",
        },
        image_settings={"max_patches": 16},
        processor_settings={"patch_size": 14, "pixel_shuffle_ratio": 0.5},
    ),
    "paligemma": FamilyCheckpoint(
        "PaliGemma 2",
        "google/paligemma2-3b-pt-224",
        "SiglipImageProcessor",
        "PaliGemmaProcessor",
        ("<image>",),
        text=TEXT | {"model_type": "gemma2", "query_pre_attn_scalar": 32},
        vision=SIGLIP | {"image_size": 224, "projection_dim": 128},
        top={"projection_dim": 128},
        tokens={"image_token_index": "<image>"},
        named={"image_token": "<image>"},
        image_settings={"size": {"height": 224, "width": 224}, "image_seq_length": 256},
    ),
    "minicpmv4_6": FamilyCheckpoint(
        "MiniCPM-V 4.6",
        "openbmb/MiniCPM-V-4_6",
        "MiniCPMV4_6ImageProcessor",
        "MiniCPMV4_6Processor",
        (
            "<image>",
            "</image>",
            "<slice>",
            "</slice>",
            "<image_id>",
            "</image_id>",
            "<|image_pad|>",
            "<|video_pad|>",
        ),
        text=TEXT | {"model_type": "qwen3"},
        vision=VISION | {"image_size": 980, "patch_size": 14, "insert_layer_id": 1},
        top={"insert_layer_id": 1},
        tokens={"image_token_id": "<|image_pad|>", "video_token_id": "<|video_pad|>"},
        named={
            "image_token": "<|image_pad|>",
            "video_token": "<|video_pad|>",
            "image_start_token": "<image>",
            "image_end_token": "</image>",
            "slice_start_token": "<slice>",
            "slice_end_token": "</slice>",
            "image_id_start_token": "<image_id>",
            "image_id_end_token": "</image_id>",
        },
        video_processor="MiniCPMV4_6VideoProcessor",
    ),
    "kimi_k25": FamilyCheckpoint(
        "Kimi K2.5",
        "moonshotai/Kimi-K2.5",
        "Kimi_K25ImageProcessor",
        "Kimi_K25Processor",
        ("<|media_pad|>", "<|media_begin|>", "<|media_end|>", "<|kimi_k25_video_placeholder|>"),
        text=WITHOUT_HEAD_DIM
        | {
            "model_type": "deepseek_v3",
            "num_key_value_heads": 4,
            "n_routed_experts": 4,
            "num_experts_per_tok": 2,
            "n_group": 1,
            "topk_group": 1,
            "moe_intermediate_size": 32,
            "first_k_dense_replace": 1,
            "q_lora_rank": 32,
            "kv_lora_rank": 32,
            "qk_rope_head_dim": 16,
            "qk_nope_head_dim": 16,
            "v_head_dim": 16,
        },
        vision=VISION,
        top={"projection_hidden_size": 64},
        tokens={
            "image_token_id": "<|media_pad|>",
            "video_token_id": "<|kimi_k25_video_placeholder|>",
            "vision_start_token_id": "<|media_begin|>",
            "vision_end_token_id": "<|media_end|>",
        },
        video_processor="Kimi_K25VideoProcessor",
    ),
}


def write_family_checkpoint(
    folder: str | Path,
    model_type: str,
    *,
    seed: int = 0,
    text_layers: int = 2,
    family: FamilyCheckpoint | None = None,
) -> Path:
    """Write a checkpoint folder of a family, float32, and return its path.

    `model_type` is a key of `CHECKPOINTS`; `family` overrides the entry.
    """
    family, folder = family or CHECKPOINTS[model_type], Path(folder)
    special = ("<pad>", "<eos>", "<bos>", *family.special)
    ids = {token: FIRST_SPECIAL + number for number, token in enumerate(special)}
    config = transformers.AutoConfig.for_model(
        model_type,
        text_config={**family.text, "num_hidden_layers": text_layers},
        vision_config=dict(family.vision),
        tie_word_embeddings=False,
        **family.top,
        **{name: ids[token] for name, token in family.tokens.items()},
    )
    model = transformers.AutoModelForImageTextToText.from_config(config, dtype=torch.float32).eval()
    _fill(model, seed)
    model.save_pretrained(folder)
    _processor(family, special).save_pretrained(folder)
    return folder


@torch.no_grad()
def _fill(model: torch.nn.Module, seed: int) -> None:
    """Fill every parameter so that signals keep their size."""
    generator = torch.Generator().manual_seed(seed)
    for name, parameter in sorted(model.named_parameters()):
        noise = torch.randn(parameter.shape, generator=generator)
        if parameter.ndim > 1:
            noise /= 1 if "embed" in name and "patch" not in name else math.sqrt(parameter[0].numel())
        else:
            noise = 0.1 * noise + (0 if name.endswith("bias") else 1)
        parameter.copy_(noise)


def _processor(family: FamilyCheckpoint, special: tuple[str, ...]) -> Any:
    parts: dict[str, Any] = {
        "image_processor": getattr(transformers, family.image_processor)(**family.image_settings),
        "tokenizer": byte_tokenizer(
            special, pad=special[0], eos=special[1], bos=special[2], extra=family.named
        ),
    }
    if family.video_processor:
        parts["video_processor"] = getattr(transformers, family.video_processor)()
    return getattr(transformers, family.processor)(**parts, **family.processor_settings)
