"""Allowed hosts that are hostile: they block neither the event loop nor the images of other hosts."""

import asyncio
import socket
import threading
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, suppress
from typing import Any

import h11
import pytest

from encoder_contract.errors import EncoderError, ImageLimitError, InvalidImageError
from prefill_client.media.destinations import Destinations
from prefill_client.media.download import THREADS
from prefill_client.media.image_loader import ImageLoader
from tests.image_host import BODY, Host, image_host
from tests.raw_hosts import flooding_host
from tests.waiting import PATIENCE_S, soon

CHUNKED = b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n"
FLOODS = {
    "one-byte chunks": (CHUNKED, b"1\r\nx\r\n"),
    "interim answers": (b"", b"HTTP/1.1 100 Continue\r\n\r\n"),
    "empty lines": (b"", b"\r\n"),
    "headers": (b"HTTP/1.1 200 OK\r\n", b"X-More: 1\r\n"),
    "short headers at once": (b"HTTP/1.1 200 OK\r\n" + b"X:\r\n" * 1000 + b"\r\n", b"x"),
}


class Parsing:
    """Counts the events of all downloads: the total, and the most between two passes of the event loop."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.events = self.most = self._since = 0
        next_event = h11.Connection.next_event

        def counted(connection: h11.Connection) -> Any:
            self.events += 1
            self._since += 1
            self.most = max(self.most, self._since)
            return next_event(connection)

        monkeypatch.setattr(h11.Connection, "next_event", counted)

    @asynccontextmanager
    async def watched(self) -> AsyncIterator[None]:
        async def tick() -> None:
            while True:
                self._since = 0
                await asyncio.sleep(0)

        ticking = asyncio.create_task(tick())
        try:
            yield
        finally:
            ticking.cancel()


@pytest.fixture
async def host() -> AsyncIterator[Host]:
    async with image_host() as host:
        yield host


@pytest.mark.attack("a host that floods its answer with tiny pieces")
@pytest.mark.parametrize("flood", FLOODS)
async def test_a_host_that_floods_tiny_pieces_is_refused_early(
    flood: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    parsing = Parsing(monkeypatch)
    with flooding_host(*FLOODS[flood]) as host:
        loader = ImageLoader(Destinations([host]), max_bytes=32 << 20, timeout_s=PATIENCE_S)
        async with parsing.watched():
            with pytest.raises(InvalidImageError, match=r"pieces|interim|sent headers of more than"):
                await loader.load(f"http://{host}/")
    assert parsing.most <= 32, "events between two passes of the event loop"
    assert parsing.events <= 2000


async def loaded_from(*pieces: bytes) -> bytes:
    """Load an image from a host that answers with these bytes and hangs up."""

    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"\r\n\r\n")
        writer.writelines(pieces)
        writer.close()

    async with await asyncio.start_server(answer, "127.0.0.1", 0) as server:
        name = f"127.0.0.1:{server.sockets[0].getsockname()[1]}"
        loader = ImageLoader(Destinations([name]), max_bytes=1 << 20, timeout_s=PATIENCE_S)
        return await loader.load(f"http://{name}/")


async def test_a_host_that_hangs_up_inside_its_headers_is_named() -> None:
    with pytest.raises(InvalidImageError, match="closed the connection before the end of the headers"):
        await loaded_from(b"HTTP/1.1 200 OK\r\nX-")


async def test_a_body_without_a_length_is_bounded() -> None:
    with pytest.raises(ImageLimitError):
        await loaded_from(b"HTTP/1.1 200 OK\r\n\r\n", bytes(3 << 20))


async def test_an_image_in_chunks_of_usual_sizes_is_loaded() -> None:
    image = bytes(range(256)) * 1000
    chunks = [image[begin : begin + 512] for begin in range(0, len(image), 512)]
    sent = (b"%x\r\n%s\r\n" % (len(chunk), chunk) for chunk in [*chunks, b""])
    assert await loaded_from(b"HTTP/1.1 102 Processing\r\n\r\n", CHUNKED, *sent) == image


class Names:
    """A fake resolver: names of `slow.test` block their thread until they are released."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.lookups: list[str] = []
        self.released = threading.Event()
        monkeypatch.setattr(socket, "getaddrinfo", self._look_up)

    def _look_up(self, host: str, port: int, *_: object, **__: object) -> list[Any]:
        self.lookups.append(host)
        if host.endswith(".slow.test"):
            self.released.wait()
        return [(socket.AF_INET, socket.SOCK_STREAM, 6, "", ("127.0.0.1", port))]


@pytest.fixture
def names(monkeypatch: pytest.MonkeyPatch) -> Iterator[Names]:
    names = Names(monkeypatch)
    yield names
    names.released.set()


def loader_of(host: Host) -> tuple[ImageLoader, int]:
    """A loader that may load from the host by any name, and the host's port."""
    port = host.port
    rules = Destinations([f"*.slow.test:{port}", f"good.test:{port}", "127.0.0.0/8", host.name])
    return ImageLoader(rules, max_bytes=1 << 20, timeout_s=2 * PATIENCE_S), port


@pytest.mark.attack("host names that resolve slowly")
async def test_slow_names_do_not_delay_others(host: Host, names: Names) -> None:
    loader, port = loader_of(host)
    slow = [asyncio.create_task(loader.load(f"http://{n}.slow.test:{port}/")) for n in range(5)]
    await soon(lambda: len(names.lookups) >= 4)
    async with asyncio.timeout(PATIENCE_S):
        assert await loader.load(f"http://good.test:{port}/") == BODY
    assert not any(task.done() for task in slow)
    names.released.set()
    assert await asyncio.gather(*slow) == [BODY] * 5


async def test_lookups_of_a_request_are_bounded_and_shared(host: Host, names: Names) -> None:
    loader, port = loader_of(host)
    urls = [f"http://{n}.slow.test:{port}/{path}" for path in "ab" for n in range(50)]
    asking = asyncio.create_task(loader.load_all(urls))
    async with asyncio.timeout(PATIENCE_S):
        assert await loader.load_all([f"http://good.test:{port}/"]) == [BODY]
    assert len(names.lookups) <= 5
    names.released.set()
    assert await asking == [BODY] * 100


async def test_lookups_without_waiters_are_not_started(host: Host, names: Names) -> None:
    loader, port = loader_of(host)
    asking = [asyncio.create_task(loader.load(f"http://{n}.slow.test:{port}/")) for n in range(200)]
    await soon(lambda: len(names.lookups) == THREADS)
    async with asyncio.timeout(PATIENCE_S):
        assert await loader.load(f"http://{host.name}/") == BODY, "an address needs no lookup"
    for task in asking:
        task.cancel()
    await asyncio.gather(*asking, return_exceptions=True)
    names.released.set()
    assert await loader.load(f"http://good.test:{port}/") == BODY
    assert len(names.lookups) == THREADS + 1


async def test_a_slow_name_uses_one_resolver_thread(host: Host, names: Names) -> None:
    loader, port = loader_of(host)
    for number in range(5):
        with suppress(TimeoutError, EncoderError):
            async with asyncio.timeout(0.01):
                await loader.load(f"http://same.slow.test:{port}/{number}")
    last = asyncio.create_task(loader.load(f"http://same.slow.test:{port}/last"))
    await soon(lambda: bool(names.lookups))
    names.released.set()
    assert await last == BODY
    assert names.lookups == ["same.slow.test"]
