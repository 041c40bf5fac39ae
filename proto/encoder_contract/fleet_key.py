"""The fleet's key: a secret that only the replicas share, with which they sign what they send to each other."""

import struct
from collections.abc import Iterable
from hmac import compare_digest
from pathlib import Path
from typing import Self

from blake3 import blake3

from encoder_contract.geometry import Grid

MIN_SECRET_CHARACTERS = 32
SIGNATURE_BYTES = 32
SIGNATURE_METADATA = "fleet-signature-bin"
"""The metadata key of the signature of a replica's request."""

_TIME = struct.Struct("<d")
_GRID = struct.Struct("<III")


class FleetKey:
    """Signs with the first of its secrets and accepts all of them, so a secret can be replaced replica by replica.

    Signatures are BLAKE3 in its keyed mode. Each purpose has a key of its own, so the signature of a request is not
    valid for rows.
    """

    def __init__(self, secrets: Iterable[bytes]) -> None:
        """Raises `ValueError` if there is no secret, or one is too short."""
        self._secrets = tuple(secrets)
        if not self._secrets or min(map(len, self._secrets)) < MIN_SECRET_CHARACTERS:
            raise ValueError(f"each line must be one secret of at least {MIN_SECRET_CHARACTERS} characters")

    @classmethod
    def read(cls, path: str) -> Self:
        """Read a file of secrets, one a line. Raises `ValueError`, which names the file but not its content."""
        try:
            return cls(line.strip() for line in Path(path).read_bytes().splitlines() if line.strip())
        except OSError as error:
            raise ValueError(f"{path}: {error.strerror}") from error
        except ValueError as error:
            raise ValueError(f"{path}: {error}") from error

    def sign_request(self, endpoint: str, request: bytes, at_s: float) -> bytes:
        """Sign our call to the replica that advertises `endpoint`; other replicas do not accept it.

        `at_s` is the time, seconds since 1970; the signature carries it.
        """
        time = _TIME.pack(at_s)
        return time + self._sign(self._secrets[0], "request", [time, endpoint.encode(), request])

    def request_signed_at(self, signature: bytes, endpoint: str, request: bytes) -> float | None:
        """Return when a replica signed this call for `endpoint`, seconds since 1970; None if none signed it."""
        time, signature = signature[: _TIME.size], signature[_TIME.size :]
        if not self._believes(signature, "request", [time, endpoint.encode(), request]):
            return None
        return float(_TIME.unpack(time)[0])

    def sign_rows(self, address: bytes, grid: Grid, rows: Iterable[memoryview]) -> bytes:
        """Sign all rows of an image; `rows` are their bytes in order. Takes milliseconds for tens of megabytes."""
        return self._sign(self._secrets[0], "rows", [address, _GRID.pack(*grid)], rows)

    def signed_rows(self, signature: bytes, address: bytes, grid: Grid, rows: memoryview) -> bool:
        """Whether a replica signed these rows."""
        return self._believes(signature, "rows", [address, _GRID.pack(*grid)], [rows])

    def seal_file(self, key: bytes, file: bytes) -> bytes:
        """Return an image file in the form that is shared under `key`: its signature, then the file."""
        return self._seal("file", key, file)

    def open_file(self, key: bytes, sealed: bytes) -> bytes | None:
        """Return the file; None if no replica signed it for this key."""
        return self._open("file", key, sealed)

    def salt(self, tenant: str, said: bytes) -> bytes:
        """Return the salt of a tenant's addresses, which includes its own `said`. No other tenant has the same salt.

        It comes from the first secret. When that is replaced, the images of all tenants are encoded again.
        """
        return self._sign(self._secrets[0], "salt", [tenant.encode(), said])

    def _seal(self, purpose: str, key: bytes, content: bytes) -> bytes:
        return self._sign(self._secrets[0], purpose, [key], [memoryview(content)]) + content

    def _open(self, purpose: str, key: bytes, sealed: bytes) -> bytes | None:
        content = memoryview(sealed)[SIGNATURE_BYTES:]
        believed = self._believes(sealed[:SIGNATURE_BYTES], purpose, [key], [content])
        return content.tobytes() if believed else None

    def _believes(
        self, signature: bytes, purpose: str, fields: list[bytes], content: Iterable[memoryview] = ()
    ) -> bool:
        content = list(content)
        signed = (self._sign(secret, purpose, fields, content) for secret in self._secrets)
        return any(compare_digest(signature, each) for each in signed)

    @staticmethod
    def _sign(secret: bytes, purpose: str, fields: list[bytes], content: Iterable[memoryview] = ()) -> bytes:
        """Return the signature of fields, each behind its length, and of the content, which is the last."""
        key = blake3(secret, derive_key_context=f"encoder-service fleet {purpose} v1").digest()
        hasher = blake3(key=key)
        for field in fields:
            hasher.update(len(field).to_bytes(8, "little"))
            hasher.update(field)
        for piece in content:
            hasher.update(piece)
        return hasher.digest()
