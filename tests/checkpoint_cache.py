"""Checkpoints that are written once and kept between runs."""

import hashlib
import tempfile
from importlib import metadata
from pathlib import Path
from typing import Any

import testing

WRITER = Path(testing.__file__).with_name("checkpoints.py")


def kept_checkpoint(cache: Path, *arguments: Any, **settings: Any) -> Path:
    """Return the folder that `write_checkpoint` fills with these arguments; a test must not change it.

    The writer is imported, and transformers with it, only where no run has needed this checkpoint yet.
    """
    versions = [metadata.version(package) for package in ("torch", "transformers")]
    asked = repr((WRITER.read_text(), versions, arguments, sorted(settings.items())))
    folder = cache / hashlib.sha256(asked.encode()).hexdigest()[:32]
    if not folder.exists():
        _write(folder, *arguments, **settings)
    return folder


def _write(folder: Path, *arguments: Any, **settings: Any) -> None:
    from testing.checkpoints import write_checkpoint

    with tempfile.TemporaryDirectory(dir=folder.parent, ignore_cleanup_errors=True) as scratch:
        written = write_checkpoint(Path(scratch) / folder.name, *arguments, **settings)
        try:
            written.rename(folder)
        except OSError:  # a run beside this one was quicker
            if not folder.exists():
                raise
