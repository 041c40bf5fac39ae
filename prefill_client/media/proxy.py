"""The proxies that the environment names (`http_proxy`, `https_proxy`, `no_proxy`), and a tunnel through one."""

import asyncio
import base64
import urllib.request
from dataclasses import dataclass
from urllib.parse import unquote, urlsplit

import h11

from prefill_client.media.destinations import ImageUrl, host_name


@dataclass(frozen=True, slots=True)
class Proxy:
    """A proxy that is spoken to in HTTP. `credentials` are the header that names its user, if it has one."""

    host: str
    port: int
    credentials: tuple[tuple[str, str], ...] = ()


def proxy_for(url: ImageUrl) -> Proxy | None:
    """Return the proxy for a URL; None if its host is to be contacted directly. Raises `ValueError` for a bad one."""
    named = urllib.request.getproxies_environment()
    text = named.get(url.scheme) or named.get("all")
    if not text or urllib.request.proxy_bypass_environment(  # type: ignore[attr-defined]
        f"{url.host}:{url.port}", named
    ):
        return None
    parts = urlsplit(text if "://" in text else f"http://{text}")
    if parts.scheme != "http" or not parts.hostname:
        raise ValueError(
            f"{url.scheme}_proxy must be http://host:port: other kinds of proxies are not supported"
        )
    credentials: tuple[tuple[str, str], ...] = ()
    if parts.username is not None:
        user = f"{unquote(parts.username)}:{unquote(parts.password or '')}".encode()
        credentials = (("Proxy-Authorization", f"Basic {base64.b64encode(user).decode()}"),)
    return Proxy(host_name(parts.hostname), parts.port or 80, credentials)


async def open_tunnel(
    url: ImageUrl, proxy: Proxy, reader: asyncio.StreamReader, writer: asyncio.StreamWriter
) -> None:
    """Ask a proxy for a connection to the host of a URL. Raises `OSError` if it refuses."""
    host = f"[{url.host}]" if ":" in url.host else url.host
    http, authority = h11.Connection(h11.CLIENT), f"{host}:{url.port}"
    headers = [("Host", authority), *proxy.credentials]
    writer.write(http.send(h11.Request(method="CONNECT", target=authority, headers=headers)) or b"")
    http.send(h11.EndOfMessage())
    while not isinstance(event := http.next_event(), h11.Response):
        if event is h11.NEED_DATA:
            http.receive_data(await reader.read(1 << 16))
    if not 200 <= event.status_code < 300:
        raise OSError(f"the proxy answered {event.status_code}")
