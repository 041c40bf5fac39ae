"""Image URLs of chat requests: what is loaded, from where, and within what bounds."""

import base64
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest

from bench.images import photo
from encoder_contract.errors import ForbiddenError, ImageLimitError, InvalidImageError, UnavailableError
from prefill_client.reference.image_urls import ImageUrls

FIRST = photo(300, 220, 1)


class Album(BaseHTTPRequestHandler):
    """A host with one image, one that redirects, one that is huge, one that never ends."""

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


async def test_data_url_over_the_limit_is_refused_before_it_is_decoded() -> None:
    urls = ImageUrls([], max_bytes=1000, timeout_s=1)
    assert await urls.load(data_url(bytes(1000))) == bytes(1000)
    with pytest.raises(ImageLimitError, match="1000 bytes"):
        await urls.load(data_url(bytes(1010)))


def data_url(image: bytes) -> str:
    return "data:image/jpeg;base64," + base64.b64encode(image).decode()
