"""Image URLs of chat requests: what is loaded, from where, and within what bounds."""

import asyncio
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest

from encoder_contract.errors import ForbiddenError, ImageLimitError, InvalidImageError, UnavailableError
from prefill_client import EncoderClient
from prefill_client.reference.http_service import Limits
from prefill_client.reference.image_urls import ImageUrls
from testing.photos import data_url, photo
from tests.dripping_host import HEAD, dripping_host
from tests.prefill_client.reference.test_http_service import serving, user

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
            for _ in range(30):
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


async def test_http_images_come_only_from_allowed_hosts_and_within_bounds(album: str) -> None:
    urls = ImageUrls([album], max_bytes=1 << 20, timeout_s=0.5)
    assert await urls.load(f"http://{album}/photo") == FIRST
    refusals = {
        f"http://{album.replace('127.0.0.1', 'localhost')}/photo": ForbiddenError,
        f"http://{album}@evil.example/photo": ForbiddenError,
        f"http://{album}/elsewhere": InvalidImageError,
        f"http://{album}/missing": InvalidImageError,
        f"http://{album}/huge": ImageLimitError,
        f"http://{album}/slow": UnavailableError,
    }
    for url, error in refusals.items():
        with pytest.raises(error):
            await urls.load(url)


# What a bad host sends, and how fast; a header's lines and a body that grow without an end.
DRIPPING = {
    "nothing": [],
    "headers": [b"HTTP/1.1 200 OK\r\nX-More: ", *[b"1"] * 10_000],
    "endless headers": [b"HTTP/1.1 200 OK\r\n", *[b"X-More: 1\r\n"] * 10_000],
    "body": [HEAD, *[b"x"] * 10_000],
    "interim answers": [b"HTTP/1.1 100 Continue\r\n\r\n"] * 10_000,
}


@pytest.mark.parametrize("what", DRIPPING)
async def test_a_host_that_drips_has_its_time_for_everything_together(what: str) -> None:
    with dripping_host(DRIPPING[what]) as host:
        urls = ImageUrls([host], max_bytes=1 << 20, timeout_s=0.5)
        with pytest.raises(UnavailableError):
            async with asyncio.timeout(20):
                await urls.load(f"http://{host}/")


async def test_threads_of_the_process_wait_for_no_host_and_good_hosts_for_no_bad_one(album: str) -> None:
    with dripping_host(DRIPPING["headers"]) as host:
        urls = ImageUrls([host, album], max_bytes=1 << 20, timeout_s=30)
        slow = [asyncio.create_task(urls.load(f"http://{host}/{n}")) for n in range(100)]
        await asyncio.sleep(0.2)
        async with asyncio.timeout(20):
            assert await urls.load(data_url(FIRST)) == FIRST
            assert await urls.load(f"http://{album}/photo") == FIRST
        assert not any(task.done() for task in slow)
        for task in slow:
            task.cancel()
        await asyncio.gather(*slow, return_exceptions=True)


async def test_text_is_answered_while_image_hosts_drip(client: EncoderClient, checkpoint: Path) -> None:
    with dripping_host([HEAD, *[b"x"] * 10_000]) as host:
        urls = ImageUrls([host], max_bytes=1 << 20, timeout_s=60)
        async with serving(client, checkpoint, Limits(), urls=urls) as service:
            slow = [
                asyncio.create_task(service.ask(user("And this?", f"http://{host}/{n}"))) for n in range(40)
            ]
            await asyncio.sleep(
                1
            )  # they wait for their images by now; a machine where they don't proves less
            assert (await service.ask(user("Hello?"))).usage.completion_tokens > 0
            assert not any(task.done() for task in slow)
            for task in slow:
                task.cancel()
            await asyncio.gather(*slow, return_exceptions=True)


async def test_a_url_that_is_none_is_the_callers_fault(album: str) -> None:
    urls = ImageUrls([album, "127.0.0.1:http"], max_bytes=1 << 20, timeout_s=20)
    for url in (f"http://{album}/a b", "http://127.0.0.1:http/", "http://[/", f"ftp://{album}/photo"):
        with pytest.raises(InvalidImageError):
            await urls.load(url)


async def test_data_url_over_the_limit_is_refused_before_it_is_decoded() -> None:
    urls = ImageUrls([], max_bytes=1000, timeout_s=1)
    assert await urls.load(data_url(bytes(1000))) == bytes(1000)
    with pytest.raises(ImageLimitError, match="1000 bytes"):
        await urls.load(data_url(bytes(1010)))
