"""Attacks by URL: no URL, resolver or redirect leads to a connection to an internal address."""

import asyncio
import ipaddress
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import pytest

from encoder_contract.errors import ForbiddenError, InvalidImageError
from prefill_client.media.destinations import Destinations, ImageUrl, is_public
from prefill_client.media.download import Resolver
from prefill_client.media.image_loader import ImageLoader
from tests.image_host import BODY, Host, image_host

pytestmark = pytest.mark.slow


class Inside:
    """An internal service on loopback, IPv4 and IPv6, that counts its connections."""

    def __init__(self) -> None:
        self.reached: list[str] = []
        self.port = 0

    @asynccontextmanager
    async def listening(self) -> AsyncIterator["Inside"]:
        async def note(_: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            self.reached.append(str(writer.get_extra_info("sockname")))
            writer.write(b"HTTP/1.1 200 OK\r\nContent-Length: 6\r\n\r\nsecret")
            writer.close()

        async with await asyncio.start_server(note, "0.0.0.0", 0) as server:
            self.port = server.sockets[0].getsockname()[1]
            yield self


@pytest.fixture
async def inside() -> AsyncIterator[Inside]:
    async with Inside().listening() as service:
        yield service


# Ways to write an inside address, or a name that has one. {port} is the inside service's.
WRITTEN = [
    "http://127.0.0.1:{port}/", "http://localhost:{port}/", "http://LOCALHOST:{port}/",
    "http://localhost.:{port}/", "http://127.1:{port}/", "http://127.0.1:{port}/",
    "http://2130706433:{port}/", "http://0x7f000001:{port}/", "http://0x7f.0.0.1:{port}/",
    "http://0177.0.0.1:{port}/", "http://017700000001:{port}/", "http://0:{port}/",
    "http://0.0.0.0:{port}/", "http://127.127.127.127:{port}/", "http://127.0.0.1.:{port}/",
    "http://[::1]:{port}/", "http://[::]:{port}/", "http://[0:0:0:0:0:0:0:1]:{port}/",
    "http://[::127.0.0.1]:{port}/", "http://[::ffff:127.0.0.1]:{port}/", "http://[::ffff:7f00:1]:{port}/",
    "http://[0:0:0:0:0:ffff:7f00:1]:{port}/", "http://[64:ff9b::7f00:1]:{port}/",
    "http://[64:ff9b:1::7f00:1]:{port}/", "http://[2002:7f00:1::]:{port}/", "http://[fe80::1%25lo]:{port}/",
    "http://[::1%25lo]:{port}/", "http://[::1%lo]:{port}/", "http://①②⑦.⓪.⓪.①:{port}/",
    "http://127。0。0。1:{port}/", "http://ⓛocalhost:{port}/", "http://%31%32%37.0.0.1:{port}/",
    "http://127.0.0.1%2e:{port}/", "http://127.0.0.1%00.example.org:{port}/",
    "http://allowed.example@127.0.0.1:{port}/", "http://127.0.0.1:{port}@allowed.example/",
    "http://allowed.example:80@127.0.0.1:{port}/", "http://allowed.example%40127.0.0.1:{port}/",
    "http://allowed.example\\@127.0.0.1:{port}/", "http://127.0.0.1:{port}\\@allowed.example/",
    "http:///127.0.0.1:{port}/", "http:127.0.0.1:{port}/", "//127.0.0.1:{port}/",
    "http:\\\\127.0.0.1:{port}/", "http://127.0.0.1:{port}#@allowed.example/",
    "http://127.0.0.1:{port}?@allowed.example/", "http://allowed.example#@127.0.0.1:{port}/",
    "ht\ntp://127.0.0.1:{port}/", "http://127.0.0\t.1:{port}/", " http://127.0.0.1:{port}/",
    "http://127.0.0.1 :{port}/", "http://127.0.0.1:{port}/\r\nHost: allowed.example", "file:///etc/passwd",
    "gopher://127.0.0.1:{port}/_", "ftp://127.0.0.1:{port}/", "unix:///run/inside.sock",
    "http://169.254.169.254/latest/meta-data/", "http://[fd00:ec2::254]/", "http://100.100.100.200/",
    "http://168.63.129.16/", "http://10.0.0.1/", "http://192.168.0.1/", "http://172.16.0.1/",
    "http://[fec0::1]/", "http://255.255.255.255/", "http://224.0.0.1/", "http://[ff02::1]/",
    "http://localhost:0/", "http://:{port}/",
]  # fmt: skip


@pytest.mark.attack("a URL of an internal address, in any notation")
@pytest.mark.parametrize("written", WRITTEN)
async def test_an_internal_address_is_refused_in_every_notation(written: str, inside: Inside) -> None:
    """Even rules that allow every host do not help: `public`, or any port of the internal host."""
    url = written.format(port=inside.port)
    lookups: list[str] = []
    resolver = Resolver()

    async def resolve(host: str, port: int) -> list[str]:
        lookups.append(host)
        if host == "allowed.example":
            raise OSError("no such host")  # what is read as this host goes nowhere
        return await resolver.addresses(host, port)

    for rules in (["public"], ["*.example", "localhost", f"localhost:{inside.port}", f"127.1:{inside.port}"]):
        loader = ImageLoader(Destinations(rules), max_bytes=1 << 20, timeout_s=20, resolve=resolve)
        with pytest.raises(Exception) as caught:
            await loader.load(url)
        refused = isinstance(caught.value, ForbiddenError | InvalidImageError)
        assert refused or lookups[-1:] == ["allowed.example"], caught.value
    assert inside.reached == []


@pytest.mark.attack("an international name that two standards read as two hosts")
@pytest.mark.parametrize(
    ("written", "name"),
    [
        ("faß.de", "xn--fa-hia.de"),
        ("FAẞ.de", "xn--fa-hia.de"),
        ("xn--fa-hia.de.", "xn--fa-hia.de"),
        ("i❤.ws", "xn--i-7iq.ws"),
        ("Bücher.example", "xn--bcher-kva.example"),
        ("例え。テスト", "xn--r8jz45g.xn--zckzah"),
        ("a_b.example", "a_b.example"),
    ],
)
def test_an_international_name_is_the_one_of_browsers(written: str, name: str) -> None:
    """Those of IDNA 2003 belong to others: `faß.de` and `fass.de` are two hosts."""
    assert ImageUrl.parse(f"http://{written}/a.jpg").host == name
    rules = Destinations([written])
    rules.check(ImageUrl.parse(f"http://{name}/a.jpg"))
    with pytest.raises(ForbiddenError):
        rules.check(ImageUrl.parse("http://fass.de/a.jpg"))


@pytest.mark.parametrize(
    "name",
    [
        "",
        ".",
        "a..b",
        ".a",
        "a!b",
        "a／b",
        "％41.com",
        "＠a",
        *("a" * 64, "ü" * 60, "a." * 127 + "a", "ü" * 9000),
    ],
)
def test_a_text_that_names_no_host_is_refused(name: str) -> None:
    with pytest.raises(InvalidImageError):
        ImageUrl.parse(f"http://{name}/a.jpg")
    with pytest.raises(ValueError):
        Destinations([name])


@pytest.mark.parametrize("zone", ["lo", "25lo", "25a;b"])
def test_a_zone_is_refused_at_a_public_address(zone: str) -> None:
    assert ImageUrl.parse("http://[2606:4700::1111]/a.jpg")
    with pytest.raises(InvalidImageError):
        ImageUrl.parse(f"http://[2606:4700::1111%{zone}]/a.jpg")


# Addresses that a resolver may return for a name.
INSIDE_ADDRESSES = [
    "127.0.0.1", "127.255.255.254", "0.0.0.0", "10.1.2.3", "172.31.255.255", "192.168.1.1",
    "169.254.169.254", "100.64.0.1", "192.0.0.192", "198.18.0.1", "224.0.0.251", "240.0.0.1",
    "255.255.255.255", "168.63.129.16", "::", "::1", "::127.0.0.1", "::ffff:127.0.0.1", "::ffff:10.0.0.1",
    "::ffff:0:127.0.0.1", "fe80::1", "fe80::1%lo", "fc00::1", "fd00:ec2::254", "fec0::1", "ff02::1",
    "64:ff9b::7f00:1", "64:ff9b:1::a00:1", "2001::1", "2002:7f00:1::", "2001:db8::1", "100::1",
]  # fmt: skip


@pytest.mark.parametrize("address", INSIDE_ADDRESSES)
async def test_a_name_with_an_internal_address_is_refused(address: str) -> None:
    async def resolve(_host: str, _port: int) -> list[str]:
        return [address]

    for rules in (["public"], ["rebinds.example"]):
        loader = ImageLoader(Destinations(rules), max_bytes=1 << 20, timeout_s=20, resolve=resolve)
        with pytest.raises(ForbiddenError):
            await loader.load("http://rebinds.example/a.jpg")


@pytest.mark.parametrize(
    "address", ["8.8.8.8", "93.184.215.14", "2606:4700::6810:85e5", "2a00:1450:4001::200e"]
)
def test_hosts_of_the_internet_are_public(address: str) -> None:
    assert is_public(ipaddress.ip_address(address))


@pytest.fixture
async def outside() -> AsyncIterator[Host]:
    """An allowed host, at an address that the rules name; the internal service has other addresses."""
    async with image_host("127.0.0.2") as host:
        yield host


REDIRECTS = [
    "http://127.0.0.1:{port}/", "//127.0.0.1:{port}/", "http://localhost:{port}/",
    "http://[::ffff:127.0.0.1]:{port}/", "http://2130706433:{port}/", "http://127.0.0.3:{port}/",
    "http://{outside}@127.0.0.1:{port}/", "file:///etc/passwd", "http://169.254.169.254/",
    "ftp://{outside}/photo", "http://[", "http://{outside}\\@127.0.0.1:{port}/",
    "http://127.0.0.1:{port}\\@{outside}/", "\\\\127.0.0.1:{port}\\", "http:\\\\127.0.0.1:{port}\\",
    "http://0.0.0.0:{port}/",
]  # fmt: skip


@pytest.mark.attack("a redirect to an internal address")
@pytest.mark.parametrize("status", [301, 302, 303, 307, 308])
@pytest.mark.parametrize("location", REDIRECTS)
async def test_a_redirect_is_checked_as_a_url_is(
    status: int, location: str, inside: Inside, outside: Host
) -> None:
    outside.moved_status, outside.status = f"{status} Moved", "404 Not Found"
    outside.moved["/moved"] = location.format(port=inside.port, outside=outside.name)
    loader = ImageLoader(Destinations([outside.name, "public"]), max_bytes=1 << 20, timeout_s=20)
    with pytest.raises((ForbiddenError, InvalidImageError)):
        await loader.load(f"http://{outside.name}/moved")
    assert outside.requests
    assert inside.reached == []


@pytest.mark.attack("a name that resolves to another address the second time")
async def test_dns_rebinding_reaches_no_internal_address(inside: Inside, outside: Host) -> None:
    """Each request resolves the name again, and connects only to the addresses that were checked."""
    host, port, outside.headers = "127.0.0.2", outside.port, "Cache-Control: no-store"
    answers = [[host], ["127.0.0.1"], [host, "127.0.0.1"], ["127.0.0.1", host]]
    remaining = iter(answers)

    async def resolve(_host: str, _port: int) -> list[str]:
        return next(remaining)

    rules = [f"rebinds.example:{port}", "127.0.0.2/32"]
    loader = ImageLoader(Destinations(rules), max_bytes=1 << 20, timeout_s=20, resolve=resolve)
    for answer in answers:
        try:
            assert await loader.load(f"http://rebinds.example:{port}/photo") == BODY
        except ForbiddenError:
            assert host not in answer
    assert next(remaining, None) is None, "each load resolves the name once"
    assert inside.reached == []


async def test_proxies_and_credentials_of_the_environment_are_ignored(
    inside: Inside, outside: Host, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("http_proxy", "HTTP_PROXY", "all_proxy", "ALL_PROXY"):
        monkeypatch.setenv(name, f"http://127.0.0.1:{inside.port}")
    assert await outside.loader().load(f"http://{outside.name}/photo") == BODY
    assert inside.reached == []
