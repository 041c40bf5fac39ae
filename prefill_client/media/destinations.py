"""Image URLs, parsed strictly, and the rules for the hosts and addresses from which images may be loaded."""

import ipaddress
import re
from collections.abc import Collection, Iterable
from dataclasses import dataclass
from typing import Self, TypeAlias
from urllib.parse import SplitResult, quote, urljoin, urlsplit

import idna

from encoder_contract.errors import ForbiddenError, InvalidImageError

DEFAULT_PORTS = {"http": 80, "https": 443}
MAX_CHARACTERS = 8192
# No URL begins with so many of these characters.
_BARE_BASE64 = re.compile(r"[A-Za-z0-9+/_\s-]{64}")
# Characters that a request line may contain; all others are percent-encoded.
_TARGET_CHARACTERS = "/?:@!$&'()*+,;=-._~%[]"
# A percent sign that begins no escape stands for itself.
_BARE_PERCENT = re.compile(r"%(?![0-9A-Fa-f]{2})")
_NAME = re.compile(r"(?!.{254})[a-z0-9_-]{1,63}(?:\.[a-z0-9_-]{1,63})*")


@dataclass(frozen=True, slots=True)
class ImageUrl:
    """An http or https URL in normal form. `target` is path and query, as in the request line.

    URLs that two parsers could read differently are refused.
    """

    scheme: str
    host: str  # lower-case, international names in their ASCII form, no final dot, IPv6 without brackets
    port: int
    target: str

    @classmethod
    def parse(cls, text: str) -> Self:
        """Parse a URL. Raises `InvalidImageError` if it is invalid, `ForbiddenError` if it has a user or password."""
        if _BARE_BASE64.match(text):
            raise InvalidImageError(
                "this is base64 without its prefix: send data:image/...;base64, and then the base64"
            )
        if len(text) > MAX_CHARACTERS:
            raise InvalidImageError(f"an image URL may have at most {MAX_CHARACTERS} characters")
        if any(character <= " " or character in "\\\x7f" for character in text):
            raise InvalidImageError("not a URL: it contains a space, a control character or a backslash")
        try:
            return cls._of(urlsplit(text))
        except ValueError as error:  # also UnicodeError, for names that have no ASCII form
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
        target = _BARE_PERCENT.sub("%25", quote(target, safe=_TARGET_CHARACTERS))
        return cls(parts.scheme, host_name(parts.hostname or ""), port, target)

    def joined(self, location: str) -> "ImageUrl":
        """Return the URL that a redirect leads to. Raises the errors of `parse`.

        It may contain spaces and backslashes, which are characters like others, as in aiohttp. Browsers read a
        backslash as a slash.
        """
        location = location.strip(" ").replace(" ", "%20").replace("\\", "%5C")
        try:
            return ImageUrl.parse(urljoin(str(self), location))
        except ValueError as error:
            raise InvalidImageError(f"redirected to an invalid URL: {error}") from error

    @property
    def authority(self) -> str:
        """Host and port as in the Host header."""
        host = f"[{self.host}]" if ":" in self.host else self.host
        return host if self.port == DEFAULT_PORTS[self.scheme] else f"{host}:{self.port}"

    def __str__(self) -> str:
        return f"{self.scheme}://{self.authority}{self.target}"


def host_name(text: str) -> str:
    """Return the normal form of a host name or address. Raises `ValueError` if it is neither."""
    if ":" in text:
        if "%" in text:
            raise ValueError("a zone names an interface of this host")
        return str(ipaddress.IPv6Address(text))
    # IDNA 2008, as browsers map and encode names: in that of 2003, ß is ss.
    mapped = text.lower() if text.isascii() else idna.uts46_remap(text, std3_rules=False)
    labels = [
        label if label.isascii() else f"xn--{label.encode('punycode').decode()}"
        for label in mapped.removesuffix(".").split(".")
    ]
    name = ".".join(labels)
    if not _NAME.fullmatch(name):
        raise ValueError("it names no host")
    return name


Address: TypeAlias = ipaddress.IPv4Address | ipaddress.IPv6Address
Network: TypeAlias = ipaddress.IPv4Network | ipaddress.IPv6Network

PUBLIC, PROXY = "public", "proxy"

# Addresses that Python calls global although they lead into internal networks: addresses that contain or translate to
# others, and services that clouds offer to their own machines.
_NOT_PUBLIC = [
    ipaddress.ip_network(network)
    for network in (
        "168.63.129.16/32",  # Azure's platform
        "192.0.0.0/24",  # protocol assignments; Oracle's metadata service
        "192.88.99.0/24",  # 6to4 relays
        "::/96",  # IPv4-compatible
        "::ffff:0:0/96",  # IPv4-mapped
        "::ffff:0:0:0/96",  # IPv4-translated
        "64:ff9b::/96",  # NAT64
        "64:ff9b:1::/48",
        "2001::/32",  # Teredo
        "2002::/16",  # 6to4
        "fec0::/10",  # site-local, deprecated
    )
]


class Destinations:
    """The operator's rules: which hosts a URL may name, and which addresses these hosts may have."""

    def __init__(self, rules: Collection[str]) -> None:
        """Read the rules. Without rules, no URL is allowed. Raises `ValueError` for an invalid rule.

        - `cdn.example.org` allows a host at every port, `cdn.example.org:8443` at one port, and `*.example.org` all
          hosts below a name; each at public addresses.
        - `public` allows every host, at public addresses and the default ports of http and https.
        - An address (`10.1.2.3:8000`, `[fd00::1]`) allows itself, public or not.
        - A network (`10.1.0.0/16`) allows no host by itself; hosts that other rules allow may have its addresses.
        - `proxy` allows no host by itself; it sends requests through the proxies that the environment names. A proxy
          resolves names itself, so the addresses of names are then the proxy's to check.
        """
        self._public = False
        self.uses_proxy = False
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

    def check_written(self, url: ImageUrl) -> None:
        """Raise `ForbiddenError` if the host is written as an address that is not allowed."""
        try:
            addresses = [str(ipaddress.ip_address(url.host))]
        except ValueError:
            return  # a name
        if not self.permitted(addresses):
            raise ForbiddenError(f"images from {url.authority} are not allowed here")

    def permitted(self, addresses: Iterable[str]) -> list[str]:
        """Return those of a host's addresses to which connections are allowed."""
        return [address for address in addresses if self._permits(ipaddress.ip_address(address))]

    def _permits(self, address: Address) -> bool:
        return is_public(address) or any(address in network for network in self._networks)

    def _add(self, rule: str) -> None:
        if rule == PUBLIC:
            self._public = True
        elif rule == PROXY:
            self.uses_proxy = True
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
            return  # a name; its addresses must be public or in an allowed network


def is_public(address: Address) -> bool:
    """Return whether an address can only belong to a host on the public Internet."""
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
