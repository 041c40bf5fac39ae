"""The secret with which the middleware proves to the connector that a name of an image comes from it.

The API server and all engine processes behind it need the same key. On one host they share a file that the first of
them creates. Processes on several hosts get one from the operator, as a file (`name_key_file`) or as a variable.
"""

import os
import secrets
import tempfile
from contextlib import suppress
from pathlib import Path

import blake3
from vllm import envs

from encoder_contract.trusted import read_trusted

VARIABLE = "ENCODER_SERVICE_NAME_KEY"
_MIN_CHARACTERS = 32  # 128 bits as hexadecimal digits


def read_name_key(file: str) -> bytes:
    """Return the key, 32 bytes: of the variable, else of `file`, else of the user's own file, which this creates.

    Raises `ValueError` if the key is short or its file cannot be read, or if other users can read the user's own file.
    """
    if text := os.environ.get(VARIABLE, ""):
        where = VARIABLE
    else:
        path = Path(file) if file else own_key_file()
        where = str(path)
        try:
            text = read_trusted(path).decode() if file else _own_key(path)
        except (OSError, UnicodeError) as error:
            raise ValueError(
                f"the key of image names cannot be read: {error}. Give all engines one key: `openssl rand -hex 32` "
                f"in a file (name_key_file) or in {VARIABLE}"
            ) from error
    if len(text.strip()) < _MIN_CHARACTERS:
        raise ValueError(f"{where}: the key of image names needs at least {_MIN_CHARACTERS} characters")
    return blake3.blake3(text.strip().encode(), derive_key_context="encoder-service vllm names").digest()


def own_key_file() -> Path:
    """Return the file with the key of this user on this host, in vLLM's own folder (`VLLM_CACHE_ROOT`)."""
    return Path(envs.VLLM_CACHE_ROOT) / "encoder-service" / "name-key"


def _own_key(path: Path) -> str:
    """Return the key in a file of mode 0600; create it unless another process has."""
    path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    if not path.exists():
        file, written = tempfile.mkstemp(dir=path.parent)  # mode 0600
        try:
            os.write(file, secrets.token_hex(32).encode())
            with suppress(FileExistsError):
                os.link(written, path)  # complete at once for every reader, and never a second time
        finally:
            os.close(file)
            os.unlink(written)
    found = path.stat()
    if found.st_uid != os.geteuid() or found.st_mode & 0o077:
        raise ValueError(
            f"{path}: other users can read the key of image names: delete the file, or give it mode 0600"
        )
    return path.read_text()
