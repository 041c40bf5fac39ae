"""Tenants of a test: the file that lists them, and the settings of a server that serves nobody else."""

import hashlib
from collections.abc import Callable, Sequence
from contextlib import AbstractAsyncContextManager
from dataclasses import replace
from pathlib import Path

from encoder_service.config import Config
from prefill_client import EncoderClient

TOKENS = {"chat": "chat-token", "search": "search-token", "reader": "reader-token", "ops": "operator-token"}
RIGHTS = {
    "chat": ["submit", "fetch"],
    "search": ["submit", "fetch"],
    "reader": ["fetch"],
    "ops": ["operate"],
}


# Connects with somebody's token.
As = Callable[..., AbstractAsyncContextManager[EncoderClient]]


def table(name: str, *tokens: str, rights: Sequence[str], certificates: Sequence[str] = ()) -> str:
    """The part of a tenants file about one of them."""
    hashed = [hashlib.sha256(token.encode()).hexdigest() for token in tokens]
    return f"[{name}]\ntokens = {hashed}\ncertificates = {list(certificates)}\nrights = {list(rights)}\n"


def guarded_by(tenants: Path, config: Config, **settings: str) -> Config:
    """Settings of a server that serves the tenants of this file; the fleet's key is written beside it."""
    key = tenants.with_name("fleet-key")
    key.write_text("the secret of the fleet, 32 bytes")
    return replace(config, tenants_file=str(tenants), fleet_key_file=str(key), **settings)  # type: ignore[arg-type]
