"""What the middleware tells the connector: a name for each image, its identifier, and facts about the request.

vLLM uses the `uuid` of a part without pixels as the key of its encoder cache and as part of its prefix-cache keys,
without a check. A name therefore covers the file, the grid, the model, the processor and the tenant, and for a video
also the two frames. It covers nothing else, so engines with one key that share KV blocks find those of each other, also
after a restart. The `uuid` is the identifier of a name: 64 hexadecimal digits, as vLLM's own hashes of images, which
routers and stores of KV blocks read as numbers. The names travel beside the identifiers.

Any client can send such a part. An identifier is therefore a keyed hash of its name: nobody without the key can make
one, or give one another name. Whoever has the key also sees that it is one, and refuses it for pixels of a client.
"""

import struct
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from hmac import compare_digest
from typing import Any, ClassVar, Self

import blake3

from encoder_contract.geometry import Grid
from encoder_contract.traceparent import trace_id
from encoder_contract.video import Frames
from prefill_client.transport.connection import Description

IDENTIFIER_DIGITS = 64
"""The length of an identifier."""
UNKNOWN_NAME = (
    "unknown or forged image name, or one of weights that the engine has no longer. If all images fail so, this engine "
    "and the server before it have different keys: set name_key_file"
)
"""The error of an image whose identifier was not made with the engine's key, for its tenant."""
_HALF_BYTES = IDENTIFIER_DIGITS // 4
_IMAGE = struct.Struct(">32s16sII")  # digest, producer, height and width in patches
_FRAMES = struct.Struct(">II")
_PRODUCER_BYTES = 16
_NAME_DIGITS = (2 * _IMAGE.size, 2 * (_IMAGE.size + _FRAMES.size))
MAX_PRIORITY = 8
"""Priorities that the service accepts: from minus this to this."""


@dataclass(frozen=True, slots=True)
class ImageName:
    """An image whose rows can be fetched. `producer` is 16 bytes over model, processor, dtype and tenant.

    With `frames`, the digest is that of a video, and the image is two of its frames.
    """

    digest: bytes
    grid: Grid
    producer: bytes
    frames: Frames | None = None

    def hex(self) -> str:
        """Return all fields as hexadecimal digits."""
        frames = _FRAMES.pack(self.frames.first, self.frames.second) if self.frames else b""
        return (_IMAGE.pack(self.digest, self.producer, self.grid.h, self.grid.w) + frames).hex()

    @classmethod
    def from_hex(cls, digits: str) -> Self | None:
        """Return the name with these digits; None for any other text."""
        try:
            packed = bytes.fromhex(digits) if len(digits) in _NAME_DIGITS else b""
        except ValueError:
            return None
        if 2 * len(packed) not in _NAME_DIGITS:  # spaces are no digits
            return None
        digest, producer, height, width = _IMAGE.unpack_from(packed)
        grid = Grid(1, height, width)
        if len(packed) == _IMAGE.size:
            return cls(digest, grid, producer)
        first, second = _FRAMES.unpack_from(packed, _IMAGE.size)
        return cls(digest, grid, producer, Frames(first, second, grid))


class NameSigner:
    """Makes identifiers of names and recognises them. Middleware and connector share its key."""

    def __init__(self, key: bytes) -> None:
        """`key` has 32 bytes."""
        self._key = key

    def identifier(self, name: ImageName) -> str:
        """Return the identifier of a name, for vLLM's `uuid`: a hash of the name, and a hash of that hash."""
        half = self._hash(name.hex())
        return half + self._hash(half)

    def sealed(self, name: ImageName) -> str:
        """Return an identifier that contains its name, for requests that vLLM strips of everything else.

        It is longer, so these requests share no KV blocks with others.
        """
        return name.hex() + self.identifier(name)

    def is_identifier(self, text: str) -> bool:
        """Whether a text is an identifier that was made with this key, or contains a name, whatever its key."""
        if len(text) != IDENTIFIER_DIGITS:
            contains_name = len(text) - IDENTIFIER_DIGITS in _NAME_DIGITS
            return contains_name and ImageName.from_hex(text[:-IDENTIFIER_DIGITS]) is not None
        half = IDENTIFIER_DIGITS // 2
        return text.isascii() and compare_digest(text[half:], self._hash(text[:half]))

    def names(self, images: Iterable[str]) -> dict[str, ImageName]:
        """Return by identifier the names that a request says its identifiers stand for; skips all other texts."""
        read = filter(None, map(ImageName.from_hex, images))
        return {self.identifier(name): name for name in read}

    def name(self, identifier: str, names: Mapping[str, ImageName]) -> ImageName | None:
        """Return the name of an identifier: among `names`, or the one in itself. None if it has none with this key."""
        if len(identifier) == IDENTIFIER_DIGITS:
            return names.get(identifier)
        name = ImageName.from_hex(identifier[:-IDENTIFIER_DIGITS])
        return name if name is not None and self.sealed(name) == identifier else None

    def _hash(self, text: str) -> str:
        # Names and halves of identifiers have different lengths, so neither hash can be taken for the other.
        return blake3.blake3(text.encode(), key=self._key).hexdigest(length=_HALF_BYTES)


