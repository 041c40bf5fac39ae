"""The model of a server that only stores: the format of its rows, from a configuration or from settings."""

from pathlib import Path
from typing import Any, NoReturn

import blake3
from torch import Tensor

from encoder_contract.checkpoint import OWN_TYPES, configuration_fingerprint, read_spec
from encoder_contract.processor import ProcessorSettings
from encoder_service.families.choice import model_type_of, row_width
from encoder_service.families.model import LoadOptions, OneByOne
from encoder_service.keys import Recipe
from encoder_service.vision.load import check_geometry, dtype_of

COUNTED = blake3.blake3(b"rows that are counted where they are made").digest()
"""Stands for the processor's fingerprint where the producer counts the rows, not an image processor of the server."""


class NoTower(OneByOne):
    """The width, element type and geometry of a model's rows, without weights. It cannot encode."""

    attention = "none"

    def __init__(self, dtype: str, model_type: str, hidden: int, levels: int, recipe: Recipe) -> None:
        """Raise `ValueError` for an element type that rows cannot have."""
        dtype_of(dtype)
        options = LoadOptions(device="cpu", dtype=dtype)
        super().__init__(options, model_type=model_type, hidden=hidden, levels=levels, recipe=recipe)

    def rows(self, width: int, height: int) -> NoReturn:
        """Fail: a server that only stores takes no images."""
        raise NotImplementedError("this server has no tower")

    def prepare_image(self, pixels: Tensor) -> NoReturn:
        """Fail, as `rows` does."""
        raise NotImplementedError("this server has no tower")

    def encode_image(self, inputs: Any) -> NoReturn:
        """Fail, as `rows` does."""
        raise NotImplementedError("this server has no tower")


def stored_model(model: Path, *, dtype: str, width: int = 0, fingerprint: bytes = b"") -> NoTower:
    """Return the format of the rows of the checkpoint in folder `model`. Only its configuration is read.

    With a `width`, `model` is only a name. Without the `fingerprint` of the model, one is computed without the weights.
    For the server's own families the model has their geometry; for others the producer counts the rows. Raises
    `ValueError` or `OSError` naming what is missing or not supported.
    """
    if width:
        fingerprint = fingerprint or blake3.blake3(f"rows of {model}, {width} {dtype}".encode()).digest()
        return NoTower(dtype, "stored", width, 0, Recipe(fingerprint, COUNTED, dtype))
    model_type = model_type_of(model)
    fingerprint = fingerprint or configuration_fingerprint(model)
    if model_type not in OWN_TYPES:
        hidden, levels = row_width(model)
        return NoTower(dtype, model_type, hidden, levels, Recipe(fingerprint, COUNTED, dtype))
    spec, processor = read_spec(model), ProcessorSettings.from_folder(model)
    check_geometry(spec, processor)
    recipe = Recipe(fingerprint, processor.fingerprint, dtype)
    stored = NoTower(dtype, model_type, spec.hidden, spec.levels, recipe)
    stored.geometry = processor.geometry
    return stored
