"""The store that engines share: it says which engine makes an image's rows, holds rows of others, and accepts ours."""

import asyncio
import logging
import os
import secrets
from collections import deque
from collections.abc import Coroutine, Iterator, Mapping
from dataclasses import dataclass
from time import monotonic
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from encoder_contract.errors import (
    AbandonedError,
    DeadlineError,
    EncoderError,
    InternalError,
    InvalidImageError,
    InvalidRequestError,
    OverloadedError,
    UnavailableError,
    UnknownImageError,
)
from encoder_contract.geometry import Grid, grid_of_rows
from encoder_contract.producer import EngineKey, Producer
from prefill_client.client import EncoderClient
from prefill_client.engine.service import connect
from prefill_client.fleet.put_session import PutSession
from prefill_client.images import FetchedRows, PutAnswer, PutImage, RowRequest
from prefill_client.transport import BY_DEFAULT, INLINE, TRANSPORTS
from prefill_client.transport.rows import element_type
from prefill_client.vllm.host_memory import RECORD, Extent, HostMemory
from prefill_client.vllm.image_name import image_key
from prefill_client.vllm.row_fetcher import RowSource, Shape, keep
from prefill_client.vllm.settings import Settings

_log = logging.getLogger("vllm.encoder_service")
# Records that are read at a time. Each is written as a whole, so a read never returns a part of one.
_RECORDS = 256
# How often an engine that works alone checks whether the store is back.
_REJOIN_S = 1.0
# Errors of a single image: the store is still available.
_OF_AN_IMAGE = (OverloadedError, InvalidImageError, InvalidRequestError, AbandonedError)


@dataclass(frozen=True, slots=True)
class RowKind:
    """Width and type of a row."""

    width: int
    dtype: str


@dataclass(eq=False, slots=True)
class Asked:
    """One image: vLLM's data of it, and the extents for its rows if another engine makes them.

    It may also be a video or a clip of sound: only the number of its rows, `tokens`, matters here.
    """

    data: Mapping[str, Any]
    cache_salt: str
    tokens: int
    extents: tuple[Extent, ...] = ()
    staged: int = 0  # such rows always come through host memory
    given_up: bool = False
    # The task that `give_up` may cancel. None while the image is named, since the answer may be a lease.
    fetching: "asyncio.Task[Any] | None" = None

    def give_up(self) -> None:
        """Note that no request waits for the image any more. For the loop's thread."""
        self.given_up = True
        if self.fetching is not None:
            self.fetching.cancel()


@dataclass(frozen=True, slots=True)
class Found:
    """The outcome of an `Asked`: rows are `here`, or `ours`: this engine makes them, with a `lease` for all engines."""

    wanted: Asked
    outcome: Literal["here", "ours", "given up"]
    lease: PutAnswer | None = None
    error: EncoderError | None = None
    source: str = ""
    transport: str = ""
    took_s: float = 0.0


