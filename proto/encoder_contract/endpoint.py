"""Endpoint: the address of a server, as `host:port`, `[ipv6]:port` or `unix:/path`."""

import errno
import re
from functools import lru_cache
from ipaddress import IPv6Address, ip_address, ip_network
from typing import NamedTuple, Self
from urllib.parse import unquote

DNS = "dns:"  # before host:port, where a client names all servers behind a name
MAX_PORT = 65535
MAX_PATH_BYTES = 107  # Linux's limit for the name of a Unix socket


class Endpoint(NamedTuple):
    """A parsed address: either `host` (without brackets) and `port`, or the `path` of a Unix socket."""

    host: str
    port: int
    path: str

    @classmethod
    def parse(cls, text: str) -> Self:
        """Parse `text`. Raises `ValueError`, which shows the accepted forms."""
        if text.startswith("unix:"):
            path = re.sub("^//(?=/)", "", text.removeprefix("unix:"))
            if not 0 < len(path.encode()) <= MAX_PATH_BYTES:
                raise ValueError(f"{text} must be unix:/path, of at most {MAX_PATH_BYTES} bytes")
            return cls("", 0, path)
        found = re.fullmatch(r"(?:\[([0-9A-Fa-f:.%\w]+)\]|([^\s:/@\[\]]+)):(\d{1,5})", text, re.ASCII)
        if found is None or int(found[3]) > MAX_PORT:
            raise ValueError(
                f"{text or 'an empty address'} must be host:port, [ipv6]:port or unix:/path, port 0 to {MAX_PORT}"
            )
        return cls(found[1] or found[2], int(found[3]), "")

    @classmethod
    def of_server(cls, text: str) -> Self:
        """Parse the address of a server. Raises `ValueError` as `parse` does, and for port 0."""
        found = cls.parse(text)
        if not found.path and not found.port:
            raise ValueError(f"{text} must have the port of a server, from 1 to {MAX_PORT}")
        return found


def check_server(text: str) -> None:
    """Raise `ValueError` unless a client can connect to `text`: an endpoint, or dns:host:port."""
    if not text.startswith(DNS):
        Endpoint.of_server(text)
    elif Endpoint.of_server(text.removeprefix(DNS).lstrip("/")).path:
        raise ValueError(f"{text} must be dns:host:port")


def why_unbound(error: OSError) -> str:
    """Return why a program cannot listen on an address, and what to do if the address is taken."""
    if error.errno == errno.EADDRINUSE:
        return "the address is taken: choose another one, or stop the process that listens there"
    return error.strerror or str(error)


def is_ip(text: str) -> bool:
    """Whether this is an IP address without a port."""
    try:
        ip_address(text)
    except ValueError:
        return False
    return True


def is_local(text: str) -> bool:
    """Whether a direct connection to this address (without a proxy) always ends at this host. Asks no name server."""
    try:
        endpoint = Endpoint.parse(text)
        return endpoint.path != "" or endpoint.host == "localhost" or ip_address(endpoint.host).is_loopback
    except ValueError:  # not an endpoint, or a host name
        return False


@lru_cache(4096)
def host_of(peer: str) -> str:
    """Return the host of a peer as gRPC writes it: an IPv4 address, or the /64 network of an IPv6 address.

    All addresses of a /64 network count as one host, except ::1, and so do all Unix sockets. An IPv4 address that is
    mapped into IPv6 counts as that IPv4 address.
    """
    kind, _, rest = peer.partition(":")
    if kind not in ("ipv4", "ipv6"):
        return peer
    try:
        address = ip_address(unquote(rest.rpartition(":")[0]).strip("[]"))
    except ValueError:
        return peer.rpartition(":")[0]
    if isinstance(address, IPv6Address):
        if address.ipv4_mapped is None:
            return f"ipv6:{address if address.is_loopback else ip_network((int(address), 64), strict=False)}"
        address = address.ipv4_mapped
    return f"ipv4:{address}"
