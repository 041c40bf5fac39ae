"""Operators' files: no reader blocks on one that is not regular, or believes one that every user may write."""

import hashlib
import os
from collections.abc import Callable
from pathlib import Path

import pytest

from encoder_contract.certificates import Certificates
from encoder_contract.credentials import Token
from encoder_contract.fleet_key import FleetKey
from encoder_service.api.tenants import Tenants
from testing.certificates import Authority

Reader = Callable[[str], object]


def readers(folder: Path) -> dict[str, tuple[Reader, str]]:
    """Each reader of an operator's file, and a file that it accepts."""
    (folder / "fleet-key").write_text("k" * 32)
    (folder / "token").write_text("t" * 32)
    token = hashlib.sha256(b"t").hexdigest()
    (folder / "tenants.toml").write_text(f'[chat]\ntokens = ["{token}"]\nrights = ["fetch"]\n')
    authority = Authority()
    issued = authority.issue(folder, "server")
    return {
        "fleet key": (FleetKey.read, str(folder / "fleet-key")),
        "token": (Token, str(folder / "token")),
        "tenants": (Tenants, str(folder / "tenants.toml")),
        "certificate": (lambda path: Certificates(path, issued.key), issued.cert),
        "key": (lambda path: Certificates(issued.cert, path), issued.key),
        "authorities": (lambda path: Certificates("", "", path), authority.write(folder / "ca.pem")),
    }


@pytest.mark.attack("a certificate, key, token or tenants file that is a pipe, or that every user may write")
@pytest.mark.parametrize("who", ["fleet key", "token", "tenants", "certificate", "key", "authorities"])
def test_no_reader_blocks_or_believes_what_every_user_may_write(tmp_path: Path, who: str) -> None:
    read, path = readers(tmp_path)[who]
    link = tmp_path / "link"  # as Kubernetes mounts them
    link.symlink_to(path)
    read(str(link))
    os.chmod(path, 0o602)
    with pytest.raises(ValueError, match=r"every user may write it: run `chmod o-w`"):
        read(path)
    os.mkfifo(tmp_path / "pipe")
    with pytest.raises(ValueError, match="pipe: not a regular file"):
        read(str(tmp_path / "pipe"))
    with pytest.raises(ValueError, match="Is a directory"):
        read(str(tmp_path))
