"""Certificates for trials and tests, signed by a new authority. `make certs` writes a set.

    python -m testing.certificates FOLDER      # ca.pem, server.pem, client.pem and their keys

Not for production: these certificates cannot be revoked.
"""

import argparse
import datetime
import hashlib
import json
import os
import secrets
from collections.abc import Sequence
from ipaddress import ip_address
from pathlib import Path
from typing import NamedTuple

from cryptography import x509
from cryptography.hazmat.primitives import hashes
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.serialization import Encoding, NoEncryption, PrivateFormat
from cryptography.x509.oid import ExtendedKeyUsageOID, NameOID

DAYS = 30
# This machine, the replicas of `make fleet`, and the service's names in the compose file and the manifests.
HOSTS = (
    "localhost",
    "127.0.0.1",
    "::1",
    *(f"127.0.0.{number}" for number in range(2, 10)),
    "encoder",
    "encoder.encoder.svc",
)


class Issued(NamedTuple):
    """The paths of a certificate and its key, as settings."""

    cert: str
    key: str


class Authority:
    """A certificate authority."""

    def __init__(self, name: str = "encoder-service trial") -> None:
        self._key = ec.generate_private_key(ec.SECP256R1())
        self._name = _named(name)
        builder = _builder(self._name, self._name, self._key.public_key())
        builder = builder.add_extension(x509.BasicConstraints(ca=True, path_length=0), critical=True)
        self._cert = builder.sign(self._key, hashes.SHA256())

    def write(self, path: Path) -> str:
        """Write the certificate of the authority; return the path."""
        path.write_bytes(self._cert.public_bytes(Encoding.PEM))
        return str(path)

    def issue(self, folder: Path, name: str, hosts: Sequence[str] = (), *, days: int = DAYS) -> Issued:
        """Write `name.pem` and `name-key.pem`, for a server at `hosts` or, without hosts, for the client `name`."""
        key = ec.generate_private_key(ec.SECP256R1())
        builder = _builder(_named(name), self._name, key.public_key(), days)
        builder = builder.add_extension(
            x509.SubjectAlternativeName([_host(host) for host in hosts or (name,)]), critical=False
        )
        usages = [ExtendedKeyUsageOID.CLIENT_AUTH, *([ExtendedKeyUsageOID.SERVER_AUTH] if hosts else [])]
        builder = builder.add_extension(x509.ExtendedKeyUsage(usages), critical=False)
        cert = builder.sign(self._key, hashes.SHA256())
        issued = Issued(str(folder / f"{name}.pem"), str(folder / f"{name}-key.pem"))
        _replace(Path(issued.key), key.private_bytes(Encoding.PEM, PrivateFormat.PKCS8, NoEncryption()))
        _replace(Path(issued.cert), cert.public_bytes(Encoding.PEM))
        return issued


def _builder(
    name: x509.Name, issuer: x509.Name, key: ec.EllipticCurvePublicKey, days: int = DAYS
) -> x509.CertificateBuilder:
    now = datetime.datetime.now(datetime.UTC)
    builder = x509.CertificateBuilder().subject_name(name).issuer_name(issuer).public_key(key)
    builder = builder.serial_number(x509.random_serial_number())
    return builder.not_valid_before(now - datetime.timedelta(hours=1)).not_valid_after(
        now + datetime.timedelta(days=days)
    )


def _named(name: str) -> x509.Name:
    return x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, name)])


def _host(host: str) -> x509.GeneralName:
    try:
        return x509.IPAddress(ip_address(host))
    except ValueError:
        return x509.DNSName(host)


def _replace(path: Path, content: bytes) -> None:
    """Replace a file atomically, readable by this user only: a reader gets the old content or the new."""
    new = path.with_suffix(".new")
    new.unlink(missing_ok=True)
    with os.fdopen(os.open(new, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "wb") as file:
        file.write(content)
    new.replace(path)


def write_tenants(folder: Path) -> None:
    """Write a fleet's key, and a tenants file with the token of each tenant: one for chats, one for metrics."""
    _replace(folder / "fleet.key", f"{secrets.token_hex(32)}\n".encode())
    tables = []
    for name, rights in (("chat", ["submit", "fetch"]), ("metrics", ["metrics"])):
        token = secrets.token_urlsafe(32)
        _replace(folder / f"{name}.token", f"{token}\n".encode())
        digest = hashlib.sha256(token.encode()).hexdigest()
        tables.append(f'[{name}]\ntokens = ["{digest}"]\nrights = {json.dumps(rights)}\n')
    _replace(folder / "tenants.toml", "\n".join(tables).encode())


def usage(folder: Path, ca: str, server: Issued, client: Issued) -> str:
    """Return the commands that use what `main` writes."""
    tls = f"--tls-ca {ca} --tls-cert {client.cert} --tls-key {client.key}"
    return f"""\
valid for {DAYS} days, for a trial only; docs/access.md explains each flag

mutual TLS:
  encoder-service serve … --tls-cert {server.cert} --tls-key {server.key} --tls-client-ca {ca}
  prefill-client encode … {tls}

tenants, with or without --tls-client-ca:
  encoder-service serve … --tls-cert {server.cert} --tls-key {server.key} \
--tenants-file {folder / "tenants.toml"} --fleet-key-file {folder / "fleet.key"} --metrics-listen 0.0.0.0:9464
  prefill-client encode … --tls-ca {ca} --token-file {folder / "chat.token"}
  encoder-service top https://127.0.0.1:9464 --tls-ca {ca} --token-file {folder / "metrics.token"}

containers: deploy/tls.yml uses them (`sudo make certs GROUP=10001`)"""


def main() -> None:
    """Write a set of certificates, tenants with their tokens, and print how to use it."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--group", type=int, help="number of a group that may read the files, for containers")
    given = parser.parse_args()
    folder: Path = given.folder
    folder.mkdir(parents=True, exist_ok=True)
    authority = Authority()
    ca = authority.write(folder / "ca.pem")
    server = authority.issue(folder, "server", HOSTS)
    client = authority.issue(folder, "client")
    write_tenants(folder)
    if given.group is not None:
        for path in folder.iterdir():
            os.chown(path, -1, given.group)
            path.chmod(0o640)
    print(usage(folder, ca, server, client))


if __name__ == "__main__":
    main()
