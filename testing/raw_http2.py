"""A gRPC caller that speaks HTTP/2 by hand: it can send partial messages and keep windows closed."""

import asyncio
import struct
from contextlib import suppress
from typing import Self

import h2.config
import h2.connection
import h2.events
import h2.exceptions
import h2.settings

# A window may stay closed on purpose for a second. The window for a whole message opens, on any machine.
PARTIAL_S, WHOLE_S = 1.0, 60.0


class RawConnection:
    """One HTTP/2 connection. It answers settings and pings, and never enlarges the windows that `open` sets."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, window: int) -> None:
        self._reader, self._writer = reader, writer
        self._h2 = h2.connection.H2Connection(h2.config.H2Configuration(header_encoding="utf-8"))
        self._h2.local_settings = h2.settings.Settings(
            client=True, initial_values={h2.settings.SettingCodes.INITIAL_WINDOW_SIZE: window}
        )
        self._h2.initiate_connection()
        self.trailers: dict[int, dict[str, str]] = {}
        self.reset: set[int] = set()
        self.closed = asyncio.Event()
        self._moved = asyncio.Event()
        self._task: asyncio.Task[None] | None = None

    @classmethod
    async def open(cls, endpoint: str, window: int = 65535, source: str | None = None) -> Self:
        """Connect, from the address `source` if there is one.

        `window` is the number of bytes that the server may send on each stream.
        """
        host, _, port = endpoint.rpartition(":")
        local = (source, 0) if source else None
        connection = cls(*await asyncio.open_connection(host, int(port), local_addr=local), window)
        connection._flush()
        connection._task = asyncio.create_task(connection._listen())
        return connection

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()

    async def call(
        self, path: str, message: bytes | None = None, *, headers: tuple[tuple[str, str], ...] = ()
    ) -> int:
        """Start a call, with a whole message if there is one, and return its stream."""
        stream = self._h2.get_next_available_stream_id()
        pairs = [
            (":method", "POST"),
            (":scheme", "http"),
            (":path", path),
            (":authority", "localhost"),
            ("te", "trailers"),
            ("content-type", "application/grpc"),
            *headers,
        ]
        self._h2.send_headers(stream, pairs)
        if message is not None:
            await self.send(stream, framed(message), end=True, patience_s=WHOLE_S)
        self._flush()
        await self._writer.drain()
        return stream

    async def send(
        self, stream: int, data: bytes, *, end: bool = False, patience_s: float = PARTIAL_S
    ) -> int:
        """Send bytes as the server's windows allow; return how many were sent when none opens for `patience_s`."""
        sent = 0
        while sent < len(data) and not self.closed.is_set():
            if stream in self.reset or "grpc-status" in self.trailers.get(stream, {}):
                return sent
            room = min(self._h2.local_flow_control_window(stream), self._h2.max_outbound_frame_size)
            if room <= 0:
                self._moved.clear()
                try:
                    await asyncio.wait_for(self._moved.wait(), patience_s)
                except TimeoutError:
                    return sent
                continue
            part = data[sent : sent + room]
            sent += len(part)
            self._h2.send_data(stream, part, end_stream=end and sent == len(data))
            self._flush()
            await self._writer.drain()
        return sent

    async def fill(self, stream: int, data: bytes, window: int, patience_s: float = PARTIAL_S) -> int:
        """As `send`, but wait until `window` bytes are sent, on any machine; only then, for `patience_s`."""
        sent = await self.send(stream, data[:window], patience_s=WHOLE_S)
        return sent + await self.send(stream, data[sent:], patience_s=patience_s)

    async def answered(self) -> None:
        """Wait until an answer begins, or the connection is closed."""
        async with asyncio.timeout(WHOLE_S):
            while not self.trailers and not self.closed.is_set():
                self._moved.clear()
                await self._moved.wait()

    def reset_stream(self, stream: int) -> None:
        """Cancel a call."""
        self._h2.reset_stream(stream, 8)
        self._flush()

    async def close(self) -> None:
        """Close the connection."""
        if self._task is not None:
            self._task.cancel()
        self._writer.close()
        with suppress(OSError):
            await self._writer.wait_closed()

    async def _listen(self) -> None:
        # After GOAWAY a server may still send pings, which h2 takes for a protocol error.
        with suppress(OSError, h2.exceptions.ProtocolError):
            while data := await self._reader.read(1 << 16):
                for event in self._h2.receive_data(data):
                    self._note(event)
                self._flush()
                self._moved.set()
        self.closed.set()
        self._moved.set()

    def _note(self, event: h2.events.Event) -> None:
        if isinstance(event, h2.events.TrailersReceived | h2.events.ResponseReceived):
            self.trailers.setdefault(event.stream_id, {}).update(dict(event.headers))  # type: ignore[arg-type]
        elif isinstance(event, h2.events.StreamReset):
            self.reset.add(event.stream_id)

    def _flush(self) -> None:
        self._writer.write(self._h2.data_to_send())


def framed(message: bytes, *, compressed: bool = False) -> bytes:
    """Return the message with gRPC's prefix of five bytes."""
    return struct.pack(">BI", compressed, len(message)) + message
