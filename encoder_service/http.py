"""The HTTP port: metrics, health for tools without gRPC, and a status page; and the event loop lag that health tells.

The port has its own threads and never uses the event loop. Metrics and the page are for whom `Readers` admit; probes
have no token, and health tells nothing else.
"""

import asyncio
import socket
import ssl
import sys
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import suppress
from functools import partial
from html import escape
from socketserver import TCPServer, ThreadingMixIn
from time import monotonic
from typing import TYPE_CHECKING, Any, Protocol
from wsgiref.simple_server import WSGIRequestHandler, WSGIServer

from encoder_contract.certificates import Certificates, Pem
from encoder_contract.errors import ForbiddenError, UnauthenticatedError
from encoder_service.config import ConfigError, flag
from encoder_service.metrics import Metrics, Reading

if TYPE_CHECKING:
    from _typeshed.wsgi import StartResponse, WSGIEnvironment

# An event loop that has not run for this long is stuck: its steps are bounded by milliseconds.
STUCK_S = 10.0
# Ten would do for a few scrapers, probes and people. A larger limit lets a new connection live longer when a client
# opens connections without end; each is a thread, and an idle thread costs some kilobytes.
MAX_CONNECTIONS = 64
# For the whole connection, however often a byte arrives: a probe sends its request and reads the answer at once.
CONNECTION_S = 10
CUT_OFF_S = 1  # a thread whose connection was closed ends in less, unless it is rendering an answer
POLL_S = 0.1  # how soon a stop and expired connections are noticed

PAGE = """<!doctype html>
<html lang="en"><head><meta charset="utf-8"><title>{title}</title><style>
body {{ font: 15px/1.5 system-ui, sans-serif; margin: 3rem auto; max-width: 44rem; padding: 0 1rem; color: #1f2328 }}
h1 {{ font-size: 1.4rem; margin-bottom: 0 }} p {{ color: #59636e; margin-top: .2rem }}
table {{ border-collapse: collapse; width: 100%; margin: 1.5rem 0 }}
th, td {{ text-align: left; padding: .35rem .8rem .35rem 0; border-bottom: 1px solid #d1d9e0; vertical-align: top }}
th {{ font-weight: 600; width: 9rem }} td {{ font-family: ui-monospace, monospace; font-size: 13px }}
a {{ color: #0969da; margin-right: 1.2rem }}
</style></head><body><h1>{title}</h1><p>{state}</p><table>{rows}</table>
<a href="/metrics">/metrics</a><a href="/healthz">/healthz</a><a href="/readyz">/readyz</a></body></html>
"""

Application = Callable[["WSGIEnvironment", "StartResponse"], Iterable[bytes]]


class Readers(Protocol):
    """Who may read metrics and the page."""

    def check_reader(self, authorization: str) -> None:
        """Raise `UnauthenticatedError` or `ForbiddenError` unless this header's sender may; called on any thread."""


class HttpPort:
    """Serves `/`, `/metrics`, `/healthz` (the event loop runs) and `/readyz` (and the server accepts calls)."""

    def __init__(
        self,
        listen: str,
        *,
        title: str,
        facts: Mapping[str, str],
        metrics: Application,
        last_tick: Callable[[], float],
        draining: Callable[[], bool],
        certificates: Certificates | None = None,
        readers: Readers | None = None,
    ) -> None:
        """Bind `listen` (host:port), for HTTPS with `certificates`; without `readers`, everybody may read everything.

        Raises `OSError` if it is unavailable, `ValueError` for an invalid address.
        """
        host, _, port = listen.rpartition(":")
        self._title = title
        self._facts = facts
        self._metrics = metrics
        self._last_tick = last_tick
        self._draining = draining
        self._readers = readers
        server = _Ipv6Server if ":" in host else _Server
        self._server = server((host.strip("[]"), int(port)), _QuietHandler)
        self._server.set_app(self._answer)
        if certificates is not None:
            self._server.use_tls(certificates)
        self.endpoint = f"{host}:{self._server.server_port}"
        self._thread = threading.Thread(
            target=partial(self._server.serve_forever, POLL_S), name="http-port", daemon=True
        )

    def start(self) -> None:
        """Start answering."""
        self._thread.start()

    def stop(self) -> None:
        """Stop, and release the port."""
        self._server.shutdown()
        self._server.server_close()

    def _answer(self, environ: "WSGIEnvironment", start_response: "StartResponse") -> Iterable[bytes]:
        path = environ.get("PATH_INFO", "/")
        if path == "/healthz":
            return _text(start_response, *self._health())
        if path == "/readyz":
            health = self._health()
            draining = health[0] and self._draining()
            return _text(start_response, *((False, "draining") if draining else health))
        if (refusal := self._refusal(environ)) is not None:
            return _refused(start_response, refusal)
        if path == "/metrics":
            return self._metrics(environ, start_response)
        if path == "/":
            return self._page(start_response)
        start_response("404 Not Found", [("Content-Type", "text/plain; charset=utf-8")])
        return [b"not found: / has the links\n"]

    def _refusal(self, environ: "WSGIEnvironment") -> UnauthenticatedError | ForbiddenError | None:
        try:
            if self._readers is not None:
                self._readers.check_reader(environ.get("HTTP_AUTHORIZATION", ""))
        except (UnauthenticatedError, ForbiddenError) as error:
            return error
        return None

    def _health(self) -> tuple[bool, str]:
        late = monotonic() - self._last_tick()
        return (True, "ok") if late < STUCK_S else (False, f"the event loop has not turned for {late:.0f} s")

    def _page(self, start_response: "StartResponse") -> Iterable[bytes]:
        healthy, text = self._health()
        rows = "".join(f"<tr><th>{escape(k)}<td>{escape(v)}" for k, v in self._facts.items())
        state = "draining" if healthy and self._draining() else "serving" if healthy else text
        start_response("200 OK", [("Content-Type", "text/html; charset=utf-8")])
        return [PAGE.format(title=escape(self._title), state=escape(state), rows=rows).encode()]


