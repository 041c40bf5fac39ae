"""A part: the contents of one `/encode` call of SGLang, validated before the gateway loads or connects to anything."""

import ipaddress
import json
import re
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import Any, Self

from encoder_contract.errors import ForbiddenError, ImageLimitError, InvalidRequestError
from prefill_client.media.bare_image import as_url
from prefill_client.sglang_gateway.frames import Modality

# Options that SGLang's own encoders of these families ignore. `content_hash` is not the service's content digest.
_IGNORED_KEYS = frozenset({"url", "content_hash", "detail", "max_dynamic_patch"})
_MAX_ID_CHARACTERS, _MAX_CALL_ID_BYTES = 512, 128
_MAX_PARTS = 1 << 20
MAX_RANKS = 256
"""Largest number of SGLang ranks that receive a part, each on its own socket."""
_SURROGATE = re.compile(rb"\\u[dD][89a-fA-F]")


@dataclass(frozen=True, slots=True)
class Address:
    """The IP address and port where SGLang receives rows."""

    host: str
    port: int

    @classmethod
    def parse(cls, text: str) -> Self:
        """Parse `host:port`. Raises `InvalidRequestError`."""
        host, _, port = text.rpartition(":")
        if not (port.isascii() and port.isdigit() and len(port) <= len("65535")):
            raise InvalidRequestError(f"{text[:80]!r} is not host:port")
        return cls(host.removeprefix("[").removesuffix("]"), int(port))

    @property
    def url(self) -> str:
        """The address in the form that ZeroMQ expects."""
        return f"tcp://[{self.host}]:{self.port}" if ":" in self.host else f"tcp://{self.host}:{self.port}"


class AllowedReceivers:
    """The addresses to which the gateway may send rows. Requests name addresses, so the operator limits them."""

    def __init__(self, networks: Collection[str], ports: str) -> None:
        """Parse addresses or networks, and a range of ports such as `1024-65535`. Raises `ValueError`."""
        self._networks = [ipaddress.ip_network(each.strip()) for each in networks]
        first, _, last = ports.partition("-")
        self._ports = range(int(first), int(last or first) + 1)
        if not self._ports or self._ports[0] < 1 or self._ports[-1] > 65535:
            raise ValueError(f"{ports} is not a range of ports")

    def check(self, address: Address) -> None:
        """Raise `ForbiddenError` for an address that is not allowed, or for a name instead of an IP address."""
        try:
            # A zone (after %) may be any text, and ZeroMQ would connect to another address that it finds there.
            host = ipaddress.ip_address("" if "%" in address.host else address.host)
        except ValueError:
            raise ForbiddenError(
                f"{address.host[:80]!r} is not an IP address: set SGLANG_HOST_IP to the address of SGLang"
            ) from None
        if address.port not in self._ports or not any(host in network for network in self._networks):
            raise ForbiddenError(
                f"rows may not be sent to {address.host} port {address.port}: --receivers and --receiver-ports of the "
                "gateway list where SGLang may receive them"
            )


