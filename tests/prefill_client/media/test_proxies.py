"""Downloads through the proxies of the environment, where the operator allows it."""

import asyncio
import ssl
from collections.abc import AsyncIterator
from contextlib import suppress

import pytest
import trustme

from encoder_contract.errors import ForbiddenError
from prefill_client.media.destinations import Destinations, ImageUrl
from prefill_client.media.download import ImageHostError
from prefill_client.media.image_loader import ImageLoader
from prefill_client.media.proxy import Proxy, proxy_for
from tests.image_host import BODY, image_host

NAMES = [f"{kind}_proxy" for kind in ("http", "https", "no", "all")]


@pytest.fixture(autouse=True)
def environment(monkeypatch: pytest.MonkeyPatch) -> pytest.MonkeyPatch:
    for name in NAMES:
        monkeypatch.delenv(name, raising=False)
        monkeypatch.delenv(name.upper(), raising=False)
    return monkeypatch


class Tunnels:
    """A proxy that connects every CONNECT to one host, and answers every other request with the body."""

    def __init__(self, upstream: int) -> None:
        self.heads: list[bytes] = []
        self.status = b"200 Connection established"
        self._upstream = upstream

    async def answer(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.heads.append(head := await reader.readuntil(b"\r\n\r\n"))
        if not head.startswith(b"CONNECT"):
            writer.write(b"HTTP/1.1 200 OK\r\nContent-Length: %d\r\n\r\n" % len(BODY) + BODY)
            writer.close()
            return
        writer.write(b"HTTP/1.1 %s\r\n\r\n" % self.status)
        inside, outside = await asyncio.open_connection("127.0.0.1", self._upstream)
        await asyncio.gather(_pipe(reader, outside), _pipe(inside, writer))


async def _pipe(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    with suppress(OSError):
        while data := await reader.read(1 << 16):
            writer.write(data)
    writer.close()


@pytest.fixture
async def secure() -> AsyncIterator[tuple[Tunnels, int, ssl.SSLContext]]:
    """A host with TLS behind a proxy: the proxy, its port, and what trusts the host's certificate."""
    authority = trustme.CA()
    context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
    authority.issue_cert("photos.example").configure_cert(context)
    trusting = ssl.create_default_context()
    authority.configure_trust(trusting)
    async with image_host(tls=context) as host:
        proxy = Tunnels(host.port)
        async with await asyncio.start_server(proxy.answer, "127.0.0.1", 0) as listening:
            yield proxy, listening.sockets[0].getsockname()[1], trusting


def loader(*rules: str, tls: ssl.SSLContext | None = None) -> ImageLoader:
    return ImageLoader(Destinations(rules), max_bytes=1 << 20, timeout_s=30, tls=tls)


async def test_http_goes_through_the_proxy_with_its_credentials(
    secure: tuple[Tunnels, int, ssl.SSLContext], environment: pytest.MonkeyPatch
) -> None:
    """The name has no address here: the proxy resolves it."""
    proxy, port, _ = secure
    environment.setenv("http_proxy", f"http://me:p%40ss@127.0.0.1:{port}")
    assert await loader("proxy", "photos.example").load("http://photos.example/a?b=1") == BODY
    (head,) = proxy.heads
    assert head.startswith(b"GET http://photos.example/a?b=1 HTTP/1.1\r\nHost: photos.example\r\n")
    assert b"Proxy-Authorization: Basic bWU6cEBzcw==\r\n" in head


async def test_https_goes_through_a_tunnel_and_the_hosts_certificate_is_checked(
    secure: tuple[Tunnels, int, ssl.SSLContext], environment: pytest.MonkeyPatch
) -> None:
    proxy, port, trusting = secure
    environment.setenv("HTTPS_PROXY", f"http://127.0.0.1:{port}")
    assert await loader("proxy", "photos.example", tls=trusting).load("https://photos.example/a") == BODY
    assert proxy.heads[0].startswith(b"CONNECT photos.example:443 HTTP/1.1\r\nHost: photos.example:443\r\n")
    with pytest.raises(ImageHostError, match="certificate"):
        await loader("proxy", "photos.example").load("https://photos.example/a")
    proxy.status = b"407 Proxy Authentication Required"
    with pytest.raises(ImageHostError, match="the proxy answered 407"):
        await loader("proxy", "photos.example", tls=trusting).load("https://photos.example/a")


async def test_hosts_that_are_not_allowed_do_not_reach_the_proxy(
    secure: tuple[Tunnels, int, ssl.SSLContext], environment: pytest.MonkeyPatch
) -> None:
    proxy, port, _ = secure
    environment.setenv("http_proxy", f"http://127.0.0.1:{port}")
    for host in ("other.example", "169.254.169.254", "[::1]", "10.0.0.1"):
        with pytest.raises(ForbiddenError):
            await loader("proxy", "photos.example" if "other" in host else "public").load(f"http://{host}/")
    assert proxy.heads == []


def test_the_environment_names_the_proxy(environment: pytest.MonkeyPatch) -> None:
    url = ImageUrl.parse("https://photos.example/a")
    assert proxy_for(url) is None
    environment.setenv("all_proxy", "cache.example:3128")
    assert proxy_for(url) == Proxy("cache.example", 3128)
    environment.setenv("no_proxy", "localhost,.example")
    assert proxy_for(url) is None
    environment.setenv("no_proxy", "")
    environment.setenv("https_proxy", "socks5://cache.example")
    with pytest.raises(ValueError, match="must be http://host:port"):
        proxy_for(url)
