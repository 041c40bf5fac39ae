"""Credentials: how a client verifies a server, and how it identifies itself."""

import argparse
import os
import re
from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any, Self

from encoder_contract.certificates import Certificates
from encoder_contract.settings import flag, knob, metavar
from encoder_contract.trusted import read_trusted

PUBLIC_CA = "public"


@dataclass(frozen=True, slots=True)
class Credentials:
    """PEM files and a token file. They are read again when they change; new connections then use the new content."""

    ca: str = ""
    """Authorities of the servers' certificates, or `public` for those that come with gRPC; empty: no TLS."""
    cert: str = ""
    """Our certificate, for servers that require one (mutual TLS)."""
    key: str = ""
    """Its private key, unencrypted."""
    server_name: str = ""
    """The name to expect in the servers' certificates; empty: the host of each endpoint."""
    token_file: str = ""
    """A file with our tenant's token, which is sent only over TLS or within this host."""

    def certificates(self) -> Certificates | None:
        """Read the files; None without TLS. Raises `ValueError`, which names the problem."""
        if bool(self.cert) != bool(self.key):
            raise ValueError("TLS: a certificate and its key must be given together")
        if not self.ca and (self.cert or self.server_name):
            raise ValueError("TLS: a certificate or a server name also needs the authorities (ca)")
        if not self.ca:
            return None
        return Certificates(self.cert, self.key, "" if self.ca == PUBLIC_CA else self.ca)

    def token(self) -> "Token":
        """Read the token file. Raises `ValueError`, which names it."""
        return Token(self.token_file)


@dataclass(frozen=True, slots=True, kw_only=True)
class AccessSettings:
    """The settings of a client's credentials, as every program and plug-in names them."""

    tls_ca: str = knob(
        "",
        help=f"PEM file of the authorities that issue the server's certificate, or `{PUBLIC_CA}`; empty: no TLS",
    )
    tls_cert: str = knob("", help="PEM file with a client certificate, if the server requires one")
    tls_key: str = knob("", help="PEM file with the private key of the client certificate, unencrypted")
    tls_name: str = knob(
        "", help="name to expect in the server's certificate; empty: the host of its address"
    )
    token_file: str = knob("", help="file with a tenant's token for the server; empty: no token")

    @property
    def credentials(self) -> Credentials:
        """The credentials for calls to the service."""
        return Credentials(self.tls_ca, self.tls_cert, self.tls_key, self.tls_name, self.token_file)

    @classmethod
    def add_flags(cls, parser: argparse.ArgumentParser) -> None:
        """Add a flag for each setting to a command."""
        for each in fields(cls):
            what = metavar(each.name, str)
            parser.add_argument(flag(each.name), default="", metavar=what, help=each.metadata["help"])

    @classmethod
    def from_flags(cls, given: Mapping[str, Any]) -> Self:
        """Return what the flags of `add_flags` gave."""
        return cls(**{each.name: given[each.name] for each in fields(cls)})


class Token:
    """The token that identifies the client's tenant. Its file is read again when it changes."""

    def __init__(self, path: str) -> None:
        self._path = path
        self._stamp: tuple[int, int] | None = None
        self._metadata: tuple[tuple[str, str], ...] = ()
        self.metadata()

    def metadata(self) -> tuple[tuple[str, str], ...]:
        """Return the token as metadata of a call; empty without a file. Raises `ValueError` for a bad file."""
        if self._path:
            try:
                found = os.stat(self._path)
                if (stamp := (found.st_ino, found.st_mtime_ns)) != self._stamp:
                    token = read_trusted(self._path).decode().strip()
                    if not token.isascii() or not token.isprintable() or not token:
                        raise ValueError(
                            f"{self._path}: a token must be one line of printable ASCII characters"
                        )
                    self._stamp, self._metadata = stamp, (("authorization", f"Bearer {token}"),)
            except OSError as error:
                raise ValueError(f"{self._path}: {error.strerror}") from error
        return self._metadata


NO_CREDENTIALS = Credentials()


def why_unconnected(details: str, credentials: Credentials | None = None) -> str:
    """Return the reason for a failed connection, which is the end of gRPC's message, and what to change.

    `credentials` are those of a client that has never connected to this server; None for any other client.
    """
    if "Failed parsing HTTP/2" in details:
        return "the server does not speak gRPC: give the address of its --listen, not of its --metrics-listen"
    if "WRONG_VERSION_NUMBER" in details:
        return "the TLS handshake failed: the server does not use TLS: leave out the authority (ca)"
    if handshake := re.search(r"OPENSSL_internal:(.*)|(Hostname Verification Check failed)", details):
        reason = (handshake[1] or handshake[2]).removesuffix(": OK")
        return f"the TLS handshake failed: {reason}{_remedy(reason)}"
    if "Handshake read failed" in details or "handshake failed" in details.lower():
        return (
            "the TLS handshake failed: the server does not use TLS, or one side refuses the other's certificate (check "
            "its authority and its names)"
        )
    if "Socket closed" in details or "recvmsg:Connection reset" in details:
        return f"the server closed the connection{_missing(credentials)}"
    return re.sub(r"\]+\)*$", "", details.rpartition(": ")[2])


def _remedy(reason: str) -> str:
    if "issuer" in reason or "self-signed" in reason or "self signed" in reason:
        return ": set the authority (ca) that issued the server's certificate"
    if "Hostname" in reason:
        return ": set the name (server_name) that is in the server's certificate"
    return ""


def _missing(credentials: Credentials | None) -> str:
    """Return what a server may miss that closes a new connection without a word."""
    if credentials is None:
        return ""
    if not credentials.ca:
        return ": if it uses TLS, set the authority of its certificate (ca)"
    if not credentials.cert:
        return ": if it requires client certificates, set one and its key (cert, key)"
    return ": it may refuse the client certificate (check its authority and dates)"
