"""The store that engines share: it decides which engine makes an image's rows, and keeps the rows for all engines."""

import asyncio
import logging
import os
import secrets
from collections import deque
from collections.abc import Coroutine, Iterator, Mapping
from dataclasses import dataclass
from time import monotonic
from typing import Any

import blake3
import numpy as np
import torch
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
from prefill_client.vllm.row_fetcher import Outcome, RowSource, Shape, copy_rows, retry_join
from prefill_client.vllm.settings import Settings

_log = logging.getLogger("vllm.encoder_service")
# The most records per read. Each is written as a whole, so a read never returns a part of one.
_RECORDS = 256
# Errors of a single image: the store is still available.
_OF_ONE_IMAGE = (OverloadedError, InvalidImageError, InvalidRequestError, AbandonedError)


@dataclass(frozen=True, slots=True)
class RowKind:
    """Width and type of a row."""

    width: int
    dtype: str


@dataclass(eq=False, slots=True)
class StoreQuery:
    """One image: vLLM's data of it, and the extents for its rows if another engine makes them.

    It may also be a video or a clip of sound: only the number of its rows matters here.
    """

    data: Mapping[str, Any]
    cache_salt: str
    rows: int
    extents: tuple[Extent, ...] = ()
    staged: int = 0  # such rows always come through host memory
    is_cancelled: bool = False
    # The task that `cancel` may cancel. None while the image is named, since the answer may be a lease.
    fetch_task: "asyncio.Task[Any] | None" = None

    def cancel(self) -> None:
        """Note that no request waits for the image any more. For the loop's thread."""
        self.is_cancelled = True
        if self.fetch_task is not None:
            self.fetch_task.cancel()


_SCHEME = "vllm inputs of a tower"


def image_key(data: Mapping[str, Any], cache_salt: str) -> EngineKey:
    """Return the key of an image: a hash of all inputs of the tower, and of the `cache_salt` of its request.

    vLLM's own hash is not safe: a caller can replace it by a `uuid`, which could be that of another image.

    `data` has vLLM's inputs by name: tensors, plain values, and lists of these. Raises `TypeError` for anything else.
    Takes 0.15 ms per MB, with the interpreter's lock released: for a worker thread.
    """
    hasher = blake3.blake3(derive_key_context="encoder-service vllm image")
    for name in sorted(data):
        _hash(hasher, name, data[name].data)
    _hash(hasher, "cache_salt", cache_salt)
    return EngineKey(_SCHEME, hasher.digest())


def _hash(hasher: "blake3.blake3", name: str, value: object) -> None:
    """Hash one value so that no other value, or sequence of values, is hashed alike."""
    if isinstance(value, torch.Tensor):
        label = f"{name} {value.dtype} {tuple(value.shape)}"
    elif isinstance(value, list | tuple):
        label = f"{name} [{len(value)}]"
    elif value is None or isinstance(value, bool | int | float | str):
        label = f"{name} {value!r}"
    else:
        raise TypeError(f"{name} is a {type(value).__name__}, which has no digest")
    encoded = label.encode()
    hasher.update(len(encoded).to_bytes(4, "little") + encoded)
    if isinstance(value, torch.Tensor):
        content = value.cpu().contiguous().reshape(-1).view(torch.uint8).numpy()
        hasher.update(memoryview(content))  # type: ignore[arg-type]
    elif isinstance(value, list | tuple):
        for each in value:
            _hash(hasher, name, each)


def same_image(one: Mapping[str, Any], other: Mapping[str, Any]) -> bool:
    """Whether two images have the same inputs of the tower; takes 0.2 ms per MB if they are not the same objects."""
    if one is other:
        return True
    return set(one) == set(other) and all(
        one[name] is other[name] or _equal(one[name].data, other[name].data) for name in one
    )


def _equal(one: object, other: object) -> bool:
    if isinstance(one, torch.Tensor) and isinstance(other, torch.Tensor):
        return one.dtype is other.dtype and torch.equal(one, other)
    if isinstance(one, list | tuple) and isinstance(other, list | tuple):
        return len(one) == len(other) and all(map(_equal, one, other))
    return type(one) is type(other) and bool(one == other)


