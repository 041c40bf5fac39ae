"""A part: what one `/encode` call of SGLang asks for, checked before anything is loaded or connected to."""

import ipaddress
import json
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import Any, Self

from encoder_contract.errors import ForbiddenError, ImageLimitError, InvalidRequestError
from prefill_client.sglang_gateway.frames import Modality

# SGLang's encoders for the families that the service has read none of these; `content_hash` is another hash than ours.
_IGNORED_KEYS = frozenset({"url", "content_hash", "detail", "max_dynamic_patch"})
_MAX_ID_CHARACTERS, _MAX_CALL_ID_BYTES = 512, 128
_MAX_PARTS = 1 << 20
MAX_RANKS = 1024
"""The most ranks of one SGLang that receive a part, each by a socket of its own."""


@dataclass(frozen=True, slots=True)
class Address:
    """Where SGLang receives rows: an IP address and a port."""

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
        """The address as ZeroMQ names it."""
        return f"tcp://[{self.host}]:{self.port}" if ":" in self.host else f"tcp://{self.host}:{self.port}"


class AllowedReceivers:
    """Where the gateway may send rows: it connects wherever a request says, so the operator lists the networks."""

    def __init__(self, networks: Collection[str], ports: str) -> None:
        """Read addresses and networks, and a range of ports such as `1024-65535`. Raises `ValueError`."""
        self._networks = [ipaddress.ip_network(each.strip()) for each in networks]
        first, _, last = ports.partition("-")
        self._ports = range(int(first), int(last or first) + 1)
        if not self._ports or self._ports[0] < 1 or self._ports[-1] > 65535:
            raise ValueError(f"{ports} is not a range of ports")

    def check(self, address: Address) -> None:
        """Raise `ForbiddenError` for an address that is not allowed, or for a name instead of an IP address."""
        try:
            # Not with a zone, which is any text: ZeroMQ connects to another address that it finds there.
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
    """One part of a request: `part_idx` of `num_parts`, under an id of its own.

    `receivers` are named by the request with the back end zmq_to_tokenizer. They are None with zmq_to_scheduler, where
    each rank names its own by another call.
    """

    req_id: str
    num_parts: int
    part_idx: int
    modality: Modality
    items: tuple[object, ...]
    receivers: tuple[Address, ...] | None

    @classmethod
    def parse(cls, body: bytes) -> Self:
        """Read the body of `/encode`. Raises `InvalidRequestError`, which names what is wrong."""
        said = read_object(body)
        num_parts, part_idx = _whole(said, "num_parts"), _whole(said, "part_idx")
        if not 0 <= part_idx < num_parts <= _MAX_PARTS:
            raise InvalidRequestError(f"part_idx {part_idx} is not below num_parts {num_parts}")
        items, modality = said.get("mm_items"), str(said.get("modality", "IMAGE"))
        if not isinstance(items, list) or not items:
            raise InvalidRequestError("mm_items must be a list of at least one item")
        if modality not in Modality.__members__:
            raise InvalidRequestError(f"modality must be one of {', '.join(Modality.__members__)}")
        return cls(
            req_id_of(said), num_parts, part_idx, Modality[modality], tuple(items), _receivers_of(said)
        )

    @property
    def call_id(self) -> str:
        """By what the encoder service knows it, which takes fewer bytes for an id than SGLang's callers may choose."""
        return self.req_id.encode("ascii", "replace")[-_MAX_CALL_ID_BYTES:].decode()

    @property
    def kind(self) -> str:
        """What messages call an item."""
        return self.modality.name.lower()

    def urls(self, most: int) -> list[str]:
        """Return the URL of each image or video; one without a scheme is base64, which becomes a data URL.

        Raises `InvalidRequestError` for sound and for options that change pixels, `ImageLimitError` for more than
        `most`, and `ForbiddenError` for files: the gateway reads none.
        """
        if self.modality is Modality.AUDIO:
            raise InvalidRequestError("AUDIO is not served: the encoder service encodes images and videos")
        if len(self.items) > most:
            raise ImageLimitError(f"a part has at most {most} {self.kind}s, not {len(self.items)}")
        return [_url_of(index, item) for index, item in enumerate(self.items)]


def read_object(body: bytes) -> dict[str, Any]:
    """Read a JSON object. Raises `InvalidRequestError`."""
    try:
        said = json.loads(body)
    except (ValueError, RecursionError) as error:
        raise InvalidRequestError(f"the body is not JSON: {error}") from error
    if not isinstance(said, dict):
        raise InvalidRequestError("the body is not a JSON object")
    return said


def req_id_of(said: Mapping[str, Any]) -> str:
    """Return the id of the part that a call is about. Raises `InvalidRequestError`."""
    req_id = said.get("req_id")
    if not isinstance(req_id, str) or not 0 < len(req_id) <= _MAX_ID_CHARACTERS:
        raise InvalidRequestError(f"req_id must be a text of at most {_MAX_ID_CHARACTERS} characters")
    return req_id


def _whole(said: Mapping[str, Any], name: str) -> int:
    value = said.get(name)
    if isinstance(value, bool) or not isinstance(value, int):
        raise InvalidRequestError(f"{name} must be a whole number")
    return value


def _receivers_of(said: Mapping[str, Any]) -> tuple[Address, ...] | None:
    ports, host = said.get("embedding_port"), said.get("prefill_host")
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
            f"item {index}: {', '.join(unknown)} may change pixels for one request alone and is not supported: the "
            "encoder service processes all images as its checkpoint says"
        )
    url = options.get("url")
    if not isinstance(url, str) or not url:
        raise InvalidRequestError(f"item {index} has no url")
    scheme, colon, _ = url[:16].partition(":")
    if not colon:
        return f"data:;base64,{url}"
    if scheme.lower() == "file":
        raise ForbiddenError(
            f"item {index}: the gateway reads no files; send the image itself or an http URL"
        )
    return url
