"""The rows port: sends rows from the store's pages over TCP connections, in threads of its own.

A Fetch call offers rows that it keeps pinned, and passes the ticket on to its client. The client presents it on a
connection of its own: `Ticket` in encoder.proto has the protocol, `encoder_contract/rows_connection.py` its other side.

One thread waits for sockets, a few others do what is ready: holders take turns, and a turn sends at most `TURN_BYTES`.
No thread waits for a reader. Neither the event loop nor the interpreter's lock is involved while bytes move.
"""

import asyncio
import logging
import resource
import secrets
import select
import socket
import ssl
import threading
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from time import monotonic
from typing import NamedTuple

from encoder_contract.certificates import Certificates
from encoder_contract.endpoint import Endpoint, host_of
from encoder_contract.errors import DeadlineError, EncoderError, UnavailableError
from encoder_contract.rows_connection import AT_ONCE, SIZE, TICKET_BYTES
from encoder_contract.turns import TurnQueue
from encoder_service.config import ConfigError, flag

log = logging.getLogger(__name__)

THREADS = 4  # that send: one fills a network of 25 Gbit/s, with TLS half of one
TURN_BYTES = 4 << 20
# A client has up to four connections. At most an eighth of the file descriptors, so that gRPC has its half.
MAX_CONNECTIONS = 2048
HOST_SHARE = 4  # a host may have a quarter of the connections
# The kernel's memory for a connection. Without these bounds, it keeps megabytes for a reader that does not read. What
# is under way to a reader is not bounded: a far one needs it.
UNSENT_BYTES = 256 << 10
RECEIVED_BYTES = 16 << 10  # a ticket has 16 bytes
# A connection must present its first ticket within this time. It may then wait for the next one as long as gRPC's.
FIRST_TICKET_S = 10.0
NEXT_TICKET_S = 60.0
PROGRESS_BYTES = (
    1 << 20
)  # a reader must accept this many bytes, or the rest, in the time of one inline message
# How long a thread waits for one reader while no other connection is ready: passing it on costs more than waiting.
WAIT_MS = 2.0
TICK_S = 0.25  # how often times are checked
BACKLOG = 512
ACCEPTED_AT_ONCE = 16  # before the connections that are ready have their turn

READABLE = select.EPOLLIN | select.EPOLLRDHUP | select.EPOLLONESHOT
WRITABLE = select.EPOLLOUT | select.EPOLLONESHOT


class Reader(NamedTuple):
    """Who may present a ticket: the holder whose turn it uses, and the names in its certificate, if it has one."""

    holder: str
    certificate_names: tuple[str, ...]


class Transfer:
    """Rows that the bearer of one ticket may read once. For the event loop, except where noted.

    `ended` is done once no thread reads the rows any more. Its result is None if they were sent or withdrawn, else the
    error.
    """

    def __init__(
        self, port: "RowsPort", rows: Sequence[memoryview], reader: Reader, on_last: Callable[[], None]
    ) -> None:
        self.secret = secrets.token_bytes(TICKET_BYTES)
        self.ended: asyncio.Future[EncoderError | None] = asyncio.get_running_loop().create_future()
        self._port = port
        self._on_last = on_last
        # For the port, with its lock held.
        self.rows = rows
        self.reader = reader
        self.due = 0.0
        self.is_read = False  # a thread reads the rows now
        self.is_withdrawn = False

    def withdraw(self) -> None:
        """Let nobody read the rows any more. `ended` is done at once, or within milliseconds if a thread reads them."""
        if self._port.forget(self):
            self.end(None)

    def last_bytes(self) -> None:
        """Tell the call that its client may have all rows soon."""
        self._on_last()

    def end(self, error: EncoderError | None) -> None:
        """Set the outcome, unless it is set."""
        self.rows = ()
        if not self.ended.done():
            self.ended.set_result(error)


class _Connection:
    """A connection. One thread at a time uses it: the one that waits for sockets, while it is `armed`, or a sender."""

    __slots__ = (
        "armed",
        "due",
        "holder",
        "host",
        "secret",
        "shaken",
        "socket",
        "told_last",
        "transfer",
        "unsent",
        "until_due",
    )

    def __init__(self, accepted: socket.socket, host: str, *, shaken: bool) -> None:
        self.socket = accepted
        self.host = host
        self.holder = host
        """Whose turn it uses: its host's, or that of the transfer's reader."""
        self.shaken = shaken
        """Whether the TLS handshake is done."""
        self.armed = False
        self.due = monotonic() + FIRST_TICKET_S
        self.secret = b""
        self.transfer: Transfer | None = None
        self.unsent: deque[memoryview] = deque()
        self.until_due = 0
        self.told_last = False


