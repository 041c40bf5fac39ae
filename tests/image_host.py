"""A web server whose next answers a test sets, and which records its requests."""

import asyncio
import ssl
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from prefill_client.media.destinations import Destinations
from prefill_client.media.image_loader import ImageLoader

BODY = b"not an image, but the loader does not look"


class Host:
    """A web server whose next answers a test sets. It records the headers of each request."""

    def __init__(self) -> None:
        self.status = "200 OK"
        self.headers = "Cache-Control: max-age=3600"
        self.body = BODY
        self.before = b""
        """What precedes each answer that is no redirect."""
        self.moved: dict[str, str] = {}
        """Redirected paths and their targets; these answers have `moved_status` and `moved_headers`."""
        self.moved_status = "302 Found"
        self.moved_headers = "Cache-Control: max-age=3600"
        self.requests: list[bytes] = []
        self.answering = asyncio.Event()
        self.answering.set()
        self.ended = asyncio.Event()
        self.name, self.port = "", 0

    async def answer(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            request = await reader.readuntil(b"\r\n\r\n")
            self.requests.append(request)
            hung_up, answering = (
                asyncio.ensure_future(each) for each in (reader.read(), self.answering.wait())
            )
            await asyncio.wait({hung_up, answering}, return_when=asyncio.FIRST_COMPLETED)
            if hung_up.done():
                return
            hung_up.cancel()
            if (path := request.split()[1].decode()) in self.moved:
                head = f"HTTP/1.1 {self.moved_status}\r\n{self.moved_headers}\r\n"
                writer.write(f"{head}Location: {self.moved[path]}\r\n\r\n".encode())
                await writer.drain()
                return
            head = f"HTTP/1.1 {self.status}\r\n{self.headers}\r\nContent-Length: {len(self.body)}\r\n\r\n"
            writer.write(self.before + head.encode() + self.body)
            await writer.drain()
        except (OSError, asyncio.IncompleteReadError):
            pass
        finally:
            self.ended.set()
            writer.close()

    def loader(self, **settings: float) -> ImageLoader:
        return ImageLoader(Destinations([self.name]), max_bytes=1 << 20, timeout_s=30, **settings)  # type: ignore[arg-type]


@asynccontextmanager
async def image_host(address: str = "127.0.0.1", tls: ssl.SSLContext | None = None) -> AsyncIterator[Host]:
    """Run a host."""
    host = Host()
    async with await asyncio.start_server(host.answer, address, 0, ssl=tls) as server:
        host.port = server.sockets[0].getsockname()[1]
        host.name = f"{address}:{host.port}"
        yield host
