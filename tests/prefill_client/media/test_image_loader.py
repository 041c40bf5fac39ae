"""Image URLs: allowed hosts, limits and errors."""

import asyncio
import base64
import logging
import socket
import ssl
import threading
from collections.abc import Coroutine, Iterator
from contextlib import ExitStack, contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from encoder_contract.errors import ForbiddenError, ImageLimitError, InvalidImageError, OverloadedError
from prefill_client import EncoderClient, __version__
from prefill_client.media.destinations import Destinations
from prefill_client.media.download import ImageHostError
from prefill_client.media.image_loader import MAX_REDIRECTS, ImageLoader
from prefill_client.plugin.service import WatchedClient
from prefill_reference.http_service import Limits
from testing.photos import data_url, photo
from tests.image_host import BODY, image_host
from tests.prefill_reference.test_http_service import serving, user
from tests.raw_hosts import HEAD, dripping_host
from tests.waiting import PATIENCE_S, within_some_limit

FIRST = photo(300, 220, 1)


async def test_only_images_of_allowed_hosts_are_loaded() -> None:
    async with image_host() as host:
        loader, elsewhere = host.loader(), host.name.replace("127.0.0.1", "localhost")
        host.moved["/elsewhere"] = f"http://{elsewhere}/photo"
        assert await loader.load(f"http://{host.name}/photo") == BODY
        for written in (f"{elsewhere}/photo", f"{host.name}@evil.example/photo", f"{host.name}/elsewhere"):
            with pytest.raises(ForbiddenError):
                await loader.load(f"http://{written}")
        host.status = "404 Not Found"
        with pytest.raises(InvalidImageError):
            await loader.load(f"http://{host.name}/missing")


async def test_a_host_rule_allows_every_port_and_public_only_the_usual_ones() -> None:
    async with image_host() as host:
        url = f"http://{host.name}/photo"
        loader = ImageLoader(Destinations(["127.0.0.1"]), max_bytes=1 << 20, timeout_s=PATIENCE_S)
        assert await loader.load(url) == BODY
        for rules in (["127.0.0.1:1"], ["public", "127.0.0.0/8"]):
            with pytest.raises(ForbiddenError):
                await ImageLoader(Destinations(rules), max_bytes=1 << 20, timeout_s=PATIENCE_S).load(url)


# What hosts of images send for files that are not compressed: Amazon S3, Azure, and scripts that upload to them.
@pytest.mark.parametrize("encoding", ["aws-chunked", "", "utf-8", "binary", "none", "identity", "UTF-8"])
async def test_a_content_encoding_that_is_no_compression_is_ignored(encoding: str) -> None:
    async with image_host() as host:
        host.headers = f"Content-Encoding: {encoding}"
        assert await host.loader().load(f"http://{host.name}/a") == BODY


@pytest.mark.parametrize("status", ["201 Created", "203 Non-Authoritative", "206 Partial Content"])
async def test_other_successes_are_images_too(status: str) -> None:
    async with image_host() as host:
        host.status = status
        assert await host.loader().load(f"http://{host.name}/a") == BODY


@pytest.mark.parametrize(
    "location", ["/a b.png", " /a b.png ", "/é.png", "/%C3%A9.png", "b#part", "\\b", "/50%.png"]
)
async def test_a_redirect_may_have_characters_that_a_url_has_not(location: str) -> None:
    async with image_host() as host:
        host.moved["/a"] = location
        assert await host.loader().load(f"http://{host.name}/a") == BODY
        target = host.requests[-1].split()[1].decode()
        expected = {"/a b.png": "/a%20b.png", "b#part": "/b", "\\b": "/%5Cb", "/50%.png": "/50%25.png"}
        assert target == expected.get(location.strip(), "/%C3%A9.png")


@pytest.mark.parametrize(
    ("path", "target"),
    [("/50%.png", "/50%25.png"), ("/%zz?%", "/%25zz?%25"), ("/%5a%2", "/%5a%252"), ("/%25", "/%25")],
)
async def test_a_percent_sign_that_begins_no_escape_is_escaped(path: str, target: str) -> None:
    async with image_host() as host:
        assert await host.loader().load(f"http://{host.name}{path}") == BODY
        assert host.requests[0].split()[1].decode() == target


