"""The model of a server that only stores: the kind of its rows, from a configuration or from settings."""

from pathlib import Path
from typing import Any, NoReturn

import blake3
from torch import Tensor

from encoder_contract.checkpoint import OWN_TYPES, configuration_fingerprint, read_spec
from encoder_contract.processor import ProcessorSettings
from encoder_service.families.choice import model_type_of, row_width
from encoder_service.families.model import DTYPES, LoadOptions, OneByOne
from encoder_service.keys import Recipe
from encoder_service.vision.load import check_geometry

COUNTED = blake3.blake3(b"rows that are counted where they are made").digest()
"""The processor's fingerprint where none of the server's own cuts patches."""


class NoTower(OneByOne):
    """Has the width, element type and geometry of a model's rows. It has no weights, and encodes nothing."""

    attention = "none"

    def __init__(self, dtype: str, model_type: str, hidden: int, levels: int, recipe: Recipe) -> None:
        """Raise `ValueError` for an element type that no row has."""
        if dtype not in DTYPES:
            raise ValueError(f"dtype {dtype!r} is not supported ({', '.join(DTYPES)})")
        options = LoadOptions(device="cpu", dtype=dtype)
        super().__init__(options, model_type=model_type, hidden=hidden, levels=levels, recipe=recipe)

    def rows(self, width: int, height: int) -> NoReturn:
        """Fail: no image is ever submitted to a server that only stores."""
        raise NotImplementedError("this server has no tower")

    def prepare_image(self, pixels: Tensor) -> NoReturn:
        """Fail, as `rows`."""
        raise NotImplementedError("this server has no tower")

    def encode_image(self, inputs: Any) -> NoReturn:
        """Fail, as `rows`."""
        raise NotImplementedError("this server has no tower")


def stored_model(model: Path, *, dtype: str, width: int = 0, fingerprint: bytes = b"") -> NoTower:
    """Return the kind of rows of a checkpoint folder of any model; only its configuration is read.

    With a `width`, `model` is only a name. `fingerprint` is that of the model, else it is computed without weights. The
    rows of the server's own families have their geometry, those of others are counted by who puts them. Raises
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
