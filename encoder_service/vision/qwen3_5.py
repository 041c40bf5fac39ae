"""The vision tower of Qwen3.5: that of Qwen3-VL, in a checkpoint that names no DeepStack levels."""

from encoder_service.vision import qwen3_vl
from encoder_service.vision.family import Family

FAMILY = Family(
    name="qwen3_5",
    model_types=("qwen3_5", "qwen3_5_moe"),
    defaults={
        name: value for name, value in qwen3_vl.FAMILY.defaults.items() if name != "deepstack_visual_indexes"
    },
    build=qwen3_vl.Qwen3VLTower,
)
