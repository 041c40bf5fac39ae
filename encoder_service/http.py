"""The HTTP port: metrics, health for tools without gRPC, and a status page; and the lag of the server's event loop.

The port runs its own event loop in its own thread, because health must report a server's event loop that is stuck.
Metrics and the page may be restricted to some readers. Health is open to all, because probes have no token. It says
nothing but the state.
"""

import asyncio
import logging
import socket
import ssl
import threading
from collections.abc import Callable, Mapping
from contextlib import suppress
from functools import partial
from html import escape
from http import HTTPStatus
from time import monotonic

from encoder_contract.certificates import Certificates
from encoder_contract.errors import ForbiddenError, UnauthenticatedError
from encoder_service.config import ConfigError, flag
from encoder_service.metrics import Metrics

log = logging.getLogger(__name__)

# An event loop that has not run for this long is stuck: none of its steps takes more than milliseconds.
STUCK_S = 10.0
# Ten would suffice for a few scrapers, probes and people. A higher limit gives each connection more time while a client
# keeps opening new ones.
MAX_CONNECTIONS = 64
# Limit for the whole connection, even if bytes keep arriving: a probe sends its request and reads the answer at once.
CONNECTION_S = 10
# With more than `MAX_CONNECTIONS` open, a connection has this long to send its request. Then a newer one replaces it.
REQUEST_S = 0.1
MAX_REQUEST_BYTES = 16 << 10
ACCEPT_AGAIN_S = 0.1  # pause after a failed accept: the process has no free file descriptor

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


