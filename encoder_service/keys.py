"""The key of an image: the address of its embedding, a hash of everything that determines the embedding's bits."""

from dataclasses import dataclass
from functools import cached_property

import blake3
import numpy as np
from numpy.typing import NDArray

from encoder_contract.digest import DIGEST_BYTES
from encoder_contract.video import Frames

MAX_SALT_BYTES = 64  # a tenant's name or a key derived from it; longer is a mistake


@dataclass(frozen=True)
class ImageKey:
    """An image as a caller names it, and its address on this server. `Recipe` makes it once per call.

    The digest is of the file, the pixel bounds are the variant's (0: the model's), the salt is the tenant's. With
    frames, the file is a video, and the rows are those of a pair of its frames.
    """

    address: bytes
    digest: bytes
    min_pixels: int = 0
    max_pixels: int = 0
    salt: bytes = b""
    frames: Frames | None = None

    def __post_init__(self) -> None:
        assert len(self.digest) == DIGEST_BYTES, self.digest
        assert len(self.salt) <= MAX_SALT_BYTES, self.salt

    @cached_property
    def source_key(self) -> bytes:
        """32 bytes that name the image's file. They include the salt: tenants must not learn what others sent."""
        return _hash(b"encoder-service source v1", self.digest, self.salt)

    def of_pixels(self, frames: NDArray[np.uint8]) -> bytes:
        """Return 32 bytes that are equal for pairs of frames with equal rows: equal pixels, resized alike, one tenant.

        `frames` are the decoded frames of this key, uint8 [2, H, W, 3].
        """
        assert self.frames is not None
        numbers = (*frames.shape, *self.frames.grid, *(self.frames.bilinear or ()))
        sizes = b"".join(number.to_bytes(8, "little") for number in numbers)
        pixels = np.ascontiguousarray(frames).data.cast("B")
        return _hash(b"encoder-service pixels v1", sizes, self.salt, pixels)

    @property
    def named(self) -> str:
        """The name of the image in messages."""
        if self.frames is not None:
            return f"frames {self.frames.first} and {self.frames.second} of video {self.digest.hex()}"
        return f"image {self.digest.hex()}"

    @property
    def unknown(self) -> str:
        """The error message for a Fetch of rows that no replica holds."""
        return f"{self.named} was not submitted: submit it, then fetch"


@dataclass(frozen=True, slots=True)
class Recipe:
    """Everything besides the image that determines its rows on this server.

    `model` and `processor` are 32-byte fingerprints, `dtype` is the element type of a row. `video` names the decoder of
    videos and how their pixels are normalised; it is empty if the server takes no videos.
    """

    model: bytes
    processor: bytes
    dtype: str
    video: bytes = b""

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

    def frames_key(self, digest: bytes, frames: Frames, salt: bytes = b"") -> ImageKey:
        """Return the key of a pair of frames of the video with this content digest, for this tenant.

        How the frames were chosen is not part of it: equal frames of equal size have equal rows, however sampled.
        """
        address = _hash(
            b"encoder-service frames v1",
            digest,
            self.model,
            self.processor,
            self.video,
            *(number.to_bytes(8, "little") for number in (frames.first, frames.second, *frames.grid)),
            *(number.to_bytes(8, "little") for number in frames.bilinear or ()),
            self.dtype.encode(),
            salt,
        )
        return ImageKey(address, digest, salt=salt, frames=frames)


def _hash(purpose: bytes, *fields: bytes | memoryview) -> bytes:
    """Return BLAKE3 over length-prefixed fields, so that no two purposes or lists of fields have the same encoding."""
    hasher = blake3.blake3()
    for field in (purpose, *fields):
        hasher.update(len(field).to_bytes(4, "little"))
        hasher.update(field)
    return hasher.digest()
