"""Checkpoints of `testing.families` for engines on a CPU: the same processors, with fewer pixels to a tile or image."""

from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from testing.families import CHECKPOINTS, VISION, FamilyCheckpoint, write_family_checkpoint


@dataclass(frozen=True)
class SmallFamily:
    """A family as vLLM loads it: its checkpoint, and what its chat template writes in the place of an image."""

    checkpoint: FamilyCheckpoint
    place: str


def _small(name: str, place: str, **changes: Any) -> SmallFamily:
    return SmallFamily(replace(CHECKPOINTS[name], **changes), place)


SMALL = {
    "gemma3": _small(
        "gemma3",
        "<start_of_image>",
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
"""By model type; in none of them does vLLM accept an image without pixels."""


def write_small_family(folder: Path, model_type: str) -> Path:
    """Write the checkpoint of a family, float32, with a chat template, and return its path."""
    family = SMALL[model_type]
    write_family_checkpoint(folder, model_type, family=family.checkpoint)
    (folder / "chat_template.jinja").write_text(
        "{% for message in messages %}{% if message.content is string %}{{ message.content }}{% else %}"
        "{% for part in message.content %}{% if part.type in ('image', 'image_url') %}"
        + family.place
        + "{% else %}{{ part.text }}{% endif %}{% endfor %}{% endif %}\n{% endfor %}"
    )
    return folder