class HttpPort:
    """Serves `/`, `/metrics`, `/healthz` (the event loop runs), `/readyz` (it also accepts calls) and `/startz`.

    A server is ready while it accepts calls and one of its devices answers. `/startz` also fails until the server has
    joined its index once, if it has one.
    """

    def __init__(
        self,
        listen: str,
        *,
        title: str,
        facts: Callable[[], Mapping[str, str]],
        metrics: Callable[[], bytes],
        last_tick: Callable[[], float],
        not_ready: Callable[[], str],
        never_joined: Callable[[], str] = lambda: "",
        certificates: Certificates | None = None,
        check_reader: Callable[[str], None] | None = None,
    ) -> None:
        """Bind `listen` (host:port); with `certificates`, serve HTTPS.

        `never_joined` says why the server has not joined its index yet; empty if it has, or has none.

        `check_reader` gets the Authorization header of a client that asks for metrics or the page. It runs on the
        port's thread, and raises `UnauthenticatedError` or `ForbiddenError` for a client that may not read them.
        Without it, all clients may. Raises `OSError` for an unavailable address, `ValueError` for an invalid one.
        """
        host, _, port = listen.rpartition(":")
        self._socket = socket.create_server(
            (host.strip("[]"), int(port)),
            family=socket.AF_INET6 if ":" in host else socket.AF_INET,
            backlog=MAX_CONNECTIONS,
            dualstack_ipv6=host == "[::]" and socket.has_dualstack_ipv6(),  # as gRPC does
        )
        self._socket.setblocking(False)
        self.endpoint = f"{host}:{self._socket.getsockname()[1]}"
        self._title = title
        self._facts = facts
        self._metrics = metrics
        self._last_tick = last_tick
        self._not_ready = not_ready
        self._never_joined = never_joined
        self._certificates = certificates
        self._check_reader = check_reader
        self._open: dict[asyncio.Task[None], float] = {}  # connection, oldest first -> when it was accepted
        self._requested: set[asyncio.Task[None]] = set()  # connections that have sent a whole request

    def start(self) -> None:
        self._loop = asyncio.new_event_loop()
        self._serving = self._loop.create_task(self._serve())
        self._thread = threading.Thread(target=self._run, name="http-port", daemon=True)
        self._thread.start()

    def stop(self) -> None:
        """Close all connections and release the port."""
        self._loop.call_soon_threadsafe(self._serving.cancel)
        self._thread.join()

    def _run(self) -> None:
        with suppress(asyncio.CancelledError):
            self._loop.run_until_complete(self._serving)
        self._loop.close()

    async def _serve(self) -> None:
        """Accept connections until cancelled."""
        with self._socket:
            try:
                while True:
                    try:
                        accepted, _ = await self._loop.sock_accept(self._socket)
                    except OSError:
                        await asyncio.sleep(ACCEPT_AGAIN_S)
                        continue
                    task = self._loop.create_task(self._handle(accepted))
                    self._open[task] = monotonic()
                    task.add_done_callback(partial(self._ended, accepted))
                    if len(self._open) > MAX_CONNECTIONS:
                        await self._make_room()
            finally:
                for task in self._open:
                    task.cancel()
                await asyncio.gather(*self._open, return_exceptions=True)

    def _ended(self, accepted: socket.socket, task: asyncio.Task[None]) -> None:
        del self._open[task]
        self._requested.discard(task)
        accepted.close()

    async def _make_room(self) -> None:
        """Wait until a connection ends. After `REQUEST_S`, close the oldest one that has not sent its request."""
        oldest = min(
            self._open, key=self._requested.__contains__
        )  # if all have sent theirs, the oldest of all
        left_s = max(0.0, self._open[oldest] + REQUEST_S - monotonic())
        ended, _ = await asyncio.wait(self._open, timeout=left_s, return_when=asyncio.FIRST_COMPLETED)
        if not ended:
            oldest.cancel()
            await asyncio.wait([oldest])

    async def _handle(self, accepted: socket.socket) -> None:
        """Read one request and answer it, within `CONNECTION_S`."""
        reader = asyncio.StreamReader(MAX_REQUEST_BYTES)
        # ValueError: the files of certificates are just being replaced.
        with suppress(OSError, ValueError, asyncio.IncompleteReadError, asyncio.LimitOverrunError):
            async with asyncio.timeout(CONNECTION_S):  # TimeoutError is an OSError
                transport, protocol = await self._loop.connect_accepted_socket(
                    lambda: asyncio.StreamReaderProtocol(reader), accepted, ssl=self._tls()
                )
                try:
                    writer = asyncio.StreamWriter(transport, protocol, reader, self._loop)
                    request = await reader.readuntil(b"\r\n\r\n")
                    task = asyncio.current_task()
                    assert task is not None
                    self._requested.add(task)
                    writer.write(await self._answer(request.decode("latin-1")))
                    writer.close()
                    await writer.wait_closed()
                finally:
                    transport.abort()

    def _tls(self) -> ssl.SSLContext | None:
        """Return the TLS context; None without TLS. It asks for no client certificates: probes have none."""
        return None if self._certificates is None else self._certificates.server_context(open_to_all=True)

    async def _answer(self, request: str) -> bytes:
        first, *lines = request.split("\r\n")
        # Any method will do: load balancers send GET, HEAD or OPTIONS.
        path = first.partition(" ")[2].partition(" ")[0].partition("?")[0]
        late_s = monotonic() - self._last_tick()
        stuck = "" if late_s < STUCK_S else f"the event loop has been stuck for {late_s:.0f} s"
        problem = stuck or self._not_ready()
        if path == "/healthz":
            return _health(stuck)
        note = f"the index was never joined: {missing}" if (missing := self._never_joined()) else ""
        if path == "/readyz":
            return _health(problem, note)
        if path == "/startz":
            return _health(problem or note)
        if (refusal := self._refusal(lines)) is not None:
            return refusal
        if path == "/metrics":
            try:  # in a thread: reading metrics may wait for a device that hangs, and health must not wait for it
                samples = await asyncio.to_thread(self._metrics)
            except Exception:
                log.exception("while reading metrics")
                return _response(HTTPStatus.INTERNAL_SERVER_ERROR, "metrics cannot be read: see the log")
            return _response(HTTPStatus.OK, samples.decode(), kind="text/plain; version=0.0.4")
        if path == "/":
            rows = "".join(f"<tr><th>{escape(k)}<td>{escape(v)}" for k, v in self._facts().items())
            page = PAGE.format(
                title=escape(self._title), state=escape(problem or note or "serving"), rows=rows
            )
            return _response(HTTPStatus.OK, page, kind="text/html")
        return _response(HTTPStatus.NOT_FOUND, "not found: see / for links")

    def _refusal(self, lines: list[str]) -> bytes | None:
        """Return the answer to a client that may not read metrics and the page; None for one that may."""
        headers = {name.lower(): value.strip() for name, _, value in (line.partition(":") for line in lines)}
        try:
            if self._check_reader is not None:
                self._check_reader(headers.get("authorization", ""))
        except UnauthenticatedError as error:
            return _response(HTTPStatus.UNAUTHORIZED, error.message, ("WWW-Authenticate", "Bearer"))
        except ForbiddenError as error:
            return _response(HTTPStatus.FORBIDDEN, error.message)
        return None