@pytest.mark.parametrize("what", ["image", "video"])
async def test_a_host_is_asked_for_any_type(what: str) -> None:
    """Some hosts answer 406 if they know a file by another type than the request names."""
    async with image_host() as host:
        await host.loader(what=what).load(f"http://{host.name}/a")
        assert b"\r\nAccept: */*\r\n" in host.requests[0]


@pytest.mark.parametrize("before", [b"", b"\r\n", b"\n\r\n", b"HTTP/1.1 103 Early Hints\r\n\r\n\r\n"])
@pytest.mark.parametrize(
    "headers",
    [
        "X: 1",
        "Transfer-Encoding: identity",
        "transfer-encoding:IDENTITY ",
        "\r\n".join(["X: " + "1" * 4000] * 30),
    ],
    ids=["usual", "identity", "IDENTITY", "120 KB"],
)
async def test_odd_heads_that_other_clients_accept_are_accepted(before: bytes, headers: str) -> None:
    async with image_host() as host:
        host.before, host.headers = before, headers
        assert await host.loader().load(f"http://{host.name}/a") == BODY


async def test_ten_redirects_are_followed_and_no_more() -> None:
    async with image_host() as host:
        host.moved |= {f"/{n}": f"/{n - 1}" for n in range(1, MAX_REDIRECTS + 2)}
        loader = host.loader()
        assert MAX_REDIRECTS == 10
        assert await loader.load(f"http://{host.name}/10") == BODY
        with pytest.raises(ImageHostError, match="more than 10 redirects"):
            await loader.load(f"http://{host.name}/11")


@contextmanager
def dead_address(port: int) -> Iterator[str]:
    """An address at which connections are never accepted nor refused: its queue is full."""
    with ExitStack() as stack:
        dead = stack.enter_context(socket.socket())
        dead.bind(("127.0.0.2", port))
        dead.listen(0)
        for _ in range(4):
            waiting = stack.enter_context(socket.socket())
            waiting.setblocking(False)
            waiting.connect_ex(("127.0.0.2", port))
        yield "127.0.0.2"


async def test_a_dead_first_address_delays_an_image_by_a_part_of_a_second() -> None:
    async with image_host() as host:
        with dead_address(host.port) as dead:

            def loading(*addresses: str, limit_s: float) -> Coroutine[Any, Any, bytes]:
                async def resolve(_host: str, _port: int) -> list[str]:
                    return [*addresses]

                rules = Destinations(["two.example", "127.0.0.0/8"])
                loader = ImageLoader(rules, max_bytes=1 << 20, timeout_s=limit_s, resolve=resolve)
                return loader.load(f"http://two.example:{host.port}/a")

            async def loaded(limit_s: float) -> bool:
                try:
                    return await loading(dead, "127.0.0.1", limit_s=limit_s) == BODY
                except ImageHostError:
                    return False

            with pytest.raises(ImageHostError, match=r"took more than 0\.2 s"):
                await loading(dead, limit_s=0.2)
            await within_some_limit(loaded)


async def test_base64_without_its_prefix_is_named() -> None:
    loader = ImageLoader(Destinations([]), max_bytes=1 << 20, timeout_s=1)
    for file in (FIRST, bytes(10_000)):
        with pytest.raises(InvalidImageError, match=r"send data:image/\.\.\.;base64, and then the base64"):
            await loader.load(base64.b64encode(file).decode())


async def test_requests_carry_a_user_agent() -> None:
    async with image_host() as host:
        await host.loader().load(f"http://{host.name}/a")
        assert f"User-Agent: encoder-service/{__version__}\r\n".encode() in host.requests[0]


# What a bad host sends, and how fast; a header's lines and a body that grow without an end.
DRIPPING = {
    "nothing": [],
    "headers": [b"HTTP/1.1 200 OK\r\nX-More: ", *[b"1"] * 10_000],
    "endless headers": [b"HTTP/1.1 200 OK\r\n", *[b"X-More: 1\r\n"] * 10_000],
    "body": [HEAD, *[b"x"] * 10_000],
    "interim answers": [b"HTTP/1.1 100 Continue\r\n\r\n"] * 10_000,
}