class StoreSession:
    """The engine's connection to the store, for one event loop.

    While the store cannot be reached, the engine is `alone`, and tries to rejoin it in the background.
    """

    def __init__(self, settings: Settings, producer: Producer, rows: RowKind, memory: HostMemory) -> None:
        """Rows are fetched into `memory`."""
        self._settings = settings
        self._producer = producer
        self._rows = rows
        self._memory = memory
        self._client: EncoderClient | None = None
        self._session: PutSession | None = None
        self._rejoining: asyncio.Task[None] | None = None
        self.alone = True

    async def start(self) -> None:
        """Join the store if a server answers. Raises `ValueError` if it cannot accept this engine's rows."""
        try:
            await self._join()
        except (UnavailableError, DeadlineError) as error:
            self.alone = False
            self._go_alone(error)
        except EncoderError as error:
            raise ValueError(f"the encoder service at {self._endpoints}: {error.message}") from error

    async def close(self) -> None:
        """End the calls, and with them all leases."""
        if self._rejoining is not None:
            self._rejoining.cancel()
            await asyncio.gather(self._rejoining, return_exceptions=True)
        if self._session is not None:
            await self._session.close()
        if self._client is not None:
            await self._client.close()

    async def find(self, asked: Asked) -> Found:
        """Ask which engine makes an image's rows, and fetch them if it is another one. Raises only `CancelledError`."""
        try:
            async with asyncio.timeout(self._settings.timeout_s):
                return await self._find(asked)
        except TimeoutError:
            late = f"no engine has made the rows within {self._settings.timeout_s:g} s"
            return Found(asked, "ours", error=DeadlineError(late))
        except asyncio.CancelledError:
            if not asked.given_up:
                raise
            return Found(asked, "given up")
        except EncoderError as error:
            self._note(error)
            return Found(asked, "ours", error=error)
        except Exception as error:  # noqa: BLE001 - the engine continues after any error
            _log.exception("an image cannot be shared")
            return Found(asked, "ours", error=InternalError(f"{type(error).__name__}: {error}"))

    async def put(self, lease: PutAnswer, data: NDArray[np.uint8]) -> EncoderError | None:
        """Put the rows (their bytes are `data`) of an image that this engine made; return the error, or None."""
        assert self._session is not None, "the lease comes from a session"
        rows = data.view(element_type(self._rows.dtype)).reshape(-1, self._rows.width)
        error = (await self._session.put(lease, rows)).error
        # Any other error concerns only this image, for example rows that come after the end of its lease.
        if isinstance(error, UnavailableError):
            self._go_alone(error)
        return error

    async def abandon(self, lease: PutAnswer) -> None:
        """Say that no rows will come for a lease."""
        if self._session is not None:
            await self._session.abandon(lease)

    async def _find(self, asked: Asked) -> Found:
        if self.alone or self._session is None:
            return Found(asked, "ours")
        began_s = monotonic()
        key = await asyncio.to_thread(image_key, asked.data, asked.cache_salt)
        while not asked.given_up:
            (answer,) = await self._session.name([PutImage(self._grid(asked.tokens), engine_key=key)])
            if answer.error is not None:
                raise answer.error
            if answer.state == "yours":
                return Found(asked, "ours", answer)
            asked.fetching = None if asked.given_up else asyncio.current_task()
            rows = await self._fetch(asked, key, answer)
            asked.fetching = None
            if rows is not None:
                took_s = monotonic() - began_s
                return Found(asked, "here", source=rows.source, transport=rows.transport, took_s=took_s)
        return Found(asked, "given up")

    async def _fetch(self, asked: Asked, key: EngineKey, answer: PutAnswer) -> FetchedRows | None:
        """Fetch rows that are held, or wait for them; None if they will not come, and the image must be named again."""
        assert self._client is not None
        wait_s = answer.lease_s if answer.state == "wait" else 0.0
        shared = self._settings.shared_memory
        async with self._client.fetch(
            [RowRequest(engine_key=key)],
            producer=self._producer,
            grace_ms=round(1000 * wait_s),
            transports=BY_DEFAULT if shared else [INLINE],
            timeout_s=wait_s + self._settings.submit_timeout_s,
        ) as stream:
            async for rows in stream:
                if isinstance(rows.error, UnknownImageError):
                    return None
                shape = Shape(self._grid(asked.tokens), asked.tokens, self._rows.width, self._rows.dtype)
                await keep(rows, self._memory, asked.extents, shape)
                return rows
        raise InternalError("the client ended a fetch without an outcome")

    async def _join(self) -> None:
        """Connect, and check that the server answers names. Raises the error that keeps this engine from sharing."""
        if self._client is None:
            self._client = await connect(self._settings, wait=False)
            theirs = self._client.description
            kind = RowKind(theirs.width, theirs.dtype)
            if kind != self._rows:
                await self._client.close()
                self._client = None
                raise ValueError(
                    f"the encoder service at {self._endpoints} holds {kind}, the engine has {self._rows}"
                )
            transports = TRANSPORTS if self._settings.shared_memory else [INLINE]
            self._session = self._client.put(
                self._producer, transports=transports, timeout_s=self._settings.submit_timeout_s
            )
        assert self._session is not None
        probe = PutImage(self._grid(1), engine_key=EngineKey("vllm probe", secrets.token_bytes(16)))
        (answer,) = await self._session.name([probe])
        if answer.error is not None:
            raise answer.error
        await self._session.abandon(answer)
        self.alone = False

    def _grid(self, rows: int) -> Grid:
        """Return the grid under which this many rows are put and fetched."""
        assert self._client is not None
        return grid_of_rows(rows, self._client.description.geometry)

    def _note(self, error: EncoderError) -> None:
        if not isinstance(error, _OF_AN_IMAGE):
            self._go_alone(error)

    def _go_alone(self, error: EncoderError) -> None:
        if self.alone:
            return
        self.alone = True
        _log.warning(
            "the encoder service at %s is unavailable; this engine encodes for itself until it is back: %s",
            self._endpoints,
            error.message,
        )
        self._rejoining = asyncio.create_task(self._rejoin(), name="store-rejoin")

    async def _rejoin(self) -> None:
        refused: set[tuple[type[Exception], str]] = set()
        while self.alone:
            await asyncio.sleep(_REJOIN_S)
            try:
                await self._join()
            except (UnavailableError, DeadlineError):
                continue
            except (EncoderError, ValueError) as error:
                kind = _kind_of(error)
                if kind not in refused:  # logged once, not every second: it may last until a restart
                    refused.add(kind)
                    _log.warning(
                        "the encoder service at %s answers but cannot be used: %s", self._endpoints, error
                    )
        _log.warning("the encoder service at %s is back: images are shared again", self._endpoints)

    @property
    def _endpoints(self) -> str:
        return ", ".join(self._settings.endpoints)


