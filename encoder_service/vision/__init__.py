"""The vision towers: inference code for each architecture, tested against `transformers`."""

from encoder_service.vision.flops import flops
from encoder_service.vision.load import load_tower
from encoder_service.vision.tower import Tower

__all__ = ["Tower", "flops", "load_tower"]
