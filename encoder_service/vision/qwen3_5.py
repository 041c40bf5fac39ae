"""The vision tower of Qwen3.5: that of Qwen3-VL without DeepStack levels."""

from encoder_service.vision.qwen3_vl import Qwen3VLTower


class Qwen35Tower(Qwen3VLTower):
    """Packed uint8 patches of any images → their rows; a checkpoint of this family names no DeepStack levels."""
