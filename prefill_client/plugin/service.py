"""An engine's connection to the encoder service: described at start, connected at the first image, probed when down."""

import asyncio
import logging
from collections.abc import Awaitable, Callable
from contextlib import suppress
from itertools import count
from typing import Generic, Protocol, TypeVar

from encoder_contract.backoff import backoff_s
from encoder_contract.errors import (
    DeadlineError,
    EncoderError,
    ModelMismatchError,
    Status,
    UnauthenticatedError,
    UnavailableError,
)
from prefill_client.blocking import connecting
from prefill_client.client import EncoderClient
from prefill_client.fleet.pool import RETIRE_S
from prefill_client.plugin.service_settings import ServiceSettings
from prefill_client.transport import Receivers, receivers
from prefill_client.transport.connection import Description

# Errors that the next request would get as well.
_DOWN = (
    Status.UNAVAILABLE,
    Status.DEADLINE_EXCEEDED,
    Status.FAILED_PRECONDITION,
    Status.UNAUTHENTICATED,
)
# How often a service that does not answer is probed.
FIRST_PROBE_S, LAST_PROBE_S = 1.0, 15.0


async def connect(
    settings: ServiceSettings,
    *,
    wait: bool = True,
    timeout_s: float | None = None,
    receivers: Receivers = receivers,
    check: Callable[[Description], None] | None = None,
    fingerprint: bytes = b"",
) -> EncoderClient:
    """Return a client of the service; with `wait`, wait for a service that is still starting.

    With `fingerprint`, only servers with this model fingerprint are used, unless the settings take any. `timeout_s`
    replaces the timeout of the settings. `check` raises `ValueError` for a service that the engine cannot use, or
    `OSError` if it cannot read the engine's checkpoint; both become a `ModelMismatchError`, which is also raised if the
    settings name another fingerprint. `check` runs on a thread. Also raises the errors of `EncoderClient.connect`.
    """
    demanded = settings.demanded_fingerprint
    if fingerprint and demanded and fingerprint != demanded:
        raise ModelMismatchError(
            f"the engine has other vision weights by now, {fingerprint.hex()}, than model_fingerprint names"
        )
    client = await EncoderClient.connect(
        settings.endpoints,
        model_fingerprint=b"" if settings.takes_any_model else demanded or fingerprint,
        tenant_salt=settings.tenant_salt.encode(),
        credentials=settings.credentials,
        timeout_s=timeout_s or (settings.start_timeout_s if wait else settings.submit_timeout_s),
        wait=wait,
        receivers=receivers,
    )
    if check is None:
        return client
    try:
        await asyncio.to_thread(check, client.description)
    except BaseException as error:  # cancelled too, if the engine ends now
        await client.close()
        if isinstance(error, ValueError | OSError):
            raise ModelMismatchError(str(error)) from error
        raise
    return client


connect_blocking = connecting(connect)
"""`connect`, for threads."""


def check_at_start(
    settings: ServiceSettings,
    check: Callable[[Description], None],
    log: logging.Logger,
    *,
    model: str,
    wait: bool = True,
    required: bool = True,
) -> None:
    """Compare the service with an engine that starts, whose checkpoint is `model`.

    With `wait`, waits for a service that is still starting. If none answers, raises `UnavailableError` or
    `DeadlineError` for one that is `required`. Also raises the errors of `check` and the others of `connect`.
    """
    if settings.takes_any_model:
        log.warning(
            'the service\'s model is not compared with %s, as "model_fingerprint" is "any": if it has other weights, '
            "answers about images are wrong",
            model,
        )
    timeout_s = settings.start_timeout_s if wait else settings.submit_timeout_s
    log.info("waiting for the encoder service at %s, at most %g s", ", ".join(settings.endpoints), timeout_s)
    try:
        with connect_blocking(settings, wait=wait) as client:
            description = client.description
    except (UnavailableError, DeadlineError) as error:
        if required:
            raise
        log.warning("the engine starts without the encoder service: %s", error.message)
    else:
        check(description)


class _Closable(Protocol):
    async def close(self) -> None: ...


Client = TypeVar("Client", bound=_Closable)


class WatchedClient(Generic[Client]):
    """A client that connects when it is first needed. Not thread-safe: use from one event loop.

    While the service is `down`, requests need not wait for it: it is probed, on separate connections, until it answers.
    `open_client` connects and checks the service; it raises `EncoderError`, or `ValueError` for credentials.
    """

    def __init__(self, open_client: Callable[[], Awaitable[Client]], log: logging.Logger) -> None:
        self.down: EncoderError | None = None
        """Why the service does not answer; None while it does."""
        self._open = open_client
        self._log = log
        self._opening: asyncio.Future[Client] | None = None
        self._retiring: set[asyncio.Task[None]] = set()
        self._probing: asyncio.Task[None] | None = None

    async def get(self) -> Client:
        """Return the client. Concurrent callers share an attempt to connect. After a failure, the next call retries.

        Raises the errors of `open_client`, and at once the reason why the service is down.
        """
        if self.down is not None:
            raise type(self.down)(self.down.message)
        if self._opening is None or (self._opening.done() and self._opening.exception() is not None):
            self._opening = asyncio.ensure_future(self._connect())
        return await asyncio.shield(self._opening)

    def note(self, error: EncoderError) -> None:
        """If `error` means that the service is down, regard it as down until it answers a probe."""
        if error.status in _DOWN and self.down is None:
            self._log.warning("the engine's own tower encodes until the service is back: %s", error.message)
            self.down = error
            if (
                error.status is Status.FAILED_PRECONDITION
            ):  # this client's model is that of no server any more
                self.reopen()
            self._probing = asyncio.create_task(self._probe())

    def reopen(self) -> None:
        """Let the next call connect anew. Calls of the present client have `RETIRE_S` to end."""
        if self._opening is not None:
            retiring = asyncio.create_task(_retire(self._opening))
            self._retiring.add(retiring)
            retiring.add_done_callback(self._retiring.discard)
            self._opening = None

    async def close(self) -> None:
        """Close the connections."""
        for retiring in self._retiring:
            retiring.cancel()
        await asyncio.gather(*self._retiring, return_exceptions=True)
        if self._probing is not None:
            self._probing.cancel()
        if self._opening is not None and self._opening.done() and not self._opening.exception():
            await self._opening.result().close()

    async def _connect(self) -> Client:
        try:
            return await self._open()
        except ValueError as error:  # a file of the credentials, which the operator may be replacing
            raise UnauthenticatedError(str(error)) from error

    async def _probe(self) -> None:
        probes = count()
        while self.down is not None:
            await asyncio.sleep(backoff_s(next(probes), FIRST_PROBE_S, LAST_PROBE_S))
            try:
                await (await self._connect()).close()
                self.down = None
            except EncoderError as error:
                self.down = error
        self._log.info("the encoder service is back")


async def _retire(opening: "asyncio.Future[Client]") -> None:
    """Close a client after `RETIRE_S`, or at once if this is cancelled."""
    with suppress(EncoderError):
        client = await asyncio.shield(opening)
        try:
            await asyncio.sleep(RETIRE_S)
        finally:
            await client.close()
