"""The store address: what an embedding is kept under, made from everything that decides its bits."""

from dataclasses import dataclass

import blake3

from encoder_contract.digest import DIGEST_BYTES

MAX_SALT_BYTES = 64  # a tenant's name or a key derived from it; longer is a mistake


@dataclass(frozen=True, slots=True)
class Recipe:
    """What turns an image's bytes into rows on this server; equal for every image.

    `model` and `processor` are 32-byte fingerprints, `dtype` is the element type of a row.
    """

    model: bytes
    processor: bytes
    dtype: str

    def address(
        self, content: bytes, *, min_pixels: int = 0, max_pixels: int = 0, salt: bytes = b""
    ) -> bytes:
        """Return the 32-byte address of the image whose content digest is `content`.

        BLAKE3 over length-prefixed fields: no two different sets of fields share an encoding. The pixel bounds
        are the image's variant, zero for the model's own.
        """
        assert len(content) == DIGEST_BYTES, content
        assert len(salt) <= MAX_SALT_BYTES, salt
        fields = (
            b"encoder-service address v1",
            content,
            self.model,
            self.processor,
            min_pixels.to_bytes(8, "little"),
            max_pixels.to_bytes(8, "little"),
            self.dtype.encode(),
            salt,
        )
        hasher = blake3.blake3()
        for field in fields:
            hasher.update(len(field).to_bytes(4, "little"))
            hasher.update(field)
        return hasher.digest()
