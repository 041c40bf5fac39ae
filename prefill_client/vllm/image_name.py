"""The name under which vLLM knows an image of ours: what its rows depend on, signed by who submitted it.

vLLM takes the `uuid` of a part without pixels as the key of its encoder cache and as part of its prefix-cache keys, and
believes it. So the name covers the file, the grid, the model, the processor and the tenant; and since any client may
send such a part, only a name with our signature is fetched.
"""

import re
from dataclasses import dataclass
from hmac import compare_digest

import blake3

from encoder_contract.geometry import Grid
from prefill_client.transport.connection import Description

_FORM = re.compile(r"encsvc1-([0-9a-f]{64})-(\d{1,6})x(\d{1,6})-([0-9a-f]{32})-([0-9a-f]{32})")
_PREFIX = "encsvc1-"
_TAG_BYTES = 16


@dataclass(frozen=True, slots=True)
class ImageName:
    """An image whose rows can be fetched. `producer`: what encodes it, 16 bytes over model, processor and tenant."""

    digest: bytes
    grid: Grid
    producer: bytes


class NameSigner:
    """Turns names into identifiers and back. Both sides make one from the `engine_id` that they share."""

    def __init__(self, engine_id: str) -> None:
        self._key = blake3.blake3(
            engine_id.encode(), derive_key_context="encoder-service vllm names"
        ).digest()

    def identifier(self, name: ImageName) -> str:
        """Return the identifier of a name, for vLLM's `uuid`."""
        said = f"{_PREFIX}{name.digest.hex()}-{name.grid.h}x{name.grid.w}-{name.producer.hex()}"
        return f"{said}-{self._tag(said)}"

    def name(self, identifier: str) -> ImageName | None:
        """Return the name that an identifier of ours stands for; None for a forged one."""
        match = _FORM.fullmatch(identifier)
        if match is None:
            return None
        digest, height, width, producer, tag = match.groups()
        if not compare_digest(tag, self._tag(identifier.rpartition("-")[0])):
            return None
        return ImageName(bytes.fromhex(digest), Grid(1, int(height), int(width)), bytes.fromhex(producer))

    def _tag(self, said: str) -> str:
        return blake3.blake3(said.encode(), key=self._key).hexdigest(length=_TAG_BYTES)


def is_ours(identifier: str) -> bool:
    """Whether an identifier claims to be a name of ours."""
    return identifier.startswith(_PREFIX)


def salt_of(tenant_salt: str, cache_salt: str | None) -> str:
    """Return the tenant salt of a request's images: the engine's, and with it what the request says to vLLM.

    `cache_salt` keeps requests apart in vLLM's prefix cache; images of such a request have addresses of their own.
    """
    if not cache_salt:
        return tenant_salt
    hasher = blake3.blake3(derive_key_context="encoder-service vllm tenant")
    for field in (tenant_salt.encode(), cache_salt.encode()):
        hasher.update(len(field).to_bytes(4, "little") + field)
    return hasher.hexdigest()


def producer_of(description: Description, tenant_salt: str) -> bytes:
    """Return 16 bytes over what decides an image's rows besides the image."""
    hasher = blake3.blake3(derive_key_context="encoder-service vllm producer")
    salt = tenant_salt.encode()
    for field in (
        description.model_fingerprint, description.processor_fingerprint, description.dtype.encode(), salt
    ):  # fmt: skip
        hasher.update(len(field).to_bytes(4, "little") + field)
    return hasher.digest(length=_TAG_BYTES)
