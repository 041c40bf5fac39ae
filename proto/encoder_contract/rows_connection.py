"""The client's side of a server's rows port: a few connections that receive rows straight into the caller's memory.

`Ticket` in encoder.proto has the protocol. The server's side is `encoder_service/rows_port.py`.
"""

import asyncio
import logging
import socket
import ssl
import struct
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from time import monotonic

from encoder_contract.errors import StaleHandleError
from encoder_contract.extents import cut, move_all
from encoder_contract.framing import Checksum

log = logging.getLogger(__name__)

TICKET_BYTES = 16
SIZE = struct.Struct("<Q")
"""The answer to a ticket: the number of bytes of rows that follow; 0: the ticket is not valid."""
AT_ONCE = struct.pack("@ii", 1, 0)
"""How a socket lingers that discards what is unsent, and is closed by a reset."""
CONNECTIONS = 4
"""Most connections to a server. One carries what a network of 25 Gbit/s does; several tickets are fetched at once."""
CONNECT_S = 1.0
# How long a port is avoided after a failure: a firewall or proxy that breaks one connection breaks the next one too.
AVOID_S = 60.0
# A server that sends nothing for so long has died: it serves its readers in turn, every few milliseconds.
SILENCE_S = 10.0
# A server may forget a ticket, but a port that knows none of several in a row is another server's, or wants another
# certificate.
UNKNOWN_TICKETS = 4
PIECE_BYTES = 1 << 20  # still in the processor's cache when it is checksummed


class RowsConnections:
    """Connections to the rows port of one server. Use it from one event loop; a thread per connection does the work."""

    def __init__(
        self,
        host: str,
        port: int,
        context: Callable[[], ssl.SSLContext] | None = None,
        server_name: str = "",
    ) -> None:
        """`context` returns the TLS context for a new connection; None: no TLS.

        The server's certificate must be for `server_name`, or for `host` if that is empty.
        """
        self._host, self.port = host, port
        self._context = context
        self._server_name = server_name or host
        self._threads = ThreadPoolExecutor(CONNECTIONS, f"rows-{port}")
        self._lock = threading.Lock()
        self._idle: list[socket.socket] = []
        self._running: set[_Reception] = set()
        self._closed = False
        self._avoid_until = 0.0
        self._unknown = 0  # tickets in a row that the port did not know

    @property
    def usable(self) -> bool:
        """Whether the port worked when it was last used, or is due to be tried again."""
        return monotonic() >= self._avoid_until

    async def receive(self, secret: bytes, into: Sequence[memoryview]) -> int:
        """Receive the rows of a ticket into `into`, and return their checksum. Cancelling it ends the transfer.

        Nothing writes to `into` once this has returned or raised. Raises `StaleHandleError` if the ticket is not valid
        or the connection fails: fetch the rows again.
        """
        reception = _Reception(secret, into)
        try:
            in_thread = self._threads.submit(self._receive, reception)
        except RuntimeError as error:
            raise StaleHandleError("the client was closed") from error
        receiving = asyncio.wrap_future(in_thread)
        # After a cancellation nobody waits for its error, which asyncio would log.
        receiving.add_done_callback(lambda done: done.cancelled() or done.exception())
        try:
            return await asyncio.shield(receiving)
        except asyncio.CancelledError:
            is_writing = reception.abort()
            in_thread.cancel()
            while is_writing and not receiving.done():  # the socket is shut down: the thread returns at once
                with suppress(asyncio.CancelledError):
                    await asyncio.wait([receiving])
            raise

    def close(self) -> None:
        """Close all connections, which ends running transfers."""
        with self._lock:
            self._closed = True
            idle, self._idle = self._idle, []
            running = list(self._running)
        for reception in running:
            reception.abort()
        for connection in idle:
            connection.close()
        self._threads.shutdown(wait=False, cancel_futures=True)

    # In a thread of its own

    def _receive(self, reception: "_Reception") -> int:
        with self._lock:
            self._running.add(reception)
        try:
            while (connection := self._unused()) is not None:
                try:
                    return self._receive_by(connection, reception)
                except _ClosedError:  # the server had closed an idle connection
                    reception.check()
            try:
                return self._receive_by(self._connect(), reception)
            except _ClosedError as error:
                raise self._failed(reception, "the server closed it") from error
        except _UnknownTicketError as error:
            self._unknown += 1
            if self._unknown >= UNKNOWN_TICKETS:
                raise self._failed(reception, f"it knows none of {self._unknown} tickets") from error
            raise StaleHandleError(
                f"{self._host}:{self.port} does not know the ticket of the rows"
            ) from error
        except OSError as error:
            raise self._failed(reception, str(error)) from error
        finally:
            with self._lock:
                self._running.discard(reception)

    def _unused(self) -> socket.socket | None:
        with self._lock:
            return self._idle.pop() if self._idle else None

    def _connect(self) -> socket.socket:
        connection = socket.create_connection((self._host, self.port), CONNECT_S)
        try:
            connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
            if self._context is not None:
                try:
                    context = self._context()
                except ValueError as error:
                    raise OSError(str(error)) from error
                connection = context.wrap_socket(connection, server_hostname=self._server_name)
            # In the kernel, which waits until a piece is complete; a time limit of Python's would wait for each part.
            connection.settimeout(None)
            connection.setsockopt(
                socket.SOL_SOCKET, socket.SO_RCVTIMEO, struct.pack("@ll", int(SILENCE_S), 0)
            )
        except BaseException:
            connection.close()
            raise
        return connection

    def _receive_by(self, connection: socket.socket, reception: "_Reception") -> int:
        """Receive by `connection`, which is kept for the next ticket or closed."""
        is_reusable = False
        try:
            reception.begin(connection)
            checksum = reception.receive()
            is_reusable = True
            self._unknown = 0
        finally:
            reception.end()
            with self._lock:
                if is_reusable and not self._closed:
                    self._idle.append(connection)
                else:
                    # By a reset. After a shutdown, Linux answers no probe of a sender that waits for room: the server
                    # would keep the connection, and megabytes that it has sent, until its time for readers ends.
                    with suppress(OSError):
                        connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, AT_ONCE)
                    connection.close()
        return checksum

    def _failed(self, reception: "_Reception", reason: str) -> StaleHandleError:
        """Avoid the port for a while, unless the transfer was aborted. Return the error of its image."""
        if reception.aborted:
            return StaleHandleError("the fetch has ended")
        with self._lock:
            is_new = self.usable
            self._avoid_until = monotonic() + AVOID_S
        if is_new:
            log.warning(
                "rows of %s arrive inline for %g s: the connection to its rows port %d failed (%s)",
                self._host,
                AVOID_S,
                self.port,
                reason,
            )
        return StaleHandleError(f"{self._host}:{self.port}: the rows did not arrive ({reason})")


