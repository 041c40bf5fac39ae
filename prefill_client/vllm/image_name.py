"""What the middleware tells the connector: a name for each image, proofs of the names, and facts about the request.

vLLM uses the `uuid` of a part without pixels as the key of its encoder cache and as part of its prefix-cache keys,
without a check. A name therefore covers the file, the grid, the model, the processor and the tenant, and for a video
also the two frames. It covers nothing else, so engines that share KV blocks find those of each other, also after a
restart. Any client can send such a part, so the connector fetches only names with a proof of the middleware. The proof
travels beside the names.
"""

import re
from collections.abc import Container, Mapping, Sequence
from dataclasses import asdict, dataclass
from hmac import compare_digest
from typing import Any, ClassVar, Self

import blake3

from encoder_contract.geometry import Grid
from encoder_contract.traceparent import trace_id
from encoder_contract.video import Frames
from prefill_client.transport.connection import Description

NAME_PREFIX = "encsvc1-"
"""How every name begins."""
_IDENTIFIER = re.compile(
    r"(encsvc1-([0-9a-f]{64})(?:-f(\d{1,8})-(\d{1,8}))?-(\d{1,6})x(\d{1,6})-([0-9a-f]{32}))(?:-([0-9a-f]{32}))?"
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


def identifier_of(name: ImageName) -> str:
    """Return the identifier of a name, for vLLM's `uuid`."""
    frames = f"-f{name.frames.first}-{name.frames.second}" if name.frames else ""
    return f"{NAME_PREFIX}{name.digest.hex()}{frames}-{name.grid.h}x{name.grid.w}-{name.producer.hex()}"


class NameSigner:
    """Proves identifiers and checks the proofs. Middleware and connector make one from the key that they share."""

    def __init__(self, key: bytes) -> None:
        """`key` has 32 bytes."""
        self._key = key

    def proof(self, identifier: str) -> str:
        """Return the proof that an identifier comes from a process with this key."""
        return blake3.blake3(identifier.encode(), key=self._key).hexdigest(length=_TAG_BYTES)

    def sealed(self, identifier: str) -> str:
        """Return an identifier that contains its proof, for requests that vLLM strips of everything else.

        vLLM hashes the proof with it, so only engines with this key find the KV blocks of each other.
        """
        return f"{identifier}-{self.proof(identifier)}"

    def name(self, identifier: str, proofs: Container[str] = ()) -> ImageName | None:
        """Return the name in an identifier; None if it has another form, or no proof in itself or among `proofs`."""
        match = _IDENTIFIER.fullmatch(identifier)
        if match is None or not self._is_proven(match[1], match[8], proofs):
            return None
        _, digest, first, second, height, width, producer, _ = match.groups()
        grid = Grid(1, int(height), int(width))
        frames = Frames(int(first), int(second), grid) if first else None
        return ImageName(bytes.fromhex(digest), grid, bytes.fromhex(producer), frames)

    def _is_proven(self, identifier: str, inside: str | None, proofs: Container[str]) -> bool:
        proof = self.proof(identifier)
        return proof in proofs if inside is None else compare_digest(inside, proof)


def is_image_name(identifier: str) -> bool:
    """Whether an identifier has the form of a name of ours; only `NameSigner.name` checks its proof."""
    return identifier.startswith(NAME_PREFIX)


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

    Any client can write there too. `read` therefore sanitises all values. The connector uses them only to order work
    and to decide how long to wait, and it checks `proofs`.
    """

    request_id: str = ""
    priority: int = 0
    traceparent: str = ""
    stored: tuple[int, ...] = ()
    """The indexes of the images that were already encoded when the middleware submitted them."""
    submitted_to: tuple[str, ...] = ()
    """The server to which each image was submitted. The client asks it only if it knows that server."""

    proofs: tuple[str, ...] = ()
    """A proof of each name, in any order."""

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
            proofs=tuple(map(str, _list(values.get("proofs")))),
        )


def valid_traceparent(value: object) -> str:
    """Return a well-formed `traceparent`, else nothing: gRPC would fail a call with invalid metadata."""
    return value if isinstance(value, str) and trace_id(value) else ""


def _list(value: object) -> Sequence[Any]:
    return value if isinstance(value, list | tuple) else ()
