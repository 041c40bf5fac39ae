"""What the middleware tells the connector: a signed name for each image, and facts about the request.

vLLM uses the `uuid` of a part without pixels as the key of its encoder cache and as part of its prefix-cache keys,
without a check. A name therefore covers the file, the grid, the model, the processor and the tenant, and for a video
also the two frames. Any client can send such a part, so the connector fetches only names with our signature.
"""

import re
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from hmac import compare_digest
from typing import Any, ClassVar, Self

import blake3

from encoder_contract.geometry import Grid
from encoder_contract.traceparent import trace_id
from encoder_contract.video import Frames
from prefill_client.transport.connection import Description

_PREFIX = "encsvc1-"
_IDENTIFIER = re.compile(
    r"encsvc1-([0-9a-f]{64})(?:-f(\d{1,8})-(\d{1,8}))?-(\d{1,6})x(\d{1,6})-([0-9a-f]{32})-([0-9a-f]{32})"
)
_TAG_BYTES = 16
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


class NameSigner:
    """Turns names into identifiers and back. Middleware and connector make one from the `engine_id` that they share."""

    def __init__(self, engine_id: str) -> None:
        self._key = blake3.blake3(
            engine_id.encode(), derive_key_context="encoder-service vllm names"
        ).digest()

    def identifier(self, name: ImageName) -> str:
        """Return the identifier of a name, for vLLM's `uuid`."""
        frames = f"-f{name.frames.first}-{name.frames.second}" if name.frames else ""
        signed = f"{_PREFIX}{name.digest.hex()}{frames}-{name.grid.h}x{name.grid.w}-{name.producer.hex()}"
        return f"{signed}-{self._tag(signed)}"

    def name(self, identifier: str) -> ImageName | None:
        """Return the name in an identifier; None if it has another form or a wrong signature."""
        match = _IDENTIFIER.fullmatch(identifier)
        if match is None:
            return None
        digest, first, second, height, width, producer, tag = match.groups()
        if not compare_digest(tag, self._tag(identifier.rpartition("-")[0])):
            return None
        grid = Grid(1, int(height), int(width))
        frames = Frames(int(first), int(second), grid) if first else None
        return ImageName(bytes.fromhex(digest), grid, bytes.fromhex(producer), frames)

    def _tag(self, signed: str) -> str:
        return blake3.blake3(signed.encode(), key=self._key).hexdigest(length=_TAG_BYTES)


def is_image_name(identifier: str) -> bool:
    """Whether an identifier has the form of a signed name; only `NameSigner.name` checks the signature."""
    return identifier.startswith(_PREFIX)


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
    return hasher.digest(length=_TAG_BYTES)


@dataclass(frozen=True, slots=True)
class RequestInfo:
    """What the middleware tells the connector about a request, in the body's `ec_transfer_params`.

    Any client can write there too. `read` therefore sanitises all values, and the connector uses them only to order
    work and to decide how long to wait.
    """

    request_id: str = ""
    priority: int = 0
    traceparent: str = ""
    stored: tuple[int, ...] = ()
    """The indexes of the images that were already encoded when the middleware submitted them."""
    submitted_to: tuple[str, ...] = ()
    """The server to which each image was submitted. The client asks it only if it knows that server."""

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
        )


def valid_traceparent(value: object) -> str:
    """Return a well-formed `traceparent`, else nothing: gRPC would fail a call with invalid metadata."""
    return value if isinstance(value, str) and trace_id(value) else ""


def _list(value: object) -> Sequence[Any]:
    return value if isinstance(value, list | tuple) else ()
