"""The choice of the family for a checkpoint: an installed plug-in, one of the server's own towers, or `transformers`.

Does not import torch, so that `check_model` need not wait seconds for it.
"""

import logging
from importlib.metadata import EntryPoint, entry_points
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING

from encoder_contract.checkpoint import OWN_TYPES, read_config, require_files
from encoder_contract.command_line import install
from encoder_contract.processor import ProcessorSettings, read_processor
from encoder_contract.settings import ConfigError, flag, require_folder

if TYPE_CHECKING:
    from encoder_service.families.model import Load, LoadOptions, VisionModel

log = logging.getLogger(__name__)

GROUP = "encoder_service.families"
NEEDED = ("transformers", "torchvision")


def check_model(folder: Path) -> None:
    """Raise `ConfigError` if the files in `folder` tell that the model cannot be served. Reads no weights."""
    require_folder("model", folder)
    try:
        model_type = model_type_of(folder)
        if _plug_in(model_type) is not None:
            return
        if model_type in OWN_TYPES:
            read_processor(folder)
        else:
            _check_generic(folder, model_type)
        require_files(folder)
    except ConfigError:
        raise
    except (OSError, ValueError) as error:
        raise ConfigError(f"{flag('model')} {folder}: {error}") from error


def load_family(folder: Path, options: "LoadOptions") -> "VisionModel":
    """Load the vision model of a checkpoint folder.

    Raises `ValueError` or `OSError` naming what is missing or not supported.
    """
    from encoder_service.families.model import OneByOne

    model_type = model_type_of(folder)
    model = _load(model_type)(folder, options)
    if isinstance(model, OneByOne):
        model.warm_up()
    return model


def _load(model_type: str) -> "Load":
    if (plug_in := _plug_in(model_type)) is not None:
        log.info("model_type %s is served by the plug-in %s", model_type, plug_in.value)
        load: Load = plug_in.load()
        return load
    if model_type in OWN_TYPES:
        return _load_own
    try:
        from encoder_service.families.generic import load_generic
    except (ImportError, RuntimeError) as error:  # RuntimeError: torchvision was built for another torch
        raise ValueError(
            f"transformers or torchvision cannot be imported ({error}): install torch and torchvision from one index,"
            f" and the extra transformers ({install('transformers')})"
        ) from error
    return load_generic


def _load_own(folder: Path, options: "LoadOptions") -> "VisionModel":
    from encoder_service.vision import load_tower

    return load_tower(
        folder,
        device=options.device,
        dtype=options.dtype,
        processor=ProcessorSettings.from_folder(folder),
        attention=options.attention,
        batch_patches=options.batch_patches,
        batch_invariant=options.batch_invariant,
        graphs=options.graphs,
    )


def _plug_in(model_type: str) -> EntryPoint | None:
    """Return the entry point that serves this type, or None. Raises `ValueError` if there are several."""
    found = tuple(entry_points(group=GROUP, name=model_type))
    if len({point.value for point in found}) > 1:
        values = ", ".join(sorted(point.value for point in found))
        raise ValueError(f"several plug-ins serve model_type {model_type!r}: {values}; uninstall all but one")
    return found[0] if found else None


def _check_generic(folder: Path, model_type: str) -> None:
    """Raise `ValueError` if the model has no vision part, or a package that `transformers`' towers need is missing."""
    config = read_config(folder)
    if "auto_map" not in config and not isinstance(config.get("vision_config"), dict):
        raise ValueError(f"model_type {model_type!r} has no vision part: config.json has no vision_config")
    missing = [package for package in NEEDED if find_spec(package) is None]
    if missing:
        raise ValueError(
            f"the server has no tower of its own for model_type {model_type!r} (only for"
            f" {', '.join(sorted(OWN_TYPES))}), and {' and '.join(missing)} are not installed;"
            f" {install('transformers')}"
        )


def model_type_of(folder: Path) -> str:
    """Return the model_type in config.json. Raises `ValueError` if there is none."""
    model_type = read_config(folder).get("model_type")
    if not isinstance(model_type, str):
        raise ValueError(f"{folder / 'config.json'} names no model_type")
    return model_type