def _text(start_response: "StartResponse", good: bool, text: str) -> Iterable[bytes]:
    status = "200 OK" if good else "503 Service Unavailable"
    start_response(status, [("Content-Type", "text/plain; charset=utf-8"), ("Cache-Control", "no-store")])
    return [text.encode() + b"\n"]


def _refused(
    start_response: "StartResponse", error: UnauthenticatedError | ForbiddenError
) -> Iterable[bytes]:
    known = isinstance(error, ForbiddenError)
    headers = [("Content-Type", "text/plain; charset=utf-8"), ("Cache-Control", "no-store")]
    if not known:
        headers.append(("WWW-Authenticate", "Bearer"))
    start_response("403 Forbidden" if known else "401 Unauthorized", headers)
    return [error.message.encode() + b"\n"]


class _Server(ThreadingMixIn, WSGIServer):
    """A thread per connection, up to a limit; over it, the longest idle connection is closed for the new one."""

    daemon_threads = True
    allow_reuse_port = False  # a taken port is an error
    request_queue_size = MAX_CONNECTIONS

    def __init__(self, *arguments: Any) -> None:
        self._room = threading.BoundedSemaphore(MAX_CONNECTIONS)
        self._lock = threading.Lock()
        # Start time of each open connection. First those without a request yet, the oldest first.
        self._began: dict[socket.socket, float] = {}
        self._certificates: Certificates | None = None
        self._pem: Pem | None = None
        self._context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        super().__init__(*arguments)

    def use_tls(self, certificates: Certificates) -> None:
        """Speak TLS on connections from now on. Probes have no certificate, so none is asked for."""
        self._certificates = certificates

    def get_request(self) -> tuple[Any, Any]:
        """Accept a connection. The handshake is left to its thread, within the time that the connection has."""
        accepted, address = super().get_request()
        if self._certificates is None:
            return accepted, address
        if (pem := self._certificates.pem) is not self._pem:
            with suppress(ValueError):  # changed this moment: the next connection tries again
                self._certificates.load_into(self._context)
                self._pem = pem
        return (
            self._context.wrap_socket(accepted, server_side=True, do_handshake_on_connect=False),
            address,
        )

    def process_request(self, request: Any, client_address: Any) -> None:
        if not self._room.acquire(blocking=False):
            self._cut_off(lambda open_: list(open_)[:1])
            if not self._room.acquire(timeout=CUT_OFF_S):
                self.shutdown_request(request)
                return
        with self._lock:
            self._began[request] = monotonic()
        try:
            super().process_request(request, client_address)
        except RuntimeError:  # no thread could be started
            self._room.release()
            raise

    def process_request_thread(self, request: Any, client_address: Any) -> None:
        try:
            super().process_request_thread(request, client_address)
        finally:
            self._room.release()

    def asked(self, request: socket.socket) -> None:
        """Note that a connection's request has arrived: others are closed before it."""
        with self._lock:
            if request in self._began:
                self._began[request] = self._began.pop(request)

    def service_actions(self) -> None:
        """Close expired connections; called after each connection and at every poll."""
        late = monotonic() - CONNECTION_S
        self._cut_off(lambda open_: [request for request, began in open_.items() if began < late])

    def server_close(self) -> None:
        super().server_close()
        self._cut_off(list)

    def _cut_off(self, choose: Callable[[Mapping[socket.socket, float]], list[socket.socket]]) -> None:
        """Shut down connections; their threads read end of file."""
        with self._lock:
            for request in choose(self._began):
                with suppress(OSError):  # the other side has disconnected
                    request.shutdown(socket.SHUT_RDWR)

    def shutdown_request(self, request: Any) -> None:
        # Removed before it is closed: its descriptor may be reused afterwards.
        with self._lock:
            self._began.pop(request, None)
        super().shutdown_request(request)

    def handle_error(self, request: Any, client_address: Any) -> None:
        if not isinstance(sys.exc_info()[1], OSError):  # a disconnect is not worth a log line
            super().handle_error(request, client_address)

    def server_bind(self) -> None:
        # Without HTTPServer's reverse lookup of this host's name, which may take seconds.
        TCPServer.server_bind(self)
        self.server_name, self.server_port = self.server_address[:2]  # type: ignore[assignment]
        self.setup_environ()


