"""Image URLs, parsed strictly, and the rules that say from which hosts and addresses images may be loaded."""

import ipaddress
from collections.abc import Collection, Iterable
from dataclasses import dataclass
from typing import Self, TypeAlias
from urllib.parse import SplitResult, quote, urljoin, urlsplit

from encoder_contract.errors import ForbiddenError, InvalidImageError

DEFAULT_PORTS = {"http": 80, "https": 443}
MAX_CHARACTERS = 8192
# What may stand in a request line; everything else is sent percent-encoded.
_TARGET_CHARACTERS = "/?:@!$&'()*+,;=-._~%[]"


@dataclass(frozen=True, slots=True)
class ImageUrl:
    """Scheme, host and port are normal forms; `target` is path and query as the request line has them."""

    scheme: str
    host: str  # lower-case, international names in their ASCII form, no final dot, IPv6 without brackets
    port: int
    target: str

    @classmethod
    def parse(cls, text: str) -> Self:
        """Parse a URL. Raises `InvalidImageError` if it is not one, `ForbiddenError` for a user or password in it."""
        if len(text) > MAX_CHARACTERS:
            raise InvalidImageError(f"an image URL may have at most {MAX_CHARACTERS} characters")
        if any(character <= " " or character in "\\\x7f" for character in text):
            raise InvalidImageError("not a URL: it contains a space, a control character or a backslash")
        try:
            return cls._of(urlsplit(text))
        except ValueError as error:  # UnicodeError, of names that have no ASCII form, is one
            raise InvalidImageError(f"not a URL: {error}") from error

    @classmethod
    def _of(cls, parts: SplitResult) -> Self:
        if parts.scheme not in DEFAULT_PORTS:
            raise InvalidImageError("an image URL must be a data:, http: or https: URL")
        if "@" in parts.netloc:
            raise ForbiddenError("an image URL must not contain a user or password")
        port = DEFAULT_PORTS[parts.scheme] if parts.port is None else parts.port
        if not port:
            raise InvalidImageError("not a URL: port 0 is not valid")
        target = (parts.path or "/") + (f"?{parts.query}" if parts.query else "")
        return cls(
            parts.scheme, host_name(parts.hostname or ""), port, quote(target, safe=_TARGET_CHARACTERS)
        )

    def joined(self, location: str) -> "ImageUrl":
        """Return the URL that a redirect from here names. Raises as `parse` does."""
        try:
            return ImageUrl.parse(urljoin(str(self), location))
        except ValueError as error:
            raise InvalidImageError(f"redirected to an invalid URL: {error}") from error

    @property
    def authority(self) -> str:
        """Host and port as the Host header has them."""
        host = f"[{self.host}]" if ":" in self.host else self.host
        return host if self.port == DEFAULT_PORTS[self.scheme] else f"{host}:{self.port}"

    def __str__(self) -> str:
        return f"{self.scheme}://{self.authority}{self.target}"


def host_name(text: str) -> str:
    """Return the normal form of a host. Raises `ValueError` for what is no host."""
    if ":" in text:
        return str(ipaddress.IPv6Address(text))  # a zone is refused: it names an interface of ours
    name = text.lower().encode("idna").decode().removesuffix(".")
    if not name or "%" in name:
        raise ValueError("it names no host")
    return name


Address: TypeAlias = ipaddress.IPv4Address | ipaddress.IPv6Address
Network: TypeAlias = ipaddress.IPv4Network | ipaddress.IPv6Network

PUBLIC = "public"

# Global by their number, and yet a way in: addresses that hold or are translated to others, and services of a cloud
# that answer inside it.
_NOT_PUBLIC = [
    ipaddress.ip_network(network)
    for network in (
        "168.63.129.16/32",  # Azure's own
        "192.0.0.0/24",  # of protocols; Oracle's metadata
        "192.88.99.0/24",  # relays of 6to4
        "::/96",  # IPv4, in old notation
        "::ffff:0:0/96",  # IPv4-mapped
        "::ffff:0:0:0/96",  # IPv4-translated
        "64:ff9b::/96",  # NAT64
        "64:ff9b:1::/48",
        "2001::/32",  # Teredo
        "2002::/16",  # 6to4
        "fec0::/10",  # what link-local once was for a site
    )
]


class Destinations:
    """The rules of an operator. A URL passes if its host is allowed, and then each of its addresses has to."""

    def __init__(self, rules: Collection[str]) -> None:
        """Take rules; none allows no URL. Raises `ValueError` for what is no rule.

        A host (`cdn.example.org`) at every port, or at one (`cdn.example.org:8443`), or all below a name
        (`*.example.org`), at public addresses; `public`: every host, at public addresses and the ports of http
        and https; an address (`10.1.2.3:8000`, `[fd00::1]`), whether or not it is public; a network (`10.1.0.0/16`):
        hosts that are allowed may have its addresses.
        """
        self._public = False
        self._hosts: set[tuple[str, int | None]] = set()
        self._networks: list[Network] = []
        for rule in rules:
            self._add(rule.strip().lower())

    def check(self, url: ImageUrl) -> None:
        """Raise `ForbiddenError` if images from this host and port are not allowed."""
        if self._public and url.port == DEFAULT_PORTS[url.scheme]:
            return
        labels = url.host.split(".")
        parents = (".".join(["*", *labels[begin:]]) for begin in range(1, len(labels)))
        for host in (url.host, *parents):
            if (host, None) in self._hosts or (host, url.port) in self._hosts:
                return
        raise ForbiddenError(f"images from {url.authority} are not allowed here")

    def permitted(self, addresses: Iterable[str]) -> list[str]:
        """Return those of a host's addresses that may be connected to."""
        return [address for address in addresses if self._permits(ipaddress.ip_address(address))]

    def _permits(self, address: Address) -> bool:
        return is_public(address) or any(address in network for network in self._networks)

    def _add(self, rule: str) -> None:
        if rule == PUBLIC:
            self._public = True
        elif "/" in rule:
            self._networks.append(ipaddress.ip_network(rule))
        else:
            self._add_host(rule)

    def _add_host(self, rule: str) -> None:
        host, port = _host_and_port(rule)
        below = host.removeprefix("*.")
        name = host_name(below)
        self._hosts.add((f"*.{name}" if below != host else name, port))
        try:
            self._networks.append(ipaddress.ip_network(name))
        except ValueError:
            return  # a name: its addresses are public, or of a network that is named too


def is_public(address: Address) -> bool:
    """Whether an address can only be that of a host on the Internet."""
    if not address.is_global or address.is_multicast:
        return False
    return not any(address in network for network in _NOT_PUBLIC)


def _host_and_port(rule: str) -> tuple[str, int | None]:
    if rule.startswith("["):
        host, bracket, port = rule[1:].partition("]")
        if not bracket or (port and not port.startswith(":")):
            raise ValueError(f"{rule} is not a host")
        port = port.removeprefix(":")
    else:
        host, _, port = rule.partition(":")
    if port and not (port.isascii() and port.isdigit() and 0 < int(port) < 65536):
        raise ValueError(f"{rule}: {port} is not a port")
    return host, int(port) if port else None
