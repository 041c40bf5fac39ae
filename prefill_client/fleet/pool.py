"""Connections to the servers of a fleet: opened on demand, checked to have one model, and watched by health checks."""

import asyncio
import logging
import socket
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager, suppress
from functools import partial

import grpc
from grpc_health.v1 import health_pb2, health_pb2_grpc

from encoder_contract.endpoint import DNS
from encoder_contract.errors import (
    DeadlineError,
    EncoderError,
    ModelMismatchError,
    OverloadedError,
    StaleHandleError,
    UnavailableError,
)
from prefill_client.daemon_thread import on_daemon_thread
from prefill_client.fleet.routing import Router
from prefill_client.transport import Receivers, receivers
from prefill_client.transport.channels import Channels
from prefill_client.transport.connection import WHY_S, Connection, Description
from prefill_client.transport.shared_memory import unmap_dead

log = logging.getLogger(__name__)

# Pause before a server that went away is tried again: cheap, and as short as a restart.
WATCH_AGAIN_S = 1.0
# Pause before a server is watched again that refused it. A full server has thousands of watchers already.
WATCH_REFUSED_S = 10.0
# How long the other servers of a fleet may take to connect after the first one before they are marked down.
OTHERS_S = 0.25
# How long a call waits for a connection once the first server has answered. Another server is quicker than that.
CONNECT_AGAIN_S = 2.0
# How long the attempt to connect then continues, for later calls: a server that gets no CPU time needs more than 2 s.
ATTEMPT_S = 20.0
# How often names are resolved again, for fleets that grow and shrink behind a headless Service.
RESOLVE_EVERY_S = 5.0
# How long a retired connection stays open for its calls, longer than calls usually take. After that, rows that are
# still held are fetched again.
RETIRE_S = 600.0