@dataclass(frozen=True, slots=True)
class Part:
    """One part of a request: number `part_idx` of `num_parts`, with its own id.

    With the back end zmq_to_tokenizer, the request names the `receivers`. With zmq_to_scheduler they are None, and each
    rank registers its receiver by another call.
    """

    req_id: str
    num_parts: int
    part_idx: int
    modality: Modality
    items: tuple[object, ...]
    receivers: tuple[Address, ...] | None

    @classmethod
    def parse(cls, body: bytes) -> Self:
        """Parse the body of an `/encode` call. Raises `InvalidRequestError` with the reason."""
        fields = read_object(body)
        num_parts, part_idx = _integer(fields, "num_parts"), _integer(fields, "part_idx")
        if not 0 <= part_idx < num_parts <= _MAX_PARTS:
            raise InvalidRequestError(f"part_idx {part_idx} is not below num_parts {num_parts}")
        items, modality = fields.get("mm_items"), str(fields.get("modality", "IMAGE"))
        if not isinstance(items, list) or not items:
            raise InvalidRequestError("mm_items must be a list of at least one item")
        if modality not in Modality.__members__:
            raise InvalidRequestError(f"modality must be one of {', '.join(Modality.__members__)}")
        return cls(
            req_id_of(fields), num_parts, part_idx, Modality[modality], tuple(items), _receivers_of(fields)
        )

    @property
    def call_id(self) -> str:
        """The request id at the encoder service, which accepts shorter ids than SGLang's callers may choose."""
        return self.req_id.encode("ascii", "replace")[-_MAX_CALL_ID_BYTES:].decode()

    @property
    def kind(self) -> str:
        """The name of an item in messages: image or video."""
        return self.modality.name.lower()

    def urls(self, max_items: int) -> list[str]:
        """Return the URL of each image or video. An item without a scheme is base64, and becomes a data URL.

        Raises `InvalidRequestError` for audio and for options that change pixels, `ImageLimitError` for more than
        `max_items` items, and `ForbiddenError` for file URLs, because the gateway reads no files.
        """
        if self.modality is Modality.AUDIO:
            raise InvalidRequestError("AUDIO is not served: the encoder service encodes images and videos")
        if len(self.items) > max_items:
            raise ImageLimitError(f"a part has at most {max_items} {self.kind}s, not {len(self.items)}")
        return [_url_of(index, item) for index, item in enumerate(self.items)]


def read_object(body: bytes) -> dict[str, Any]:
    """Parse a JSON object. Raises `InvalidRequestError`."""
    try:
        parsed = json.loads(body)
    except (ValueError, RecursionError) as error:
        raise InvalidRequestError(f"the body is not JSON: {error}") from error
    if not isinstance(parsed, dict):
        raise InvalidRequestError("the body is not a JSON object")
    if _SURROGATE.search(body):  # a half of a pair is valid JSON, but cannot be encoded
        try:
            json.dumps(parsed, ensure_ascii=False).encode()
        except UnicodeEncodeError as error:
            raise InvalidRequestError(
                f"the body has a text with half of a surrogate pair: {error.reason}"
            ) from error
    return parsed


def req_id_of(fields: Mapping[str, Any]) -> str:
    """Return the id of the part to which a call belongs. Raises `InvalidRequestError`."""
    req_id = fields.get("req_id")
    if not isinstance(req_id, str) or not 0 < len(req_id) <= _MAX_ID_CHARACTERS:
        raise InvalidRequestError(f"req_id must be a text of at most {_MAX_ID_CHARACTERS} characters")
    return req_id


def _integer(fields: Mapping[str, Any], name: str) -> int:
    value = fields.get(name)
    if isinstance(value, bool) or not isinstance(value, int):
        raise InvalidRequestError(f"{name} must be a whole number")
    return value


def _receivers_of(fields: Mapping[str, Any]) -> tuple[Address, ...] | None:
    ports, host = fields.get("embedding_port"), fields.get("prefill_host")
    if ports is None:
        return None
    listed = ports if isinstance(ports, list) else [ports]
    if not listed or not all(type(port) is int for port in listed) or not isinstance(host, str):
        raise InvalidRequestError("prefill_host must be an address, and embedding_port a port")
    if len(listed) > MAX_RANKS:
        raise InvalidRequestError(f"embedding_port names {len(listed)} ports, and the limit is {MAX_RANKS}")
    return tuple(Address(host, port) for port in listed)


def _url_of(index: int, item: object) -> str:
    options = item if isinstance(item, dict) else {"url": item}
    if unknown := sorted(
        key for key, value in options.items() if key not in _IGNORED_KEYS and value is not None
    ):
        raise InvalidRequestError(
            f"item {index}: {', '.join(unknown)} is not supported, because it may change pixels for this request only: "
            "the encoder service processes all images as its checkpoint says"
        )
    url = options.get("url")
    if not isinstance(url, str) or not url:
        raise InvalidRequestError(f"item {index} has no url")
    return as_url(url, f"item {index}")
