"""A cache of checkpoints. Each is written once and kept between runs."""

import hashlib
import importlib
import tempfile
from collections.abc import Mapping
from importlib import metadata
from pathlib import Path
from typing import Any

import testing


def kept_checkpoint(cache: Path, *arguments: Any, **settings: Any) -> Path:
    """Return a folder that `write_checkpoint` has written with these arguments. A test must not change it."""
    return _kept(cache, "checkpoints", "write_checkpoint", arguments, settings)


def kept_family(cache: Path, model_type: str, **settings: Any) -> Path:
    """Return a folder that `write_family_checkpoint` has written with these arguments. A test must not change it."""
    return _kept(cache, "families", "write_family_checkpoint", (model_type,), settings)


def _kept(
    cache: Path, module: str, function: str, arguments: tuple[Any, ...], settings: Mapping[str, Any]
) -> Path:
    """Import the writer, and transformers with it, only if no run has written this checkpoint yet."""
    versions = [metadata.version(package) for package in ("torch", "transformers")]
    sources = [
        Path(testing.__file__).with_name(f"{name}.py").read_text() for name in ("checkpoints", "families")
    ]
    key = repr((module, sources, versions, arguments, sorted(settings.items())))
    folder = cache / hashlib.sha256(key.encode()).hexdigest()[:32]
    if not folder.exists():
        write = getattr(importlib.import_module(f"testing.{module}"), function)
        with tempfile.TemporaryDirectory(dir=folder.parent, ignore_cleanup_errors=True) as scratch:
            written = write(Path(scratch) / folder.name, *arguments, **settings)
            try:
                written.rename(folder)
            except OSError:  # another process has written it at the same time
                if not folder.exists():
                    raise
    return folder
