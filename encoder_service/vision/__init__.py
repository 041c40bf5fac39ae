"""The vision towers: inference code for each architecture, tested against `transformers`."""

from encoder_service.vision.checkpoint import configuration_fingerprint, model_fingerprint
from encoder_service.vision.families import family_of, read_spec
from encoder_service.vision.flops import flops
from encoder_service.vision.load import load_tower
from encoder_service.vision.no_tower import NoTower
from encoder_service.vision.spec import TowerSpec, read_config
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