class Pool:
    """Connections by endpoint. `router` decides which one to prefer, informed by health checks and failed calls.

    An endpoint is host:port, unix:/path, or dns:host:port for every address of the name.
    """

    def __init__(
        self,
        endpoints: Sequence[str],
        *,
        model: bytes,
        processor: bytes,
        channels: Channels,
        connect_timeout_s: float,
        wait: bool,
        receivers: Receivers = receivers,
    ) -> None:
        self._channels = channels
        self._names = list(dict.fromkeys(endpoints))
        self._expected = {"model": model, "processor": processor}
        self.description: Description
        """The description of the first server; all servers of a pool have its model. Set by `open`."""
        self._timeout_s = connect_timeout_s
        self._attempt_s = connect_timeout_s
        self._wait = wait
        self._receivers = receivers
        self._connections: dict[str, asyncio.Task[Connection]] = {}
        self._watches: dict[str, asyncio.Task[None]] = {}
        self._retired: set[asyncio.Task[None]] = set()
        self._resolving: asyncio.Task[None] | None = None
        self._unresolved: dict[str, OSError] = {}  # names that do not resolve, and the reason
        self._closed = False
        self.why_down: dict[str, str] = {}
        """The last error of each server that does not serve, by endpoint."""
        self.router = Router(name for name in self._names if not name.startswith(DNS))

    async def open(self) -> None:
        """Wait for the first server that answers, and start to watch all servers.

        Raises the first error if no server can be used.
        """
        named = any(name.startswith(DNS) for name in self._names)
        attempts: dict[str, asyncio.Task[Connection]] = {}
        errors: list[EncoderError] = []
        first: Connection | None = None
        try:
            # Connecting has its own timeout; waiting for addresses needs this one.
            with suppress(TimeoutError):
                async with asyncio.timeout(self._timeout_s if named else None):
                    if named:
                        await self._resolve()
                        self._resolving = asyncio.create_task(self._resolve_again(), name="resolve")
                    self._watch_all()
                    first = await self._first_connection(attempts, errors)
            if first is None:
                raise errors[0] if errors else self._unanswered()
            self._timeout_s, self._wait = min(self._timeout_s, CONNECT_AGAIN_S), False
            self._attempt_s = ATTEMPT_S
            await self._mark_late_down(attempts)
            self.description = first.description
        finally:
            for attempt in attempts.values():
                attempt.cancel()

    async def _first_connection(
        self, attempts: "dict[str, asyncio.Task[Connection]]", errors: list[EncoderError]
    ) -> Connection | None:
        """Return the first connection, or None if all attempts failed. Fills `attempts` by endpoint, and `errors`.

        With `wait`, this also tries addresses that a name gets later, because starting servers have none yet.
        """
        while True:
            for endpoint in self.router.endpoints:
                if endpoint not in attempts:
                    attempts[endpoint] = asyncio.create_task(self.connection(endpoint))
            running = [attempt for attempt in attempts.values() if not attempt.done()]
            if not running:
                if errors or not self._wait or self._resolving is None:
                    return None
                await asyncio.sleep(WATCH_AGAIN_S)
                continue
            ended, _ = await asyncio.wait(running, timeout=WATCH_AGAIN_S, return_when=asyncio.FIRST_COMPLETED)
            for attempt in ended:
                try:
                    return attempt.result()
                except EncoderError as error:
                    errors.append(error)

    def _unanswered(self) -> UnavailableError:
        reasons = [f"; {name} does not resolve: {error}" for name, error in self._unresolved.items()]
        return UnavailableError(f"no server answers at {', '.join(self._names)}{''.join(reasons)}")

    async def _mark_late_down(self, attempts: "dict[str, asyncio.Task[Connection]]") -> None:
        """Mark servers down that have not connected yet. Their health checks mark them up later."""
        await asyncio.wait(attempts.values(), timeout=OTHERS_S)
        for endpoint, attempt in attempts.items():
            if attempt.done() and isinstance(attempt.exception(), OverloadedError):
                continue
            if not attempt.done() or attempt.exception() is not None:
                self.router.mark_down(endpoint)

    async def connection(self, endpoint: str) -> Connection:
        """Return the connection to `endpoint`, opened on first use. Callers share one attempt, which may outlast them.

        Raises `UnavailableError` if there is no connection in time or the pool is closed, and `ModelMismatchError`.
        """
        # A retry may come while the client closes. Nothing would close a connection that is opened then.
        if self._closed:
            raise UnavailableError("the client is closed")
        task = self._connections.get(endpoint)
        if task is None or self._is_outdated(task):
            if task is not None:
                self._retire(endpoint, task.result())
            task = self._connections[endpoint] = asyncio.create_task(self._connect(endpoint))
        try:
            async with asyncio.timeout(self._timeout_s + (WHY_S if self._wait else 0.0)):
                return await asyncio.shield(task)
        except TimeoutError as error:
            raise UnavailableError(f"{endpoint}: no connection within {self._timeout_s:g} s") from error
        except EncoderError:
            if self._connections.get(endpoint) is task:
                del self._connections[endpoint]
            raise

    @asynccontextmanager
    async def attempt(self, endpoint: str, timeout_s: float) -> AsyncIterator[Connection]:
        """Lend the connection to `endpoint` for an attempt of at most `timeout_s`, and tell the router how it ended.

        Raises the errors of `connection` and of the block, and `DeadlineError` if the attempt takes too long.
        """
        try:
            async with asyncio.timeout(timeout_s):
                yield await self.connection(endpoint)
        except TimeoutError:
            raise DeadlineError(f"{endpoint} did not answer before the deadline") from None
        except EncoderError as error:
            raise self.noted(endpoint, error) from error
        self.router.succeeded(endpoint)

    def noted(self, endpoint: str, error: EncoderError) -> EncoderError:
        """Tell the router that an attempt failed; return the error to act on.

        A server may have got other weights since it was connected. It is down until it has ours again, and the attempt
        is made elsewhere while another server is up.
        """
        if isinstance(error, ModelMismatchError):
            self.router.mark_down(endpoint)
            self.why_down[endpoint] = error.message
            if (task := self._connections.get(endpoint)) is not None and _is_open(task):
                self._drop(endpoint, task.result())
            return UnavailableError(error.message) if self.router.any_serves else error
        if isinstance(error, UnavailableError) and not isinstance(error, StaleHandleError):
            self.router.failed(endpoint)
        return error

    async def close(self) -> None:
        """Close all connections, which ends running calls."""
        self._closed = True
        attempts = list(self._connections.values())
        tasks = [*attempts, *self._watches.values(), *self._retired]
        if self._resolving is not None:
            tasks.append(self._resolving)
        for task in tasks:
            task.cancel()
        try:
            await asyncio.gather(*tasks, return_exceptions=True)
        finally:  # also if this is cancelled, even twice
            await asyncio.shield(
                asyncio.gather(*(each.result().close() for each in attempts if _is_open(each)))
            )

    def _is_outdated(self, task: "asyncio.Task[Connection]") -> bool:
        """Return whether the certificates have changed since the connection was opened."""
        return _is_open(task) and task.result().version != self._channels.version

    def _retire(self, endpoint: str, connection: Connection) -> None:
        """Close a connection after its calls had time to end, and watch its server by the next connection."""
        closing = asyncio.create_task(connection.close(RETIRE_S), name=f"retire {endpoint}")
        self._retired.add(closing)
        closing.add_done_callback(self._retired.discard)
        watch = self._watches.get(endpoint)
        if watch is not None and watch is not asyncio.current_task():
            del self._watches[endpoint]
            watch.cancel()
            self._watch_all()

    async def _connect(self, endpoint: str) -> Connection:
        connection = await Connection.open(
            endpoint, self._channels, self._attempt_s, wait=self._wait, receivers=self._receivers
        )
        found = {
            "model": connection.description.model_fingerprint,
            "processor": connection.description.processor_fingerprint,
        }
        for what, expected in self._expected.items():
            if expected and found[what] != expected:
                await connection.close()
                raise ModelMismatchError(
                    f"{what} fingerprint: expected {expected.hex()}, {endpoint} has {found[what].hex()}"
                )
        self.router.set_rate(endpoint, connection.patches_per_s)
        self._expected = found  # all servers of a pool must have the model of the first one
        return connection

    def _watch_all(self) -> None:
        for endpoint in self.router.endpoints:
            if endpoint not in self._watches:
                self._watches[endpoint] = asyncio.create_task(self._watch(endpoint), name=f"watch {endpoint}")
        for endpoint in set(self._watches) - set(self.router.endpoints):
            self._watches.pop(endpoint).cancel()
            self.why_down.pop(endpoint, None)

    async def _watch(self, endpoint: str) -> None:
        """Watch a server's health while it is in the fleet. The open stream also keeps the channel's pings going."""
        while True:
            connection: Connection | None = None
            try:
                connection = await self.connection(endpoint)
                watch = health_pb2_grpc.HealthStub(connection.channel).Watch(  # type: ignore[attr-defined]
                    health_pb2.HealthCheckRequest()
                )
                async for answer in watch:
                    if answer.status != health_pb2.HealthCheckResponse.SERVING:
                        self.why_down[endpoint] = (
                            "it does not serve: it starts, drains or has no working device"
                        )
                        break
                    self.router.mark_up(endpoint)
                    self.why_down.pop(endpoint, None)
                watch.cancel()  # otherwise a draining server would wait for this call
            except (EncoderError, grpc.aio.AioRpcError) as error:
                log.debug("%s: %s", endpoint, error)
                if _is_refusal(error):  # it answers, so only calls show whether it serves
                    self.router.mark_up(endpoint)
                    self.why_down.pop(endpoint, None)
                    await asyncio.sleep(WATCH_REFUSED_S)
                    continue
                self.why_down[endpoint] = _text_of(error)
            self.router.mark_down(endpoint)
            if connection is not None:
                self._drop(endpoint, connection)
            await on_daemon_thread(unmap_dead)
            await asyncio.sleep(WATCH_AGAIN_S)

    def _drop(self, endpoint: str, connection: Connection) -> None:
        """Retire the connection of a server that went away, because it may return with another segment or model."""
        task = self._connections.get(endpoint)
        if task is not None and _is_open(task) and task.result() is connection:
            del self._connections[endpoint]
            self._retire(endpoint, connection)

    async def _resolve_again(self) -> None:
        while True:
            await asyncio.sleep(WATCH_AGAIN_S if self._wait else RESOLVE_EVERY_S)
            await self._resolve()
            self._watch_all()

    async def _resolve(self) -> None:
        """Resolve the names and update the router. A name that does not resolve keeps its old addresses."""
        found: list[str] = []
        for name in self._names:
            if not name.startswith(DNS):
                found.append(name)
                continue
            host, _, port = name.removeprefix(DNS).lstrip("/").rpartition(":")
            try:
                answers = await on_daemon_thread(
                    partial(socket.getaddrinfo, host, port, type=socket.SOCK_STREAM)
                )
            except OSError as error:
                if name not in self._unresolved:
                    log.warning("%s does not resolve: %s", name, error)
                self._unresolved[name] = error
                found.extend(self.router.endpoints)
                continue
            self._unresolved.pop(name, None)
            found.extend(sorted({_authority(address) for *_, address in answers}))
        self.router.set_endpoints(dict.fromkeys(found))


def _text_of(error: EncoderError | grpc.aio.AioRpcError) -> str:
    return error.message if isinstance(error, EncoderError) else f"{error.code().name}: {error.details()}"


def _is_refusal(error: EncoderError | grpc.aio.AioRpcError) -> bool:
    """Return whether a server that lives refused a watch, or the connection for it."""
    if isinstance(error, grpc.aio.AioRpcError):
        return error.code() not in _GONE
    return isinstance(error, OverloadedError)


# What a watch ends with if the server ended, or nobody knows why. With any other status, the server refused it.
_GONE = {
    grpc.StatusCode.UNAVAILABLE,
    grpc.StatusCode.CANCELLED,
    grpc.StatusCode.UNKNOWN,
    grpc.StatusCode.INTERNAL,
    grpc.StatusCode.DEADLINE_EXCEEDED,
}


def _is_open(connecting: "asyncio.Task[Connection]") -> bool:
    return connecting.done() and not connecting.cancelled() and connecting.exception() is None


def _authority(address: tuple[object, ...]) -> str:
    host, port = address[0], address[1]
    return f"[{host}]:{port}" if ":" in str(host) else f"{host}:{port}"
