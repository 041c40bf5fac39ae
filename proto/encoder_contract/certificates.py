"""Certificates in files: checked before use, and read again when the files change, without a restart."""

import logging
import os
import re
import ssl
import threading
from base64 import b64decode
from collections.abc import Iterator
from dataclasses import dataclass
from datetime import UTC, datetime

from encoder_contract.trusted import read_trusted

log = logging.getLogger(__name__)

_CERTIFICATE = re.compile(rb"-----BEGIN (?:X509 |TRUSTED )?CERTIFICATE-----(.+?)-----END", re.DOTALL)
# Tags of ASN.1 in a certificate.
_VERSION, _UTC_TIME = 0xA0, 0x17


@dataclass(frozen=True, slots=True)
class Pem:
    """The content of the files; empty for a file that is not configured. `version` changes with the content."""

    version: int
    cert: bytes
    key: bytes
    ca: bytes


class Certificates:
    """PEM files of our certificate, its key, and the authorities for the other side's certificate. Thread-safe.

    If changed files cannot be used (such as a certificate whose new key is not there yet), a warning is logged, the old
    content stays in use, and the next change is tried.
    """

    def __init__(self, cert: str = "", key: str = "", ca: str = "") -> None:
        """Read the files; an empty path means no file. Raises `ValueError`, which names the files and the problem."""
        self._files = (cert, key, ca)
        self._lock = threading.Lock()
        self._seen = self._stamps()
        self._pem = self._read(version=1)
        # By protocol and whether they verify the other side, with the version of the files.
        self._contexts: dict[tuple[int, bool], tuple[int, ssl.SSLContext]] = {}

    @property
    def pem(self) -> Pem:
        """The content in use now. Checks each file for changes, and reads the files again if one has changed."""
        with self._lock:
            if (stamps := self._stamps()) != self._seen:
                self._seen = stamps
                try:
                    read = self._read(self._pem.version + 1)
                    if (read.cert, read.key, read.ca) != (self._pem.cert, self._pem.key, self._pem.ca):
                        self._pem = read
                        log.info("certificates: %s read again", ", ".join(filter(None, self._files)))
                except ValueError as error:
                    log.warning(
                        "certificates: cannot use the changed files, so the old ones stay in use: %s", error
                    )
            return self._pem

    def load_into(self, context: ssl.SSLContext) -> None:
        """Make new connections of `context` use our certificate. Raises `ValueError`."""
        cert, key, _ = self._files
        try:
            context.load_cert_chain(cert, key, password=_no_password)
        except (OSError, ValueError) as error:  # ssl.SSLError is an OSError
            raise ValueError(f"{cert} and {key}: {_reason(error)}") from error

    def server_context(self, *, open_to_all: bool = False) -> ssl.SSLContext:
        """Return the context for new connections from clients.

        With authorities, clients must have a certificate, unless it is `open_to_all`. Raises `ValueError` if the files
        cannot be used, and never could.
        """
        return self._context(ssl.PROTOCOL_TLS_SERVER, verifies=not open_to_all)

    def client_context(self) -> ssl.SSLContext:
        """Return the context for new connections to servers, verified by our authorities or the system's.

        Raises `ValueError` as `server_context` does.
        """
        return self._context(ssl.PROTOCOL_TLS_CLIENT)

    def _context(self, protocol: int, *, verifies: bool = True) -> ssl.SSLContext:
        pem = self.pem
        with self._lock:
            version, context = self._contexts.get((protocol, verifies), (0, None))
            if context is not None and version == pem.version:
                return context
            new = ssl.SSLContext(protocol)
            try:
                if pem.cert:
                    self.load_into(new)
                if pem.ca and verifies:
                    new.load_verify_locations(cadata=pem.ca.decode("ascii", "replace"))
                    new.verify_mode = ssl.CERT_REQUIRED
                elif protocol == ssl.PROTOCOL_TLS_CLIENT:
                    new.load_default_certs()
            except ValueError:
                if context is None:
                    raise
                return context  # the files are just being replaced: the next connection tries again
            self._contexts[protocol, verifies] = pem.version, new
            return new

    def _read(self, version: int) -> Pem:
        cert, _, ca = self._files
        try:
            pem = Pem(version, *(read_trusted(path) if path else b"" for path in self._files))
        except OSError as error:
            raise ValueError(f"{error.filename}: {error.strerror}") from error
        if cert:
            self.load_into(ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER))
        if ca:
            try:
                ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER).load_verify_locations(ca)
            except OSError as error:
                raise ValueError(f"{ca}: {_reason(error)}") from error
        return pem

    def _stamps(self) -> list[tuple[int, ...] | None]:
        return [_stamp(path) for path in self._files]


def expirations(pem: bytes) -> list[float]:
    """Return when each certificate of a PEM file expires, in seconds since 1970."""
    return [_expiration(b64decode(body)) for body in _CERTIFICATE.findall(pem)]


def _expiration(der: bytes) -> float:
    """Read `notAfter` (RFC 5280, 4.1): the second time of the fourth field after the version."""
    _, certificate = next(_elements(der))
    _, to_be_signed = next(_elements(certificate))
    validity = [content for tag, content in _elements(to_be_signed) if tag != _VERSION][3]
    _, (tag, not_after) = _elements(validity)
    century = (b"20" if not_after < b"50" else b"19") if tag == _UTC_TIME else b""
    expires = datetime.strptime((century + not_after).decode(), "%Y%m%d%H%M%SZ")
    return expires.replace(tzinfo=UTC).timestamp()


def _elements(der: bytes) -> Iterator[tuple[int, bytes]]:
    """Yield the tag and the content of each element of ASN.1 in DER."""
    at = 0
    while at < len(der):
        tag, size, at = der[at], der[at + 1], at + 2
        if size & 0x80:  # the number of the bytes that hold the size
            size, at = int.from_bytes(der[at : at + (size & 0x7F)], "big"), at + (size & 0x7F)
        yield tag, der[at : at + size]
        at += size


def _stamp(path: str) -> tuple[int, ...] | None:
    try:
        found = os.stat(path)
    except OSError:
        return None
    # The last one also changes when the file's permissions change.
    return found.st_ino, found.st_mtime_ns, found.st_size, found.st_ctime_ns


def _no_password() -> str:
    raise ValueError("the key is encrypted: use an unencrypted key that only this user can read")


def _reason(error: Exception) -> str:
    if isinstance(error, ssl.SSLError):
        reasons = {"KEY_VALUES_MISMATCH": "the key does not belong to the certificate"}
        return reasons.get(error.reason or "", "the file is not valid PEM")
    return getattr(error, "strerror", None) or str(error)
