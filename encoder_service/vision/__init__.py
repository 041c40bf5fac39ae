"""The vision towers: inference code for each architecture, tested against `transformers`."""

from encoder_service.vision.load import NoTower, configuration_fingerprint, load_tower, model_fingerprint
from encoder_service.vision.qwen import family_of, read_spec
from encoder_service.vision.spec import TowerSpec, flops, read_config
from encoder_service.vision.tower import Tower

__all__ = [
    "NoTower",
    "Tower",
    "TowerSpec",
    "configuration_fingerprint",
    "family_of",
    "flops",
    "load_tower",
    "model_fingerprint",
    "read_config",
    "read_spec",
]
