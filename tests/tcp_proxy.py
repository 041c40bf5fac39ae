"""A TCP proxy that can be cut, fall silent, be slow, or answer nonsense."""

import asyncio
import contextlib
import ssl


class TcpProxy:
    """A TCP proxy of a server on 127.0.0.1 that can be cut, so that one client loses a server that others keep."""

    def __init__(self, to_port: int, tls: ssl.SSLContext | None = None, from_host: str = "127.0.0.1") -> None:
        """With `tls` its clients speak TLS, and it speaks plainly to the server, which sees it at `from_host`."""
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
        self.port = 0

    async def start(self) -> "TcpProxy":
        self._server = await asyncio.start_server(self._connect, "127.0.0.1", 0, ssl=self._tls)
        self.port = self._server.sockets[0].getsockname()[1]
        return self

    def cut(self) -> None:
        """Break every connection, and every new one at once."""
        self._is_cut = True
        for end in self._ends:
            end.transport.abort()

    def fall_silent(self) -> None:
        """Lose what is sent from now on, in both directions, a goodbye too."""
        self._is_silent = True

    def throttle(self, bytes_per_s: float) -> None:
        """Carry no more than this from now on, each way of each connection."""
        self._bytes_per_s = bytes_per_s

    def delay(self, seconds: float) -> None:
        """Carry what is sent this much later, each way of each connection."""
        self._delay_s = seconds

    def answer_nonsense(self, answer: bytes) -> None:
        """From now on clients get these bytes for every line that the server sends.

        So there is an answer to each command, also where several come in one piece: nobody waits for one.
        """
        self._nonsense = answer

    def mend(self, to_port: int | None = None) -> None:
        """Carry everything again, of new connections to another server if one is named."""
        self._to_port = self._to_port if to_port is None else to_port
        self._is_cut = self._is_silent = False
        self._bytes_per_s = float("inf")
        self._delay_s = 0.0
        self._nonsense = b""

    async def stop(self) -> None:
        self.cut()
        self._server.close()
        for task in self._tasks:
            task.cancel()

    async def _connect(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        if self._is_cut:
            writer.transport.abort()
            return
        far_reader, far_writer = await asyncio.open_connection(
            "127.0.0.1", self._to_port, local_addr=(self._from_host, 0)
        )
        for source, sink in ((reader, far_writer), (far_reader, writer)):
            self._ends.add(sink)
            task = asyncio.create_task(self._carry(source, sink, is_answer=sink is writer))
            self._tasks.add(task)
            task.add_done_callback(self._tasks.discard)

    async def _carry(
        self, source: asyncio.StreamReader, sink: asyncio.StreamWriter, *, is_answer: bool
    ) -> None:
        with contextlib.suppress(OSError):
            while data := await source.read(1 << 16):
                await asyncio.sleep(self._delay_s + len(data) / self._bytes_per_s)
                if not self._is_silent:
                    sink.write(self._nonsense * data.count(b"\n") if is_answer and self._nonsense else data)
                    await sink.drain()
        if not self._is_silent:
            sink.transport.abort()
            self._ends.discard(sink)
