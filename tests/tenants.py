"""Tenants of a test: their file, and the settings of a server that serves only tenants."""

import hashlib
from collections.abc import Callable, Sequence
from contextlib import AbstractAsyncContextManager
from dataclasses import replace
from pathlib import Path

from encoder_service.config import Config
from prefill_client import Credentials, EncoderClient

TOKENS = {"chat": "chat-token", "search": "search-token", "reader": "reader-token", "ops": "operator-token"}
RIGHTS = {"chat": ["submit", "fetch"], "search": ["submit", "fetch"], "reader": ["fetch"], "ops": ["operate"]}


# Connects with the token of a tenant.
As = Callable[..., AbstractAsyncContextManager[EncoderClient]]


def table(name: str, *tokens: str, rights: Sequence[str], certificates: Sequence[str] = ()) -> str:
    """Return the table of a tenant in a tenants file."""
    hashed = [hashlib.sha256(token.encode()).hexdigest() for token in tokens]
    return f"[{name}]\ntokens = {hashed}\ncertificates = {list(certificates)}\nrights = {list(rights)}\n"


def guarded_by(tenants: Path, config: Config, **settings: str) -> Config:
    """Return settings of a server that serves the tenants of this file; write the fleet's key beside it."""
    key = tenants.with_name("fleet-key")
    key.write_text("the secret of the fleet, 32 bytes")
    return replace(config, tenants_file=str(tenants), fleet_key_file=str(key), **settings)  # type: ignore[arg-type]


def with_token(folder: Path, token: str) -> Credentials:
    """Write a token to a file in this folder; return the credentials."""
    path = folder / f"{token}.token"
    path.write_text(f"{token}\n")
    return Credentials(token_file=str(path))
