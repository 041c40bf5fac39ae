"""The vision towers: our own inference code for each architecture, exact against `transformers`."""

from encoder_service.vision.checkpoint import model_fingerprint
from encoder_service.vision.flops import flops
from encoder_service.vision.load import load_tower
from encoder_service.vision.spec import ARCHITECTURES, TowerSpec
from encoder_service.vision.tower import Tower

__all__ = ["ARCHITECTURES", "Tower", "TowerSpec", "flops", "load_tower", "model_fingerprint"]
