"""The fleet's key: a secret of the replicas, with which they sign what they send to each other."""

import struct
from collections.abc import Iterable
from hmac import compare_digest
from typing import Self

from blake3 import blake3

from encoder_contract.geometry import Grid
from encoder_contract.trusted import read_trusted

MIN_SECRET_CHARACTERS = 32
SIGNATURE_BYTES = 32
SIGNATURE_METADATA = "fleet-signature-bin"
"""The metadata key of the signature of a replica's request."""

_TIME = struct.Struct("<d")
_GRID = struct.Struct("<III")


class FleetKey:
    """Signs with the first of its secrets and accepts all of them, so a secret can be replaced replica by replica.

    Signatures are BLAKE3 in keyed mode. Each purpose derives its own key, so the signature of a request is not valid
    for rows.
    """

    def __init__(self, secrets: Iterable[bytes]) -> None:
        """Raises `ValueError` if there is no secret or one is too short."""
        self._secrets = tuple(secrets)
        if not self._secrets or min(map(len, self._secrets)) < MIN_SECRET_CHARACTERS:
            raise ValueError(f"each line must be one secret of at least {MIN_SECRET_CHARACTERS} characters")

    @classmethod
    def read(cls, path: str) -> Self:
        """Read a file of secrets, one per line. Raises `ValueError`, which names the file but not its content."""
        try:
            return cls(line.strip() for line in read_trusted(path).splitlines() if line.strip())
        except OSError as error:
            raise ValueError(f"{path}: {error.strerror}") from error
        except ValueError as error:
            raise ValueError(f"{path}: {error}") from error

    def sign_request(self, endpoint: str, request: bytes, at_s: float) -> bytes:
        """Sign our call to the replica that advertises `endpoint`. No other replica accepts the signature.

        `at_s`, the time in seconds since 1970, is part of the signature.
        """
        time = _TIME.pack(at_s)
        return time + self._sign(self._secrets[0], "request", [time, endpoint.encode(), request])

    def request_signed_at(self, signature: bytes, endpoint: str, request: bytes) -> float | None:
        """Return when a replica signed this call to `endpoint`, in seconds since 1970; None if none signed it."""
        time, signature = signature[: _TIME.size], signature[_TIME.size :]
        if not self._verify(signature, "request", [time, endpoint.encode(), request]):
            return None
        return float(_TIME.unpack(time)[0])

    def sign_rows(self, address: bytes, grid: Grid, rows: Iterable[memoryview]) -> bytes:
        """Sign all rows of an image, given as their bytes in order. Takes milliseconds for tens of megabytes."""
        return self._sign(self._secrets[0], "rows", [address, _GRID.pack(*grid)], rows)

    def verify_rows(self, signature: bytes, address: bytes, grid: Grid, rows: Iterable[memoryview]) -> bool:
        """Whether a replica signed these rows, given as for `sign_rows`."""
        return self._verify(signature, "rows", [address, _GRID.pack(*grid)], rows)

    def salt(self, tenant: str, tenant_salt: bytes) -> bytes:
        """Return the salt of a tenant's addresses, derived from the salt that the tenant sent and unique to it.

        It depends on the first secret. When that is replaced, the images of all tenants are encoded again.
        """
        return self._sign(self._secrets[0], "salt", [tenant.encode(), tenant_salt])

    def _verify(
        self, signature: bytes, purpose: str, fields: list[bytes], content: Iterable[memoryview] = ()
    ) -> bool:
        content = list(content)
        signed = (self._sign(secret, purpose, fields, content) for secret in self._secrets)
        return any(compare_digest(signature, each) for each in signed)

    @staticmethod
    def _sign(secret: bytes, purpose: str, fields: list[bytes], content: Iterable[memoryview] = ()) -> bytes:
        """Return the signature over the fields, each preceded by its length, and then the content."""
        key = blake3(secret, derive_key_context=f"encoder-service fleet {purpose} v1").digest()
        hasher = blake3(key=key)
        for field in fields:
            hasher.update(len(field).to_bytes(8, "little"))
            hasher.update(field)
        for piece in content:
            hasher.update(piece)
        return hasher.digest()
