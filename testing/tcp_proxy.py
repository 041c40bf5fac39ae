"""A TCP proxy that can cut connections, fall silent, be slow, answer nonsense, or seem to be another host."""

import asyncio
import contextlib
import ssl
from collections.abc import AsyncIterator

ANOTHER_HOST = "127.0.0.2"


@contextlib.asynccontextmanager
async def from_another_host(endpoint: str, host: str = ANOTHER_HOST) -> AsyncIterator[str]:
    """Yield an endpoint whose clients have the address `host` for the server at `endpoint`."""
    server_host, _, port = endpoint.rpartition(":")
    proxy = await TcpProxy(int(port), to_host=server_host, from_host=host).start()
    try:
        yield f"127.0.0.1:{proxy.port}"
    finally:
        await proxy.stop()


class TcpProxy:
    """A TCP proxy of a server, with which one client can lose a server that others keep."""

    def __init__(
        self,
        to_port: int,
        tls: ssl.SSLContext | None = None,
        *,
        to_host: str = "127.0.0.1",
        from_host: str = "127.0.0.1",
    ) -> None:
        """With `tls` clients connect by TLS. The connection to the server is without TLS and comes from `from_host`."""
        self._to_host = to_host
        self._to_port = to_port
        self._from_host = from_host
        self._tls = tls
        self._ends: set[asyncio.StreamWriter] = set()
        self._tasks: set[asyncio.Task[None]] = set()
        self._is_cut = False
        self._is_silent = False
        self._bytes_per_s = float("inf")
        self._delay_s = 0.0
        self._nonsense = b""
        self._passes_answers = asyncio.Event()
        self._passes_answers.set()
        self.held_bytes = 0
        self.port = 0

    async def start(self) -> "TcpProxy":
        self._server = await asyncio.start_server(self._connect, "127.0.0.1", 0, ssl=self._tls)
        self.port = self._server.sockets[0].getsockname()[1]
        return self

    def cut(self) -> None:
        """Abort all connections, and each new one at once."""
        self._is_cut = True
        for end in self._ends:
            end.transport.abort()

    def fall_silent(self) -> None:
        """Drop all data from now on, in both directions, and do not forward the end of a connection."""
        self._is_silent = True

    def hold_answers(self) -> None:
        """Hold the server's data back, up to 64 KiB of each connection, and count it in `held_bytes`."""
        self.held_bytes = 0
        self._passes_answers.clear()

    def throttle(self, bytes_per_s: float) -> None:
        """Limit the rate of each direction of each connection."""
        self._bytes_per_s = bytes_per_s

    def delay(self, seconds: float) -> None:
        """Delay the data of each direction of each connection."""
        self._delay_s = seconds

    def answer_nonsense(self, answer: bytes) -> None:
        """Send clients these bytes instead of each line of the server.

        So each command gets an answer, even if several arrive at once, and no client waits for one.
        """
        self._nonsense = answer

    def mend(self, to_port: int | None = None) -> None:
        """End all faults; forward new connections to the server at `to_port`, if given."""
        self._to_port = self._to_port if to_port is None else to_port
        self._is_cut = self._is_silent = False
        self._bytes_per_s = float("inf")
        self._delay_s = 0.0
        self._nonsense = b""
        self._passes_answers.set()

    async def stop(self) -> None:
        self.cut()
        self._server.close()
        for task in self._tasks:
            task.cancel()

    async def _connect(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        if self._refuses(writer):
            return
        try:
            far_reader, far_writer = await asyncio.open_connection(
                self._to_host, self._to_port, local_addr=(self._from_host, 0)
            )
        except OSError:  # the server is gone
            writer.transport.abort()
            return
        if self._refuses(writer):  # cut meanwhile
            far_writer.transport.abort()
            return
        for source, sink in ((reader, far_writer), (far_reader, writer)):
            self._ends.add(sink)
            task = asyncio.create_task(self._carry(source, sink, is_answer=sink is writer))
            self._tasks.add(task)
            task.add_done_callback(self._tasks.discard)

    def _refuses(self, writer: asyncio.StreamWriter) -> bool:
        """Return whether all connections are cut; if so, abort this one."""
        if self._is_cut:
            writer.transport.abort()
        return self._is_cut

    async def _carry(
        self, source: asyncio.StreamReader, sink: asyncio.StreamWriter, *, is_answer: bool
    ) -> None:
        loop = asyncio.get_running_loop()
        under_way: asyncio.Queue[tuple[float, bytes]] = asyncio.Queue()
        arriving = asyncio.create_task(self._arrive(under_way, sink, is_answer=is_answer))
        try:
            with contextlib.suppress(OSError):
                while data := await source.read(1 << 16):
                    await asyncio.sleep(len(data) / self._bytes_per_s)
                    if is_answer and not self._passes_answers.is_set():
                        self.held_bytes += len(data)
                        await self._passes_answers.wait()
                    under_way.put_nowait((loop.time() + self._delay_s, data))
            under_way.put_nowait((loop.time() + self._delay_s, b""))
            await arriving
        finally:
            arriving.cancel()

    async def _arrive(
        self, under_way: "asyncio.Queue[tuple[float, bytes]]", sink: asyncio.StreamWriter, *, is_answer: bool
    ) -> None:
        """Write each piece after its delay, and then end the connection. Later pieces are under way."""
        with contextlib.suppress(OSError):
            while True:
                at, data = await under_way.get()
                await asyncio.sleep(at - asyncio.get_running_loop().time())
                if not data:
                    break
                if not self._is_silent:
                    sink.write(self._nonsense * data.count(b"\n") if is_answer and self._nonsense else data)
                    await sink.drain()
        if not self._is_silent:
            sink.transport.abort()
            self._ends.discard(sink)
