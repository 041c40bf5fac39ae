"""Where images may be loaded from: which hosts a URL may name, and which addresses those may have."""

import ipaddress
from collections.abc import Collection, Iterable
from typing import TypeAlias

from encoder_contract.errors import ForbiddenError
from prefill_client.media.image_url import DEFAULT_PORTS, ImageUrl, host_name

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