def _health(problem: str, note: str = "") -> bytes:
    """Return the answer to a probe; `note` is a further line for people, and changes no status."""
    status = HTTPStatus.SERVICE_UNAVAILABLE if problem else HTTPStatus.OK
    return _response(status, "\n".join(filter(None, (problem or "ok", note))))


def _response(status: HTTPStatus, text: str, *headers: tuple[str, str], kind: str = "text/plain") -> bytes:
    content = text.removesuffix("\n").encode() + b"\n"
    all_headers = (
        ("Content-Type", f"{kind}; charset=utf-8"),
        ("Content-Length", str(len(content))),
        ("Cache-Control", "no-store"),
        ("Connection", "close"),
        *headers,
    )
    lines = "".join(f"{name}: {value}\r\n" for name, value in all_headers)
    return f"HTTP/1.1 {status} {status.phrase}\r\n{lines}\r\n".encode() + content


PERIOD_S = 0.1  # ten samples a second are cheap, and catch anything that blocks the loop for longer


class Watch:
    """Measures the lag of the event loop, and serves the HTTP port. Without a port, `endpoint` and `url` are empty."""

    def __init__(
        self,
        listen: str,
        metrics: Metrics,
        *,
        not_ready: Callable[[], str],
        never_joined: Callable[[], str] = lambda: "",
        title: str,
        facts: Callable[[], Mapping[str, str]],
        certificates: Certificates | None = None,
        check_reader: Callable[[str], None] | None = None,
    ) -> None:
        """Bind `listen`, unless it is empty: see `HttpPort`. Raises `ConfigError` if the address is unavailable."""
        self._observe = metrics.loop_lag
        self._last_tick = monotonic()  # when the event loop last ran
        self._port: HttpPort | None = None
        if listen:
            try:
                self._port = HttpPort(
                    listen,
                    title=title,
                    facts=facts,
                    metrics=metrics.exposition,
                    last_tick=lambda: self._last_tick,
                    not_ready=not_ready,
                    never_joined=never_joined,
                    certificates=certificates,
                    check_reader=check_reader,
                )
            except OSError as error:
                raise ConfigError(
                    f"{flag('metrics_listen')} {listen}: the address is taken, or does not belong to this host "
                    f"({error.strerror}); port 0 picks a free port"
                ) from error
        self.endpoint = self._port.endpoint if self._port else ""
        self.url = f"{'https' if certificates else 'http'}://{self.endpoint}/" if self._port else ""

    def start(self) -> None:
        """Start measuring the running event loop, and serving."""
        self._measuring = asyncio.create_task(self._measure(), name="loop-lag")
        if self._port is not None:
            self._port.start()

    async def stop(self) -> None:
        self._measuring.cancel()
        if self._port is not None:
            await asyncio.to_thread(self._port.stop)

    async def _measure(self) -> None:
        while True:
            due = monotonic() + PERIOD_S
            await asyncio.sleep(PERIOD_S)
            self._last_tick = monotonic()
            self._observe(max(0.0, self._last_tick - due))
