"""Checkpoints that are written once and kept between runs."""

import hashlib
import importlib
import tempfile
from collections.abc import Mapping
from importlib import metadata
from pathlib import Path
from typing import Any

import testing


def kept_checkpoint(cache: Path, *arguments: Any, **settings: Any) -> Path:
    """Return the folder that `write_checkpoint` fills with these arguments; a test must not change it."""
    return _kept(cache, "checkpoints", "write_checkpoint", arguments, settings)


def kept_family(cache: Path, model_type: str, **settings: Any) -> Path:
    """Return the folder that `write_family_checkpoint` fills with these arguments; a test must not change it."""
    return _kept(cache, "families", "write_family_checkpoint", (model_type,), settings)


def _kept(
    cache: Path, module: str, function: str, arguments: tuple[Any, ...], settings: Mapping[str, Any]
) -> Path:
    """The writer is imported, and transformers with it, only where no run has needed this checkpoint yet."""
    versions = [metadata.version(package) for package in ("torch", "transformers")]
    writer = Path(testing.__file__).with_name(f"{module}.py")
    asked = repr((writer.read_text(), versions, arguments, sorted(settings.items())))
    folder = cache / hashlib.sha256(asked.encode()).hexdigest()[:32]
    if not folder.exists():
        write = getattr(importlib.import_module(f"testing.{module}"), function)
        with tempfile.TemporaryDirectory(dir=folder.parent, ignore_cleanup_errors=True) as scratch:
            written = write(Path(scratch) / folder.name, *arguments, **settings)
            try:
                written.rename(folder)
            except OSError:  # a run beside this one was quicker
                if not folder.exists():
                    raise
    return folder