class _Ipv6Server(_Server):
    address_family = socket.AF_INET6


class _QuietHandler(WSGIRequestHandler):
    def parse_request(self) -> bool:
        """Read the request's lines."""
        is_good = super().parse_request()
        assert isinstance(self.server, _Server)
        self.server.asked(self.request)
        return is_good

    def log_message(self, *_: Any) -> None:
        """Log nothing: there is a scrape every few seconds."""


class Monitored(Protocol):
    """The server, as its monitoring sees it. Both are read on any thread."""

    @property
    def draining(self) -> bool:
        """Whether new calls are refused."""

    def readings(self) -> Iterator[Reading]:
        """Yield the state of the components at this moment."""


class Watch:
    """Measures the event loop and serves the HTTP port; `endpoint` is its address, empty without a port."""

    def __init__(
        self,
        listen: str,
        metrics: Metrics,
        server: Monitored,
        *,
        title: str,
        facts: Mapping[str, str],
        certificates: Certificates | None = None,
        readers: Readers | None = None,
    ) -> None:
        """Bind the port, if one is configured; see `HttpPort`. Raises `ConfigError` if it is unavailable."""
        self._lag = LoopLag(metrics.loop_lag)
        metrics.read_from(server.readings)
        self._port: HttpPort | None = None
        if listen:
            try:
                self._port = HttpPort(
                    listen,
                    title=title,
                    facts=facts,
                    metrics=metrics.wsgi(),
                    last_tick=lambda: self._lag.last_tick,
                    draining=lambda: server.draining,
                    certificates=certificates,
                    readers=readers,
                )
            except OSError as error:
                raise ConfigError(
                    f"{flag('metrics_listen')} {listen}: the address is taken or not one of this host "
                    f"({error.strerror}); port 0 picks a free port"
                ) from error
        self.endpoint = self._port.endpoint if self._port else ""
        self.url = f"{'https' if certificates else 'http'}://{self.endpoint}/" if self._port else ""

    def start(self) -> None:
        """Start, on the running event loop."""
        self._lag.start()
        if self._port is not None:
            self._port.start()

    def stop(self) -> None:
        """Stop. Takes up to half a second: do not call it on the event loop."""
        self._lag.stop()
        if self._port is not None:
            self._port.stop()


PERIOD_S = 0.1  # ten samples a second are cheap, and catch everything that blocks the loop for longer


class LoopLag:
    """Measures while it runs. `last_tick` is the last time the loop ran, on the monotonic clock."""

    def __init__(self, observe: Callable[[float], None]) -> None:
        self._observe = observe
        self._task: asyncio.Task[None] | None = None
        self.last_tick = monotonic()

    def start(self) -> None:
        """Start measuring, on the running loop."""
        self._task = asyncio.create_task(self._measure(), name="loop-lag")

    def stop(self) -> None:
        """Stop measuring."""
        if self._task is not None:
            self._task.cancel()

    async def _measure(self) -> None:
        while True:
            due = monotonic() + PERIOD_S
            await asyncio.sleep(PERIOD_S)
            self.last_tick = monotonic()
            self._observe(max(0.0, self.last_tick - due))
