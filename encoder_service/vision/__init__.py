"""The vision towers: inference code for each architecture, tested against `transformers`."""

from encoder_service.vision.load import load_tower
from encoder_service.vision.tower import Tower, flops

__all__ = ["Tower", "flops", "load_tower"]
