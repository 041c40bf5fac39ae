"""Writes checkpoints of `testing.families` for vLLM on a CPU: the same processors, with smaller tiles or images."""

from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file

from testing.families import CHECKPOINTS, VISION, FamilyCheckpoint, write_family_checkpoint
from testing.photos import photo
from testing.vllm_engine import Part, VllmEngine, tower_output


@dataclass(frozen=True)
class SmallFamily:
    """A family as vLLM loads it: its checkpoint, and the text that its chat template writes for an image."""

    checkpoint: FamilyCheckpoint
    place: str


def _small(name: str, place: str, **changes: Any) -> SmallFamily:
    return SmallFamily(replace(CHECKPOINTS[name], **changes), place)


SMALL = {
    "gemma3": _small(
        "gemma3",
        "<start_of_image>",
        special=(*CHECKPOINTS["gemma3"].special, "\n", "\n\n", "\n\n\n", "\n\n\n\n"),  # vLLM needs their ids
        vision={**CHECKPOINTS["gemma3"].vision, "image_size": 112},
        top={"mm_tokens_per_image": 16},
        image_settings={"size": {"height": 112, "width": 112}, "image_seq_length": 16},
        processor_settings={"image_seq_length": 16},
    ),
    "mistral3": _small(
        "mistral3",
        "[IMG]",
        vision={**CHECKPOINTS["mistral3"].vision, "image_size": 336},
        image_settings={"patch_size": 14, "size": {"longest_edge": 336}},
    ),
    "internvl": _small(
        "internvl",
        "<IMG_CONTEXT>",
        vision=VISION | {"image_size": [112, 112], "patch_size": [14, 14]},
        top={"image_seq_length": 16},
        image_settings={
            "size": {"height": 112, "width": 112},
            "crop_to_patches": True,
            "min_patches": 1,
            "max_patches": 6,
        },
        processor_settings={"image_seq_length": 16},
    ),
    "glm4v": _small(
        "glm4v",
        "<|begin_of_image|><|image|><|end_of_image|>",
        image_settings={"size": {"shortest_edge": 3136, "longest_edge": 131072}},
    ),
    "idefics3": _small(
        "idefics3",
        "<image>",
        vision=VISION | {"image_size": 112, "patch_size": 14},
        image_settings={"size": {"longest_edge": 336}, "max_image_size": {"longest_edge": 112}},
        processor_settings={"image_seq_len": 16},
    ),
}
"""By model type. vLLM accepts no image without pixels for any of them."""

OPTIONS: dict[str, Any] = {"limit_mm_per_prompt": {"image": 4}, "max_num_batched_tokens": 512}
"""Options of engines. One step must prefill an image: Gemma's rows attend to each other in both directions."""


WIDE, TALL, SQUARE = (photo(*size, 1, "PNG") for size in ((400, 250), (120, 333), (224, 224)))
PROMPTS: list[list[Part]] = [["a", WIDE, "b", TALL, "c"], [SQUARE, "d"], ["e", TALL, "f" * 60, WIDE, TALL]]
"""The prompts that compare the service with an engine's own tower."""


@dataclass(frozen=True)
class Comparison:
    """The differences between the service's rows and those of the engine's own tower.

    `rows` is the largest relative difference between a row and that of `embed_multimodal`. `answers` is the largest
    difference between log-probabilities, infinite for different tokens. `encoded` is the number of images that the
    engine's tower encoded in addition to the service.
    """

    rows: float
    answers: float
    encoded: int


def compare(engine: VllmEngine) -> Comparison:
    """Run `PROMPTS` one by one with the engine's own tower, and then all at once with the service."""
    encoded = tower_output(engine)
    engine.forget()
    own = [engine.ask(parts, own=True) for parts in PROMPTS]
    images = dict.fromkeys(part for parts in PROMPTS for part in parts if isinstance(part, bytes))
    expected = encoded[: len(images)]
    encoded.clear()
    engine.forget()
    engine.submit(*images)
    started = [engine.start(parts) for parts in PROMPTS]
    ended = engine.run(*started)
    with_service = len(encoded)
    ours = [torch.from_numpy(rows) for rows in engine.rows(*images)]
    return Comparison(
        rows=max(_row_error(*pair) for pair in zip(ours, expected, strict=True)),
        answers=max(ended[each].distance(right) for each, right in zip(started, own, strict=True)),
        encoded=with_service,
    )


def _restore_names(weights: Path) -> None:
    """Restore a part of tensor names that vLLM expects, as in published checkpoints, and `transformers` drops."""
    old, new = "vision_tower.", "vision_tower.vision_model."
    tensors = {name.replace(old, new): tensor for name, tensor in load_file(weights).items()}
    save_file(tensors, weights, {"format": "pt"})


def _row_error(ours: torch.Tensor, expected: torch.Tensor) -> float:
    assert ours.shape == expected.shape, (ours.shape, expected.shape)
    return float(((ours - expected).norm(dim=1) / expected.norm(dim=1)).max())


def write_small_family(folder: Path, model_type: str, *, seed: int = 0) -> Path:
    """Write the checkpoint of a family, float32, with a chat template, and return its path."""
    family = SMALL[model_type]
    write_family_checkpoint(folder, model_type, family=family.checkpoint, seed=seed)
    if family.checkpoint.vision.get("model_type") == "siglip_vision_model":
        _restore_names(folder / "model.safetensors")
    (folder / "chat_template.jinja").write_text(
        "{% for message in messages %}{% if message.content is string %}{{ message.content }}{% else %}"
        "{% for part in message.content %}{% if part.type in ('image', 'image_url') %}"
        + family.place
        + "{% else %}{{ part.text }}{% endif %}{% endfor %}{% endif %}\n{% endfor %}"
    )
    return folder
