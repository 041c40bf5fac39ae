"""The HTTP server of a service process: binds its port first, prints a banner once it answers, stops at a signal."""

import asyncio
import signal
import socket
from collections.abc import Callable, Coroutine, Iterator
from contextlib import contextmanager, suppress
from typing import Any, TypeVar

import uvicorn
from starlette.requests import Request

from encoder_contract.certificates import Certificates
from encoder_contract.command_line import say
from encoder_contract.endpoint import Endpoint, why_unbound
from encoder_contract.settings import ConfigError

Result = TypeVar("Result")


class HttpServer(uvicorn.Server):
    """A uvicorn server that exits with code 0 after a signal, which uvicorn itself would raise once more.

    It prints its banner once it answers requests, so that the parent process can wait for that.
    """

    def __init__(
        self,
        config: uvicorn.Config,
        banner: str,
        certificates: Certificates | None = None,
        before_stop: Callable[[], Coroutine[Any, Any, None]] | None = None,
    ) -> None:
        """`before_stop` is awaited at the signal, while requests are still accepted."""
        super().__init__(config)
        self._banner = banner
        self._before_stop = before_stop
        self._stopping: asyncio.Task[None] | None = None
        self._certificates = certificates
        self._pem = certificates.pem if certificates else None

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        """Start to answer requests, and print the banner."""
        await super().startup(sockets)
        if self.started:
            say(self._banner)

    async def on_tick(self, counter: int) -> bool:
        """Check every 0.1 s whether to stop, and every second for new certificates."""
        if (
            self._certificates is not None
            and counter % 10 == 0
            and (pem := self._certificates.pem) is not self._pem
        ):
            assert self.config.ssl is not None
            with suppress(ValueError):  # the files are changing at this moment: the next check loads them
                self._certificates.load_into(self.config.ssl)
                self._pem = pem
        return await super().on_tick(counter)

    @contextmanager
    def capture_signals(self) -> Iterator[None]:
        """Stop at SIGTERM and SIGINT."""
        for number in (signal.SIGTERM, signal.SIGINT):
            asyncio.get_running_loop().add_signal_handler(number, self._stop)
        yield

    def _stop(self) -> None:
        if self._stopping is None:
            self._stopping = asyncio.create_task(self._end(), name="stop")

    async def _end(self) -> None:
        try:
            if self._before_stop is not None:
                await self._before_stop()
        finally:
            self.should_exit = True


def bound(address: str) -> socket.socket:
    """Bind the port before slow work starts. Connections are refused until the server answers.

    Raises `ConfigError` if the address of `--listen` is not available.
    """
    host, port, _ = Endpoint.parse(address)
    listener = socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET)
    try:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind((host, port))
    except OSError as error:
        listener.close()
        raise ConfigError(f"--listen {address}: {why_unbound(error)}") from error
    return listener


class DisconnectedError(Exception):
    """The caller disconnected before it got its answer."""


async def cancel_on_disconnect(request: Request, work: Coroutine[Any, Any, Result]) -> Result:
    """Run `work`, and cancel it if the caller disconnects, which raises `DisconnectedError`.

    The request's body must have been read.
    """
    task = asyncio.create_task(work)
    watch = asyncio.create_task(_disconnected(request))
    try:
        await asyncio.wait({task, watch}, return_when=asyncio.FIRST_COMPLETED)
        if not task.done():
            raise DisconnectedError
        return task.result()
    finally:
        for other in (task, watch):
            other.cancel()
        await asyncio.gather(task, watch, return_exceptions=True)
        del task, watch, other  # an error refers to this frame, which would keep all that its work held


async def _disconnected(request: Request) -> None:
    while (await request.receive())["type"] != "http.disconnect":
        pass