class RowsPort:
    """Serves tickets on `listen` from `start` to `stop`. Construct it on the event loop of the calls."""

    def __init__(self, listen: str, certificates: Certificates | None, reader_idle_s: float) -> None:
        """Serve TLS if there are `certificates`.

        A ticket that is not presented within `reader_idle_s`, and a reader that stops for so long, fail.
        """
        self._listen = listen
        self.port = 0  # set by `start`
        self._certificates = certificates
        self._reader_idle_s = reader_idle_s
        files, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
        self._max_connections = min(MAX_CONNECTIONS, files // 8)
        self._loop = asyncio.get_running_loop()
        self._lock = threading.Lock()  # of the tickets, and of which thread has a connection
        self._offered: dict[bytes, Transfer] = {}
        self._connections: dict[int, _Connection] = {}  # by file descriptor
        self._of_host: dict[str, set[_Connection]] = {}
        self._ready: TurnQueue[_Connection] = TurnQueue()
        self._stopping = False
        self._threads: list[threading.Thread] = []

    @property
    def connections(self) -> int:
        """The number of open connections."""
        return len(self._connections)

    def start(self) -> None:
        """Bind the port and serve. Raises `ConfigError` if it is unavailable."""
        where = Endpoint.parse(self._listen)
        try:
            self._socket = socket.create_server(
                (where.host, where.port),
                family=socket.AF_INET6 if ":" in where.host else socket.AF_INET,
                backlog=BACKLOG,
                dualstack_ipv6=where.host == "::" and socket.has_dualstack_ipv6(),
            )
        except OSError as error:
            raise ConfigError(
                f"{flag('rows_listen')} {self._listen}: the address is taken, or does not belong to this host "
                f"({error.strerror}); port 0 picks a free port"
            ) from error
        self._socket.setblocking(False)
        # Connections inherit these options.
        self._socket.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, RECEIVED_BYTES)
        self._socket.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        self._socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self._socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_NOTSENT_LOWAT, UNSENT_BYTES)
        self.port = self._socket.getsockname()[1]
        self._epoll = select.epoll()
        self._epoll.register(self._socket, select.EPOLLIN)
        works = {"rows-port": self._wait_for_sockets} | {
            f"rows-sender-{number}": self._send for number in range(THREADS)
        }
        self._threads = [
            threading.Thread(target=work, name=name, daemon=True) for name, work in works.items()
        ]
        for thread in self._threads:
            thread.start()

    def stop(self) -> None:
        """Close all connections and the port. Blocks for up to `TICK_S`. Does nothing without `start`."""
        if not self._threads:
            return
        self._stopping = True
        self._ready.close()
        for thread in self._threads:
            thread.join()
        self._epoll.close()
        self._socket.close()
        for connection in self._connections.values():
            connection.socket.close()
        self._connections.clear()
        self._of_host.clear()

    def offer(
        self, rows: Sequence[memoryview], reader: Reader, on_last: Callable[[], None] = lambda: None
    ) -> Transfer:
        """Let `reader` read `rows`, which stay pinned until `Transfer.ended`. For the event loop.

        `on_last` is called on the event loop before the last bytes are sent.
        """
        transfer = Transfer(self, rows, reader, on_last)
        transfer.due = monotonic() + self._reader_idle_s
        with self._lock:
            self._offered[transfer.secret] = transfer
        return transfer

    def forget(self, transfer: Transfer) -> bool:
        """Withdraw a transfer; return whether no thread reads its rows now. For the event loop."""
        with self._lock:
            self._offered.pop(transfer.secret, None)
            transfer.is_withdrawn = True
            return not transfer.is_read

    # The thread that waits for sockets

    def _wait_for_sockets(self) -> None:
        next_tick = 0.0
        while not self._stopping:
            files = [file for file, _ in self._epoll.poll(TICK_S)]
            for file in files:
                if file != self._socket.fileno():
                    self._disarm(self._connections[file])
            if self._socket.fileno() in files:  # last, because it may close connections
                self._accept()
            if (now := monotonic()) >= next_tick:
                next_tick = now + TICK_S
                self._tick(now)

    def _accept(self) -> None:
        for _ in range(ACCEPTED_AT_ONCE):
            try:
                accepted, address = self._socket.accept()
            except BlockingIOError:
                return
            except OSError:  # no file descriptor is free: try again at the next tick
                self._epoll.modify(self._socket, 0)
                return
            kind = "ipv6" if ":" in address[0] else "ipv4"
            host = host_of(f"{kind}:[{address[0]}]:{address[1]}")
            if not self._has_room(host):
                accepted.close()
                continue
            accepted.setblocking(False)
            connection = _Connection(accepted, host, shaken=self._certificates is None)
            if self._certificates is not None:
                try:
                    connection.socket = self._certificates.server_context().wrap_socket(
                        accepted, server_side=True, do_handshake_on_connect=False
                    )
                except (OSError, ValueError):
                    accepted.close()
                    continue
            with self._lock:
                self._connections[connection.socket.fileno()] = connection
                self._of_host.setdefault(host, set()).add(connection)
            connection.armed = True
            self._epoll.register(connection.socket, READABLE)

    def _has_room(self, host: str) -> bool:
        """Return whether a host may have one more connection. Closes the oldest idle one of it, or of the largest host.

        A host is the largest if it has most connections.
        """
        with self._lock:
            is_full = len(self._connections) >= self._max_connections
            mine = self._of_host.get(host, set())
            if is_full:
                mine = max(self._of_host.values(), key=len)
            elif len(mine) < self._max_connections // HOST_SHARE:
                return True
            idle = [each for each in mine if each.armed and each.transfer is None]
        if idle:
            self._close(min(idle, key=lambda each: each.due))
        return bool(idle)

    def _disarm(self, connection: _Connection) -> None:
        with self._lock:
            connection.armed = False
        self._ready.put(connection.holder, connection)

    def _tick(self, now: float) -> None:
        """End what is late, and connections whose transfer was withdrawn."""
        self._epoll.modify(self._socket, select.EPOLLIN)
        with self._lock:
            late = [transfer for transfer in self._offered.values() if transfer.due < now]
            for transfer in late:
                del self._offered[transfer.secret]
            stopped = [
                connection
                for connection in self._all()
                if connection.armed
                and (connection.due < now or (connection.transfer and connection.transfer.is_withdrawn))
            ]
        for transfer in late:
            self._tell(
                transfer,
                DeadlineError(
                    f"no connection presented the ticket within {self._reader_idle_s:g} s: open the rows port "
                    f"{self.port} to callers, or ask for inline rows"
                ),
            )
        for connection in stopped:
            self._fail(
                connection,
                DeadlineError(f"the caller stopped reading its rows for {self._reader_idle_s:g} s"),
            )

    # The threads that send

    def _send(self) -> None:
        while (connection := self._ready.take()) is not None:
            try:
                self._serve(connection)
            except Exception as error:
                log.exception("a connection of the rows port failed")
                self._fail(connection, UnavailableError(f"the server failed to send the rows: {error!r}"))

    def _serve(self, connection: _Connection) -> None:
        """Do what a connection is ready for: a handshake, reading its ticket, sending its rows."""
        try:
            if not connection.shaken:
                connection.socket.do_handshake()  # type: ignore[attr-defined] # with TLS, it is an SSLSocket
                connection.shaken = True
            if connection.transfer is None and not self._read_ticket(connection):
                return
            self._send_rows(connection)
        except BlockingIOError:
            self._arm(connection, WRITABLE if connection.transfer else READABLE)
        except ssl.SSLWantReadError:
            self._arm(connection, READABLE)
        except ssl.SSLWantWriteError:
            self._arm(connection, WRITABLE)
        except (OSError, ValueError) as error:
            self._fail(connection, UnavailableError(f"the connection for rows was lost: {error}"))

    def _read_ticket(self, connection: _Connection) -> bool:
        """Read a ticket; return whether it is valid. Closes the connection if it is not, or at its end."""
        while len(connection.secret) < TICKET_BYTES:
            data = connection.socket.recv(TICKET_BYTES - len(connection.secret))
            if not data:
                self._close(connection)
                return False
            connection.secret += data
        transfer = self._claim(connection)
        if transfer is None:
            with suppress(OSError):
                connection.socket.send(SIZE.pack(0))
            self._close(connection)
            return False
        connection.transfer, connection.holder = transfer, transfer.reader.holder
        connection.unsent = deque((memoryview(SIZE.pack(sum(map(len, transfer.rows)))), *transfer.rows))
        connection.told_last = False
        self._renew(connection)
        return True

    def _claim(self, connection: _Connection) -> Transfer | None:
        """Take the transfer of the ticket that was read; None if there is none for this connection."""
        names = _certificate_names(connection.socket)
        with self._lock:
            transfer = self._offered.get(connection.secret)
            if transfer is None:
                return None
            expected = transfer.reader.certificate_names
            if expected and names.isdisjoint(expected):
                return None
            return self._offered.pop(connection.secret)

    def _send_rows(self, connection: _Connection) -> None:
        """Send for one turn. Raises as a socket that does not block."""
        transfer = connection.transfer
        assert transfer is not None
        while connection.unsent:
            with self._lock:
                transfer.is_read = not transfer.is_withdrawn
            if not transfer.is_read:
                self._reset(connection)
                return
            try:
                self._send_pieces(connection, transfer)
            finally:
                with self._lock:
                    transfer.is_read = False
                    is_withdrawn = transfer.is_withdrawn
                if is_withdrawn:
                    self._tell(transfer, None)
            if connection.unsent and not self._ready.is_empty:
                self._ready.put(connection.holder, connection)
                return
        self._sent(connection, transfer)

    def _send_pieces(self, connection: _Connection, transfer: Transfer) -> None:
        left = TURN_BYTES
        while connection.unsent and left > 0:
            piece = connection.unsent[0][:left]
            if len(connection.unsent) == 1 and len(piece) == len(connection.unsent[0]):
                self._tell_last(connection, transfer)
            try:
                count = connection.socket.send(piece)
            except BlockingIOError:
                if not self._soon_writable(connection):
                    raise
                continue
            left -= count
            connection.until_due -= count
            if connection.until_due <= 0:
                self._renew(connection)
            if count == len(connection.unsent[0]):
                connection.unsent.popleft()
            else:
                connection.unsent[0] = connection.unsent[0][count:]

    def _soon_writable(self, connection: _Connection) -> bool:
        """Wait a moment for a reader that is nearly as fast as we are, unless others wait for this thread."""
        if not self._ready.is_empty:
            return False
        waiting = select.poll()
        waiting.register(connection.socket, select.POLLOUT)
        return bool(waiting.poll(WAIT_MS))

    def _tell_last(self, connection: _Connection, transfer: Transfer) -> None:
        if not connection.told_last:
            connection.told_last = True
            with suppress(RuntimeError):  # the loop was closed
                self._loop.call_soon_threadsafe(transfer.last_bytes)

    def _renew(self, connection: _Connection) -> None:
        """Give a reader time for more bytes."""
        connection.due = monotonic() + self._reader_idle_s
        connection.until_due = PROGRESS_BYTES

    def _sent(self, connection: _Connection, transfer: Transfer) -> None:
        connection.transfer, connection.secret = None, b""
        connection.holder = connection.host
        connection.due = monotonic() + NEXT_TICKET_S
        self._tell(transfer, None)
        # TLS may have read the next ticket already, so that the socket has nothing to read.
        if _pending(connection.socket):
            self._ready.put(connection.holder, connection)
        else:
            self._arm(connection, READABLE)

    def _all(self) -> list[_Connection]:
        return list(self._connections.values())  # at once: other threads close connections

    # Any thread that has the connection

    def _arm(self, connection: _Connection, events: int) -> None:
        """Pass a connection on to the thread that waits for sockets."""
        with self._lock:
            connection.armed = True
            self._epoll.modify(connection.socket, events)

    def _fail(self, connection: _Connection, error: EncoderError) -> None:
        transfer = connection.transfer
        self._reset(connection)
        if transfer is not None:
            self._tell(transfer, error)

    def _reset(self, connection: _Connection) -> None:
        """Close a connection whose reader does not get the rest. The kernel would keep what it has for minutes."""
        with suppress(OSError):
            connection.socket.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, AT_ONCE)
        self._close(connection)

    def _close(self, connection: _Connection) -> None:
        connection.transfer = None
        connection.unsent.clear()
        file = connection.socket.fileno()
        with self._lock:
            if self._connections.get(file) is connection:
                del self._connections[file]
                of_host = self._of_host[connection.host]
                of_host.discard(connection)
                if not of_host:
                    del self._of_host[connection.host]
        connection.socket.close()  # which also ends its registration

    def _tell(self, transfer: Transfer, error: EncoderError | None) -> None:
        with suppress(RuntimeError):  # the loop was closed
            self._loop.call_soon_threadsafe(transfer.end, error)


def _pending(connection: socket.socket) -> int:
    return connection.pending() if isinstance(connection, ssl.SSLSocket) else 0


def _certificate_names(connection: socket.socket) -> set[str]:
    """Return the names in the client's certificate, as gRPC has them."""
    found = connection.getpeercert() if isinstance(connection, ssl.SSLSocket) else None
    if not found:
        return set()
    subject: Iterable[Iterable[tuple[str, str]]] = found.get("subject", ())  # type: ignore[assignment]
    others: Iterable[tuple[str, str]] = found.get("subjectAltName", ())  # type: ignore[assignment]
    names = {value for part in subject for kind, value in part if kind == "commonName"}
    return names | {value for _, value in others}