def salt_of(tenant_salt: str, cache_salt: str | None) -> str:
    """Return the tenant salt of a request's images: the engine's salt, combined with the request's `cache_salt`.

    `cache_salt` separates requests in vLLM's prefix cache. It therefore separates the addresses of their images, too.
    """
    if not cache_salt:
        return tenant_salt
    hasher = blake3.blake3(derive_key_context="encoder-service vllm tenant")
    for field in (tenant_salt.encode(), cache_salt.encode()):
        hasher.update(len(field).to_bytes(4, "little") + field)
    return hasher.hexdigest()


def producer_of(description: Description, tenant_salt: str) -> bytes:
    """Return 16 bytes over everything that an image's rows depend on besides the image."""
    hasher = blake3.blake3(derive_key_context="encoder-service vllm producer")
    salt = tenant_salt.encode()
    for field in (
        description.model_fingerprint, description.processor_fingerprint, description.dtype.encode(), salt
    ):  # fmt: skip
        hasher.update(len(field).to_bytes(4, "little") + field)
    return hasher.digest(length=_PRODUCER_BYTES)


@dataclass(frozen=True, slots=True)
class RequestInfo:
    """What the middleware tells the connector about a request, in the body's `ec_transfer_params`.

    Any client can write there too. `read` therefore sanitises all values. The connector uses them only to order work
    and to decide how long to wait. Nobody can give an identifier another name (`images`).
    """

    request_id: str = ""
    priority: int = 0
    traceparent: str = ""
    stored: tuple[int, ...] = ()
    """The indexes of the images that were already encoded when the middleware submitted them."""
    submitted_to: tuple[str, ...] = ()
    """The server to which each image was submitted. The client asks it only if it knows that server."""

    images: tuple[str, ...] = ()
    """The digits of each name (`ImageName.hex`), in any order."""

    KEY: ClassVar[str] = "encoder_service"
    """The key of these values in `ec_transfer_params`."""

    def write(self, body: dict[str, Any]) -> None:
        """Add these values to a request's JSON."""
        body["ec_transfer_params"] = {**(body.get("ec_transfer_params") or {}), self.KEY: asdict(self)}

    @classmethod
    def read(cls, parameters: Mapping[str, Any] | None, request_id: str) -> Self:
        """Read `ec_transfer_params`. `request_id` is vLLM's, for a request that did not pass the middleware."""
        values = (parameters or {}).get(cls.KEY)
        values = values if isinstance(values, Mapping) else {}
        priority: Any = values.get("priority")
        return cls(
            request_id=str(values.get("request_id", request_id))[:128],
            priority=priority if priority in range(-MAX_PRIORITY, MAX_PRIORITY + 1) else 0,
            traceparent=valid_traceparent(values.get("traceparent")),
            stored=tuple(each for each in _list(values.get("stored")) if isinstance(each, int)),
            submitted_to=tuple(map(str, _list(values.get("submitted_to")))),
            images=tuple(each for each in _list(values.get("images")) if isinstance(each, str)),
        )


def valid_traceparent(value: object) -> str:
    """Return a well-formed `traceparent`, else nothing: gRPC would fail a call with invalid metadata."""
    return value if isinstance(value, str) and trace_id(value) else ""


def _list(value: object) -> Sequence[Any]:
    return value if isinstance(value, list | tuple) else ()
