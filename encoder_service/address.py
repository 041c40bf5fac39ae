"""The key of an image: the address its embedding is kept under, made from everything that decides its bits."""

from dataclasses import dataclass
from functools import cached_property

import blake3

from encoder_contract.digest import DIGEST_BYTES

MAX_SALT_BYTES = 64  # a tenant's name or a key derived from it; longer is a mistake


@dataclass(frozen=True)
class ImageKey:
    """An image as a caller names it, and its address on this server; made once per call, by `Recipe.key`.

    The digest is that of the file, the pixel bounds are those of the variant (0: the model's), the salt is the
    tenant's.
    """

    address: bytes
    digest: bytes
    min_pixels: int = 0
    max_pixels: int = 0
    salt: bytes = b""

    def __post_init__(self) -> None:
        assert len(self.digest) == DIGEST_BYTES, self.digest
        assert len(self.salt) <= MAX_SALT_BYTES, self.salt

    @cached_property
    def source_key(self) -> bytes:
        """32 bytes that name the image's file; tenants must not learn what others sent, so the salt is in it."""
        return _hash(b"encoder-service source v1", self.digest, self.salt)


@dataclass(frozen=True, slots=True)
class Recipe:
    """What turns an image's bytes into rows on this server; equal for every image.

    `model` and `processor` are 32-byte fingerprints, `dtype` is the element type of a row.
    """

    model: bytes
    processor: bytes
    dtype: str

    def key(self, digest: bytes, min_pixels: int = 0, max_pixels: int = 0, salt: bytes = b"") -> ImageKey:
        """Return the key of the image with this content digest, in this variant, for this tenant."""
        address = _hash(
            b"encoder-service address v1",
            digest,
            self.model,
            self.processor,
            min_pixels.to_bytes(8, "little"),
            max_pixels.to_bytes(8, "little"),
            self.dtype.encode(),
            salt,
        )
        return ImageKey(address, digest, min_pixels, max_pixels, salt)


def _hash(purpose: bytes, *fields: bytes) -> bytes:
    """Return BLAKE3 over length-prefixed fields: no two purposes, and no two sets of fields, share an encoding."""
    hasher = blake3.blake3()
    for field in (purpose, *fields):
        hasher.update(len(field).to_bytes(4, "little"))
        hasher.update(field)
    return hasher.digest()