class StoreSession:
    """The engine's connection to the store. Not thread-safe: use from one event loop.

    While the store cannot be reached, the engine is `alone`, and tries to rejoin it in the background.
    """

    def __init__(self, settings: Settings, producer: Producer, kind: RowKind, memory: HostMemory) -> None:
        """Rows are fetched into `memory`."""
        self._settings = settings
        self._producer = producer
        self._kind = kind
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

    async def find(self, query: StoreQuery) -> Outcome[StoreQuery]:
        """Ask which engine makes an image's rows, and fetch them if it is another one.

        After any error, this engine makes the rows. Raises only `CancelledError`.
        """
        try:
            async with asyncio.timeout(self._settings.timeout_s):
                return await self._find(query)
        except TimeoutError:  # no engine has made the rows in time
            return Outcome(query, "own")
        except asyncio.CancelledError:
            if not query.is_cancelled:
                raise
            return Outcome(query, "cancelled")
        except EncoderError as error:
            if not isinstance(error, _OF_ONE_IMAGE):
                self._go_alone(error)
            return Outcome(query, "own")
        except Exception:  # noqa: BLE001 - the engine continues after any error
            _log.exception("an image cannot be shared")
            return Outcome(query, "own")

    async def put(self, lease: PutAnswer, data: NDArray[np.uint8]) -> EncoderError | None:
        """Put the rows of an image that this engine made; `data` is their bytes. Return the error, or None."""
        assert self._session is not None, "the lease comes from a session"
        rows = data.view(element_type(self._kind.dtype)).reshape(-1, self._kind.width)
        error = (await self._session.put(lease, rows)).error
        # Any other error concerns only this image, for example rows that come after its lease has expired.
        if isinstance(error, UnavailableError):
            self._go_alone(error)
        return error

    async def abandon(self, lease: PutAnswer) -> None:
        """Abandon a lease: this engine does not put the rows."""
        if self._session is not None:
            await self._session.abandon(lease)

    async def _find(self, query: StoreQuery) -> Outcome[StoreQuery]:
        if self.alone or self._session is None:
            return Outcome(query, "own")
        start_s = monotonic()
        key = await asyncio.to_thread(image_key, query.data, query.cache_salt)
        while not query.is_cancelled:
            (answer,) = await self._session.name([PutImage(self._grid(query.rows), engine_key=key)])
            if answer.error is not None:
                raise answer.error
            if answer.state == "yours":
                return Outcome(query, "own", lease=answer)
            query.fetch_task = None if query.is_cancelled else asyncio.current_task()
            rows = await self._fetch(query, key, answer)
            query.fetch_task = None
            if rows is not None:
                took_s = monotonic() - start_s
                return Outcome(query, "here", source=rows.source, transport=rows.transport, took_s=took_s)
        return Outcome(query, "cancelled")

    async def _fetch(self, query: StoreQuery, key: EngineKey, answer: PutAnswer) -> FetchedRows | None:
        """Fetch rows that the store has, or wait for them.

        Return None if their producer abandoned them: the image must be named again.
        """
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
                shape = Shape(self._grid(query.rows), query.rows, self._kind.width, self._kind.dtype)
                await copy_rows(rows, self._memory, query.extents, shape)
                return rows
        raise InternalError("the client ended a fetch without an outcome")

    async def _join(self) -> None:
        """Connect, and check that the server answers names. Raises the error that keeps this engine from sharing."""
        if self._client is None:
            self._client = await connect(self._settings, wait=False)
            theirs = self._client.description
            kind = RowKind(theirs.width, theirs.dtype)
            if kind != self._kind:
                await self._client.close()
                self._client = None
                raise ValueError(
                    f"the encoder service at {self._endpoints} holds {kind}, the engine has {self._kind}"
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
        """Return the grid with which this many rows are put and fetched."""
        assert self._client is not None
        return grid_of_rows(rows, self._client.description.geometry)

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
        await retry_join(self._join, self._settings)
        _log.warning("the encoder service at %s is back: images are shared again", self._endpoints)

    @property
    def _endpoints(self) -> str:
        return ", ".join(self._settings.endpoints)


@dataclass(frozen=True, slots=True)
class Put:
    """The outcome of the save with this number: its rows were put, or have an error."""

    number: int
    error: EncoderError | None = None


class SharedStore(RowSource[StoreQuery]):
    """Runs a `StoreSession` for a scheduler. Every `expect` ends in exactly one `Put`, which `puts` yields."""

    def __init__(self, session: StoreSession, outgoing: HostMemory) -> None:
        """Join the store if it answers. Raises `ValueError` if it cannot accept this engine's rows."""
        self._session = session
        self._outgoing = outgoing
        self._tasks: set[asyncio.Task[None]] = set()  # that put or abandon; used only by the loop's thread
        self._expected: dict[int, tuple[PutAnswer, tuple[Extent, ...]]] = {}
        self._puts: deque[Put] = deque()
        self._records, self._pipe = os.pipe2(os.O_CLOEXEC | os.O_NONBLOCK)
        self.pipe = f"/proc/{os.getpid()}/fd/{self._pipe}"
        """The pipe through which a worker reports that the rows of a save are in the outgoing memory."""
        try:
            super().__init__("shared-store")
        except BaseException:
            self._close_pipe()
            raise

    @property
    def alone(self) -> bool:
        """Whether the store was unavailable at the last attempt; the engine then does not query it."""
        return self._session.alone

    def abandon(self, lease: PutAnswer) -> None:
        """Abandon a lease, so that another engine may make the rows."""
        self._loop.call(self._create_task, self._session.abandon(lease))

    def expect(self, number: int, lease: PutAnswer, extents: tuple[Extent, ...]) -> None:
        """Put the rows of a save as soon as the pipe reports them in `extents` of the outgoing memory."""
        self._expected[number] = lease, extents

    def puts(self) -> Iterator[Put]:
        """Yield the outcomes of puts since the last call."""
        while self._puts:
            yield self._puts.popleft()

    def close(self) -> None:
        """End all calls, and with them all leases."""
        super().close()
        self._close_pipe()

    async def _open(self) -> None:
        await self._session.start()
        asyncio.get_running_loop().add_reader(self._records, self._read_records)

    async def _close(self) -> None:
        asyncio.get_running_loop().remove_reader(self._records)
        tasks = list(self._tasks)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        await self._session.close()

    async def _run(self, query: StoreQuery) -> Outcome[StoreQuery]:
        return await self._session.find(query)

    def _cancel(self, query: StoreQuery) -> None:
        query.cancel()

    def _create_task(self, work: Coroutine[Any, Any, None]) -> None:
        task = asyncio.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    def _read_records(self) -> None:
        for number, copied in RECORD.iter_unpack(os.read(self._records, _RECORDS * RECORD.size)):
            self._create_task(self._put(number, copied=copied))

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
            self._create_task(self._session.abandon(lease))
        self._puts.append(Put(number, error))

    def _close_pipe(self) -> None:
        os.close(self._records)
        os.close(self._pipe)
