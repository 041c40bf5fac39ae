"""The vision towers: our own inference code for each architecture, exact against `transformers`."""

from encoder_service.vision.checkpoint import model_fingerprint
from encoder_service.vision.spec import ARCHITECTURES, TowerSpec
from encoder_service.vision.tower import Tower, load_tower

__all__ = ["ARCHITECTURES", "Tower", "TowerSpec", "load_tower", "model_fingerprint"]