class _ClosedError(Exception):
    """The server closed the connection before it answered the ticket."""


class _UnknownTicketError(Exception):
    """The server does not know the ticket: its call has ended, or it was presented too late."""


class _Reception:
    """One ticket, and the memory for its rows. `abort` may be called by another thread than the others."""

    def __init__(self, secret: bytes, into: Sequence[memoryview]) -> None:
        self._secret = secret
        self._into = into
        self._lock = threading.Lock()
        self._connection: socket.socket | None = None
        self._aborted = False

    def begin(self, connection: socket.socket) -> None:
        with self._lock:
            self._connection = connection
        self.check()

    def end(self) -> None:
        with self._lock:
            self._connection = None

    def abort(self) -> bool:
        """End the transfer. Return whether its thread may still write for a moment."""
        with self._lock:
            self._aborted = True
            if self._connection is None:
                return False
            with suppress(OSError):
                # Not the method of an SSLSocket, which would let its thread read on without TLS.
                socket.socket.shutdown(self._connection, socket.SHUT_RDWR)
            return True

    @property
    def aborted(self) -> bool:
        with self._lock:
            return self._aborted

    def check(self) -> None:
        """Raise `StaleHandleError` if the transfer was aborted."""
        if self.aborted:
            raise StaleHandleError("the fetch has ended")

    def receive(self) -> int:
        connection, into = self._connection, self._into
        assert connection is not None
        try:
            connection.sendall(self._secret)
            answer = connection.recv(SIZE.size)
        except (ConnectionError, ssl.SSLError) as error:
            raise _ClosedError from error
        if not answer:
            raise _ClosedError
        while len(answer) < SIZE.size:
            answer += _some(connection.recv(SIZE.size - len(answer)))
        (size,) = SIZE.unpack(answer)
        if not size:
            raise _UnknownTicketError
        if size != (expected := sum(map(len, into))):
            raise OSError(f"it announced {size} bytes of {expected}")
        # With TLS, what is there: a record of 16 KiB at most.
        flags = 0 if isinstance(connection, ssl.SSLSocket) else socket.MSG_WAITALL
        checksum, filled = Checksum(), 0
        for piece in cut(into, lambda _: PIECE_BYTES):
            received = move_all(piece, lambda rest, _: connection.recv_into(rest, len(rest), flags))
            filled += received
            if received < len(piece):
                raise OSError(f"it ended after {filled} of {size} bytes")
            checksum.add(piece)
        return checksum.value


def _some(data: bytes) -> bytes:
    if not data:
        raise OSError("it ended within an answer")
    return data