@pytest.mark.parametrize("what", DRIPPING)
async def test_a_slow_host_is_bounded_by_one_time_limit(what: str) -> None:
    with dripping_host(DRIPPING[what]) as host:
        loader = ImageLoader(Destinations([host]), max_bytes=1 << 20, timeout_s=0.5)
        with pytest.raises(ImageHostError):
            async with asyncio.timeout(PATIENCE_S):
                await loader.load(f"http://{host}/")


async def test_slow_hosts_block_no_threads_and_no_other_hosts() -> None:
    async with image_host() as quick:
        with dripping_host(DRIPPING["headers"]) as host:
            rules = Destinations([host, quick.name])
            loader = ImageLoader(rules, max_bytes=1 << 20, timeout_s=4 * PATIENCE_S)
            slow = [asyncio.create_task(loader.load(f"http://{host}/{n}")) for n in range(100)]
            await asyncio.sleep(0.2)
            async with asyncio.timeout(PATIENCE_S):
                assert await loader.load(data_url(FIRST)) == FIRST
                assert await loader.load(f"http://{quick.name}/photo") == BODY
            assert not any(task.done() for task in slow)
            for task in slow:
                task.cancel()
            await asyncio.gather(*slow, return_exceptions=True)


async def test_text_is_answered_while_image_hosts_drip(client: EncoderClient, checkpoint: Path) -> None:
    with dripping_host([HEAD, *[b"x"] * 10_000]) as host:
        loader = ImageLoader(Destinations([host]), max_bytes=1 << 20, timeout_s=4 * PATIENCE_S)
        async with serving(client, checkpoint, Limits(), loader=loader) as service:
            slow = [
                asyncio.create_task(service.ask(user("And this?", f"http://{host}/{n}"))) for n in range(40)
            ]
            # They wait for their images by now; a machine where they don't proves less.
            await asyncio.sleep(1)
            assert (await service.ask(user("Hello?"))).usage.completion_tokens > 0
            assert not any(task.done() for task in slow)
            for task in slow:
                task.cancel()
            await asyncio.gather(*slow, return_exceptions=True)


async def test_too_many_downloads_of_others_do_not_mean_that_the_service_is_down() -> None:
    """An engine would leave the images of all requests to its own tower."""
    loader = ImageLoader(Destinations(["127.0.0.1"]), max_bytes=1 << 20, timeout_s=0.1)
    for number in range(loader._slots.size):
        loader._slots.take_now(f"host {number}")
    with pytest.raises(OverloadedError, match="64 other images") as full:
        await loader.load("http://127.0.0.1/a")
    watched = WatchedClient(partial(EncoderClient.connect, "unused"), logging.getLogger(__name__))
    watched.note(full.value)
    assert watched.down is None


async def test_the_tls_context_is_made_once_and_not_on_the_event_loop(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    makers: list[int] = []
    create = ssl.create_default_context

    def noted() -> ssl.SSLContext:
        makers.append(threading.get_ident())
        return create()

    monkeypatch.setattr(ssl, "create_default_context", noted)
    async with image_host() as host:
        loader = host.loader()
        assert await loader.load(data_url(FIRST)) == FIRST
        assert makers == []
        urls = [f"http://{host.name}/{n}" for n in range(8)]
        assert await loader.load_all(urls) == [BODY] * len(urls)
    assert len(makers) == 1
    assert makers != [threading.get_ident()]


async def test_an_invalid_url_is_the_callers_error() -> None:
    loader = ImageLoader(Destinations(["127.0.0.1"]), max_bytes=1 << 20, timeout_s=20)
    for url in ("http://127.0.0.1/a b", "http://127.0.0.1:http/", "http://[/", "ftp://127.0.0.1/photo"):
        with pytest.raises(InvalidImageError):
            await loader.load(url)


async def test_data_url_over_the_limit_is_refused_before_it_is_decoded() -> None:
    loader = ImageLoader(Destinations([]), max_bytes=1000, timeout_s=1)
    assert await loader.load(data_url(bytes(1000))) == bytes(1000)
    with pytest.raises(ImageLimitError, match="1000 bytes"):
        await loader.load(data_url(bytes(1010)))
