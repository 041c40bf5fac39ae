"""Names of images: the signed name of an image that the service encodes, the key of one that engines share.

vLLM uses the `uuid` of a part without pixels as the key of its encoder cache and as part of its prefix-cache keys,
without a check. A name therefore covers the file, of a video also the two frames, the grid, the model, the processor
and the tenant. Any client can send such a part, so the connector fetches only names with our signature.

Engines that share a store name an image by a digest of the pixels that their processor passes to the tower. vLLM's own
hash is not safe: a caller can replace it by a `uuid`, which could be that of another image.
"""

import re
from collections.abc import Mapping
from dataclasses import dataclass
from hmac import compare_digest
from typing import Any

import blake3
import torch

from encoder_contract.geometry import Grid
from encoder_contract.producer import EngineKey
from encoder_contract.video import Frames
from prefill_client.transport.connection import Description

_FORM = re.compile(
    r"encsvc1-([0-9a-f]{64})(?:-f(\d{1,8})-(\d{1,8}))?-(\d{1,6})x(\d{1,6})-([0-9a-f]{32})-([0-9a-f]{32})"
)
_PREFIX = "encsvc1-"
_TAG_BYTES = 16


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
        said = f"{_PREFIX}{name.digest.hex()}{frames}-{name.grid.h}x{name.grid.w}-{name.producer.hex()}"
        return f"{said}-{self._tag(said)}"

    def name(self, identifier: str) -> ImageName | None:
        """Return the name in an identifier; None if it is not one of ours, or is forged."""
        match = _FORM.fullmatch(identifier)
        if match is None:
            return None
        digest, first, second, height, width, producer, tag = match.groups()
        if not compare_digest(tag, self._tag(identifier.rpartition("-")[0])):
            return None
        grid = Grid(1, int(height), int(width))
        frames = Frames(int(first), int(second), grid) if first else None
        return ImageName(bytes.fromhex(digest), grid, bytes.fromhex(producer), frames)

    def _tag(self, said: str) -> str:
        return blake3.blake3(said.encode(), key=self._key).hexdigest(length=_TAG_BYTES)


def is_ours(identifier: str) -> bool:
    """Whether an identifier has the form of our names; only `NameSigner.name` checks the signature."""
    return identifier.startswith(_PREFIX)


def salt_of(tenant_salt: str, cache_salt: str | None) -> str:
    """Return the tenant salt of a request's images: the engine's salt, combined with the request's `cache_salt`.

    `cache_salt` separates requests in vLLM's prefix cache. Images of such a request have addresses of their own.
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


_SCHEME = "vllm inputs of a tower"


def image_key(data: Mapping[str, Any], cache_salt: str) -> EngineKey:
    """Return the key of an image: a hash of all inputs of the tower, and of the `cache_salt` of its request.

    `data` has vLLM's inputs by name: tensors, plain values, and lists of these. Raises `TypeError` for anything else.
    Takes 0.15 ms per MB, with the interpreter's lock released: for a worker thread.
    """
    hasher = blake3.blake3(derive_key_context="encoder-service vllm image")
    for name in sorted(data):
        _update(hasher, name, data[name].data)
    _update(hasher, "cache_salt", cache_salt)
    return EngineKey(_SCHEME, hasher.digest())


def _update(hasher: "blake3.blake3", name: str, value: object) -> None:
    """Hash one value so that no other value, or sequence of values, is hashed alike."""
    if isinstance(value, torch.Tensor):
        said = f"{name} {value.dtype} {tuple(value.shape)}"
    elif isinstance(value, list | tuple):
        said = f"{name} [{len(value)}]"
    elif value is None or isinstance(value, bool | int | float | str):
        said = f"{name} {value!r}"
    else:
        raise TypeError(f"{name} is a {type(value).__name__}, which has no digest")
    encoded = said.encode()
    hasher.update(len(encoded).to_bytes(4, "little") + encoded)
    if isinstance(value, torch.Tensor):
        content = value.cpu().contiguous().reshape(-1).view(torch.uint8).numpy()
        hasher.update(memoryview(content))  # type: ignore[arg-type]
    elif isinstance(value, list | tuple):
        for each in value:
            _update(hasher, name, each)


def same_image(one: Mapping[str, Any], other: Mapping[str, Any]) -> bool:
    """Whether two images have the same inputs of the tower; takes 0.2 ms per MB if they are not the same objects."""
    if one is other:
        return True
    return set(one) == set(other) and all(
        one[name] is other[name] or _equal(one[name].data, other[name].data) for name in one
    )


def _equal(one: object, other: object) -> bool:
    if isinstance(one, torch.Tensor) and isinstance(other, torch.Tensor):
        return one.dtype is other.dtype and torch.equal(one, other)
    if isinstance(one, list | tuple) and isinstance(other, list | tuple):
        return len(one) == len(other) and all(map(_equal, one, other))
    return type(one) is type(other) and bool(one == other)
