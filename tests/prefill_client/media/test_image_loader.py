"""Image URLs: allowed hosts, limits and errors."""

import asyncio
import threading
from collections.abc import Iterator
from contextlib import suppress
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest

from encoder_contract.errors import ForbiddenError, ImageLimitError, InvalidImageError
from prefill_client import EncoderClient, __version__
from prefill_client.media.destinations import Destinations
from prefill_client.media.download import ImageHostError
from prefill_client.media.image_loader import ImageLoader
from prefill_reference.http_service import Limits
from testing.photos import data_url, photo
from tests.dripping_host import HEAD, dripping_host
from tests.image_host import image_host
from tests.prefill_reference.test_http_service import serving, user
from tests.waiting import PATIENCE_S

FIRST = photo(300, 220, 1)


class Album(BaseHTTPRequestHandler):
    """A host with one image, one that redirects, one that is huge, one that never ends."""

    server: ThreadingHTTPServer

    def do_GET(self) -> None:
        if self.path == "/elsewhere":
            self.send_response(302)
            self.send_header("Location", f"http://localhost:{self.server.server_port}/photo")
            self.end_headers()
            return
        self.send_response(200 if self.path != "/missing" else 404)
        self.end_headers()
        if self.path == "/photo":
            self.wfile.write(FIRST)
        elif self.path == "/huge":
            self.wfile.write(bytes(3 << 20))
        elif self.path == "/slow":
            with suppress(ConnectionError):  # the client has closed the connection
                while True:
                    self.wfile.write(b"x")
                    threading.Event().wait(0.1)

    def log_message(self, *_: object) -> None:
        pass


@pytest.fixture
def album() -> Iterator[str]:
    server = ThreadingHTTPServer(("127.0.0.1", 0), Album)
    server.daemon_threads = True
    threading.Thread(target=server.serve_forever, daemon=True).start()
    yield f"127.0.0.1:{server.server_port}"
    server.shutdown()
    server.server_close()


async def test_only_allowed_hosts_and_sizes_are_loaded(album: str) -> None:
    loader = ImageLoader(Destinations([album]), max_bytes=1 << 20, timeout_s=PATIENCE_S)
    assert await loader.load(f"http://{album}/photo") == FIRST
    refusals = {
        f"http://{album.replace('127.0.0.1', 'localhost')}/photo": ForbiddenError,
        f"http://{album}@evil.example/photo": ForbiddenError,
        f"http://{album}/elsewhere": ForbiddenError,
        f"http://{album}/missing": InvalidImageError,
        f"http://{album}/huge": ImageLimitError,
    }
    for url, error in refusals.items():
        with pytest.raises(error):
            await loader.load(url)
    hasty = ImageLoader(Destinations([album]), max_bytes=1 << 20, timeout_s=0.5)
    with pytest.raises(ImageHostError):
        await hasty.load(f"http://{album}/slow")


async def test_a_host_rule_allows_every_port_and_public_only_the_usual_ones(
    album: str,
) -> None:
    for rules, allowed in (
        (["127.0.0.1"], True),
        (["127.0.0.1:1"], False),
        (["public", "127.0.0.0/8"], False),
    ):
        loader = ImageLoader(Destinations(rules), max_bytes=1 << 20, timeout_s=PATIENCE_S)
        if allowed:
            assert await loader.load(f"http://{album}/photo") == FIRST
        else:
            with pytest.raises(ForbiddenError):
                await loader.load(f"http://{album}/photo")


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


async def test_slow_hosts_block_no_threads_and_no_other_hosts(album: str) -> None:
    with dripping_host(DRIPPING["headers"]) as host:
        loader = ImageLoader(Destinations([host, album]), max_bytes=1 << 20, timeout_s=4 * PATIENCE_S)
        slow = [asyncio.create_task(loader.load(f"http://{host}/{n}")) for n in range(100)]
        await asyncio.sleep(0.2)
        async with asyncio.timeout(PATIENCE_S):
            assert await loader.load(data_url(FIRST)) == FIRST
            assert await loader.load(f"http://{album}/photo") == FIRST
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


async def test_an_invalid_url_is_the_callers_error(album: str) -> None:
    loader = ImageLoader(Destinations([album]), max_bytes=1 << 20, timeout_s=20)
    for url in (f"http://{album}/a b", "http://127.0.0.1:http/", "http://[/", f"ftp://{album}/photo"):
        with pytest.raises(InvalidImageError):
            await loader.load(url)


async def test_data_url_over_the_limit_is_refused_before_it_is_decoded() -> None:
    loader = ImageLoader(Destinations([]), max_bytes=1000, timeout_s=1)
    assert await loader.load(data_url(bytes(1000))) == bytes(1000)
    with pytest.raises(ImageLimitError, match="1000 bytes"):
        await loader.load(data_url(bytes(1010)))
