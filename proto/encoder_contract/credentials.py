"""Credentials: how a client verifies a server, and how it identifies itself."""

import argparse
import os
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Self

from encoder_contract.certificates import Certificates
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

    @staticmethod
    def add_flags(parser: argparse.ArgumentParser) -> None:
        """Add the flags for TLS and the token to a command."""
        for flag, text in (
            (
                "ca",
                f"PEM file of the authorities that issue the server's certificate, or `{PUBLIC_CA}`; empty: no TLS",
            ),
            ("cert", "PEM file with a client certificate, if the server requires one"),
            ("key", "PEM file with the private key of --tls-cert, unencrypted"),
            ("name", "name to expect in the server's certificate; empty: the host of --server"),
        ):
            parser.add_argument(
                f"--tls-{flag}", default="", metavar="NAME" if flag == "name" else "FILE", help=text
            )
        parser.add_argument(
            "--token-file", default="", metavar="FILE", help="file with a tenant's token; empty: no token"
        )

    @classmethod
    def from_flags(cls, given: Mapping[str, Any]) -> Self:
        """Return the credentials that the flags of `add_flags` gave."""
        return cls(
            given["tls_ca"], given["tls_cert"], given["tls_key"], given["tls_name"], given["token_file"]
        )

    def token(self) -> "Token":
        """Read the token file. Raises `ValueError`, which names it."""
        return Token(self.token_file)


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
