"""JSON files: read the object in a file, with errors that name the file."""

import json
from pathlib import Path
from typing import Any

_POINTER = b"version https://git-lfs"


def refuse_pointer(path: Path, beginning: bytes) -> None:
    """Raise `ValueError` if a file with this beginning is what a clone without Git LFS has in its place."""
    if beginning.startswith(_POINTER):
        raise ValueError(
            f"{path} is a pointer of Git LFS instead of the file: run `git lfs pull` in {path.parent}"
        )


def read_json_object(path: Path) -> dict[str, Any]:
    """Return the JSON object in a file. Raises `OSError`, or `ValueError` that names the file and the problem."""
    text = path.read_bytes()
    refuse_pointer(path, text)
    try:
        content = json.loads(text)
    except ValueError as error:
        raise ValueError(f"{path} is not JSON: {error}") from error
    if not isinstance(content, dict):
        raise ValueError(f"{path} does not hold a JSON object")
    return content