def _kind_of(error: Exception) -> tuple[type[Exception], str]:
    """Return a key that is equal for errors of which only one needs to be logged."""
    # The text of an internal error has another incident id each time.
    return type(error), "" if isinstance(error, InternalError) else str(error)


@dataclass(frozen=True, slots=True)
class Sent:
    """The outcome of the save with this number: its rows were put, or have an error."""

    number: int
    error: EncoderError | None = None


class SharedStore(RowSource[Asked, Found]):
    """Runs a `StoreSession` for a scheduler. Every `expect` ends in exactly one `Sent`, which `sent` yields."""

    def __init__(self, session: StoreSession, outgoing: HostMemory) -> None:
        """Join the store if it answers. Raises `ValueError` if it cannot accept this engine's rows."""
        self._session = session
        self._outgoing = outgoing
        self._putting: set[asyncio.Task[None]] = set()  # used only by the loop's thread
        self._expected: dict[int, tuple[PutAnswer, tuple[Extent, ...]]] = {}
        self._sent: deque[Sent] = deque()
        self._saved, self._pipe = os.pipe2(os.O_CLOEXEC | os.O_NONBLOCK)
        self.pipe = f"/proc/{os.getpid()}/fd/{self._pipe}"
        """The pipe into which a worker writes that the rows of a save are in the outgoing memory."""
        try:
            super().__init__("shared-store")
        except BaseException:
            self._close_pipe()
            raise

    @property
    def alone(self) -> bool:
        """Whether the store was unavailable at the last attempt; the engine then does not ask it."""
        return self._session.alone

    def give_back(self, lease: PutAnswer) -> None:
        """Give a lease back, so that another engine may make the rows."""
        self._loop.call(self._put_later, self._session.abandon(lease))

    def expect(self, number: int, lease: PutAnswer, extents: tuple[Extent, ...]) -> None:
        """Put the rows of a save as soon as the pipe reports them in `extents` of the outgoing memory."""
        self._expected[number] = lease, extents

    def sent(self) -> Iterator[Sent]:
        """Yield the outcomes since the last call."""
        while self._sent:
            yield self._sent.popleft()

    def close(self) -> None:
        """End all calls, and with them all leases."""
        super().close()
        self._close_pipe()

    async def _open(self) -> None:
        await self._session.start()
        asyncio.get_running_loop().add_reader(self._saved, self._read_saved)

    async def _close(self) -> None:
        asyncio.get_running_loop().remove_reader(self._saved)
        putting = list(self._putting)
        for task in putting:
            task.cancel()
        await asyncio.gather(*putting, return_exceptions=True)
        await self._session.close()

    async def _answer(self, asked: Asked) -> Found:
        return await self._session.find(asked)

    def _give_up(self, asked: Asked) -> None:
        asked.give_up()

    def _cancelled(self, asked: Asked) -> Found:
        return Found(asked, "given up")

    def _put_later(self, work: Coroutine[Any, Any, None]) -> None:
        task = asyncio.create_task(work)
        self._putting.add(task)
        task.add_done_callback(self._putting.discard)

    def _read_saved(self) -> None:
        for number, copied in RECORD.iter_unpack(os.read(self._saved, _RECORDS * RECORD.size)):
            self._put_later(self._put(number, copied=copied))

    async def _put(self, number: int, *, copied: bool) -> None:
        lease, extents = self._expected.pop(number)
        error: EncoderError | None = InternalError("the worker could not copy the rows")
        try:
            if copied:
                error = await self._session.put(lease, self._outgoing.read(extents))
            else:
                await self._session.abandon(lease)
        except Exception as raised:  # noqa: BLE001 - its extents must be freed after any error
            _log.exception("the rows of an image cannot be put")
            error = InternalError(f"{type(raised).__name__}: {raised}")
            self._put_later(self._session.abandon(lease))
        self._sent.append(Sent(number, error))

    def _close_pipe(self) -> None:
        os.close(self._saved)
        os.close(self._pipe)
