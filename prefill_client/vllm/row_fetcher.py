"""Fetches rows into host memory, on a thread of its own, so the scheduler never waits."""

import asyncio
import logging
import threading
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from time import monotonic
from typing import Generic, Protocol, TypeVar

import numpy as np

from encoder_contract.errors import (
    DeadlineError,
    EncoderError,
    InternalError,
    StaleHandleError,
    UnavailableError,
)
from encoder_contract.geometry import Grid
from prefill_client.blocking import LoopThread
from prefill_client.client import EncoderClient
from prefill_client.engine.service import connect
from prefill_client.images import FetchedRows, RowRequest, again, use_in_place
from prefill_client.transport import BY_DEFAULT, DEVICE, INLINE
from prefill_client.transport.connection import Description, traceparent
from prefill_client.vllm.host_memory import Extent, HostMemory
from prefill_client.vllm.image_name import ImageName
from prefill_client.vllm.settings import Settings
from prefill_client.vllm.staging import Staging

_log = logging.getLogger("vllm.encoder_service")  # a child of vLLM's logger, so it has its configuration
JOIN_S = 1.0  # how often an engine that started without the service tries to join it


@dataclass(frozen=True, slots=True)
class Caller:
    """What the middleware said about the caller of a request; it is sent with every Fetch."""

    request_id: str = ""
    priority: int = 0
    traceparent: str = ""
    tenant_salt: str = ""


@dataclass(eq=False, slots=True)
class Wanted:
    """One image to fetch into `extents`. Its outcome refers to this object."""

    name: ImageName
    tokens: int
    caller: Caller
    chunk: int = 0
    needed_in_ms: int = 0
    submitted_to: str = ""
    extents: tuple[Extent, ...] = ()
    staged: int = 0
    """The number of the copies that all workers have made of its rows; 0: the rows are in the extents."""


@dataclass(frozen=True, slots=True)
class Outcome:
    """The outcome of a `Wanted`: its rows are in its extents, or it has an error, or it was cancelled."""

    wanted: Wanted
    error: EncoderError | None = None
    cancelled: bool = False
    source: str = ""
    transport: str = ""
    took_s: float = 0.0


class Wish(Protocol):
    """A scheduler's request for the rows of one image, into `extents`."""

    extents: tuple[Extent, ...]
    staged: int

    @property
    def tokens(self) -> int:
        """Number of rows of the image."""


AnyWish = TypeVar("AnyWish", bound=Wish)
Answer = TypeVar("Answer")


class RowSource(ABC, Generic[AnyWish, Answer]):
    """Requests rows on a thread with an event loop of its own, so the scheduler's thread never waits.

    For one calling thread. Every `ask` ends in exactly one answer, which `answers` yields.
    """

    def __init__(self, name: str) -> None:
        """Start a thread with this name, and open the source on it. Raises the errors of opening."""
        self._asking: dict[AnyWish, asyncio.Task[Answer]] = {}  # used only by the loop's thread
        self._answers: deque[Answer] = deque()
        self._any_answer = threading.Event()
        self._loop = LoopThread(name)
        try:
            self._loop.run(self._open())
        except BaseException:  # Ctrl-C too: nothing else would end the thread
            self._loop.stop()
            raise

    def ask(self, wish: AnyWish) -> None:
        """Request an image's rows. Its extents are in use until the answer."""
        self._loop.call(self._begin, wish)

    def give_up(self, wish: AnyWish) -> None:
        """Cancel a request. Its answer still comes."""
        self._loop.call(self._give_up, wish)

    def answers(self) -> Iterator[Answer]:
        """Yield the answers that have arrived since the last call."""
        self._any_answer.clear()
        while self._answers:
            yield self._answers.popleft()

    def wait(self, timeout_s: float) -> None:
        """Wait until there is an answer that `answers` has not yielded, but at most `timeout_s`."""
        self._any_answer.wait(timeout_s)

    def close(self) -> None:
        """Cancel all requests, close the connections and end the thread."""
        self._loop.stop(self._end())

    @abstractmethod
    async def _open(self) -> None:
        """Connect."""

    @abstractmethod
    async def _close(self) -> None:
        """Close the connections."""

    @abstractmethod
    async def _answer(self, wish: AnyWish) -> Answer:
        """Return the answer. Raises only `CancelledError`."""

    @abstractmethod
    def _cancelled(self, wish: AnyWish) -> Answer:
        """Return the answer to a cancelled request."""

    def _begin(self, wish: AnyWish) -> None:
        task = asyncio.create_task(self._answer(wish))
        self._asking[wish] = task
        task.add_done_callback(partial(self._ended, wish))

    def _give_up(self, wish: AnyWish) -> None:
        if task := self._asking.get(wish):
            task.cancel()

    def _ended(self, wish: AnyWish, task: "asyncio.Task[Answer]") -> None:
        del self._asking[wish]
        self._answers.append(self._cancelled(wish) if task.cancelled() else task.result())
        self._any_answer.set()

    async def _end(self) -> None:
        tasks = list(self._asking.values())
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        await self._close()


class RowFetcher(RowSource[Wanted, Outcome]):
    """Fetches rows that the service encodes."""

    def __init__(
        self,
        settings: Settings,
        memory: HostMemory,
        *,
        width: int,
        dtype: str,
        check: Callable[[Description], None] = lambda _: None,
        staging: Staging | None = None,
    ) -> None:
        """Connect. Raises `UnavailableError` if no server answers within `start_timeout_s`.

        `width` and `dtype` describe a row as the engine reads it; images with other rows fail. An engine with its own
        tower does not wait for a server. It joins the service later, once `check` raises no `ValueError`. With
        `staging`, workers copy rows that a server's GPU has from there.
        """
        self._settings = settings
        self._width = width
        self._dtype = dtype
        self._check = check
        self._staging = staging or Staging(0, 0)
        self._joining: asyncio.Task[None] | None = None
        self._client: EncoderClient | None = None
        self._memory = memory
        super().__init__("encoder-rows")

    @property
    def description(self) -> Description | None:
        """The service's description; None while an engine with its own tower has not joined it."""
        return self._client.description if self._client else None

    def release(self, wanted: Wanted) -> None:
        """Let the workers free their copies of an image, if they have any: no step needs them any more."""
        if wanted.staged:
            self._loop.call(self._staging.drop, wanted.staged)

    async def _open(self) -> None:
        has_own_tower = self._settings.without_service == "own_tower"
        try:
            self._client = await self._connect(wait=not has_own_tower)
        except (UnavailableError, DeadlineError) as error:
            if not has_own_tower:
                raise
            _log.warning("the engine's own tower encodes until the service is available: %s", error.message)
            self._joining = asyncio.create_task(self._join())
        await self._staging.open()

    async def _connect(self, *, wait: bool) -> EncoderClient:
        return await connect(self._settings, wait=wait, receivers=self._staging.receivers)

    async def _join(self) -> None:
        refused = ""
        while self._client is None:
            await asyncio.sleep(JOIN_S)
            try:
                client = await self._connect(wait=False)
            except EncoderError:
                continue
            try:
                await asyncio.to_thread(self._check, client.description)
                self._client = client
            except ValueError as error:
                await client.close()
                if str(error) != refused:  # logged once, not every second: it may last until a restart
                    refused = str(error)
                    _log.error("the encoder service is not used: %s", refused)

    async def _answer(self, wanted: Wanted) -> Outcome:
        try:
            return await self._fetch(wanted)
        except EncoderError as error:
            return Outcome(wanted, error)
        except Exception as error:  # noqa: BLE001 - only the image fails, not the engine
            _log.error("a fetch failed unexpectedly", exc_info=error)
            return Outcome(wanted, InternalError(f"{type(error).__name__}: {error}"))

    def _cancelled(self, wanted: Wanted) -> Outcome:
        return Outcome(wanted, cancelled=True)

    async def _fetch(self, wanted: Wanted) -> Outcome:
        traceparent.set(wanted.caller.traceparent)  # only in this task
        begun_s, timeout_s = monotonic(), self._settings.timeout_s
        try:
            async with asyncio.timeout(timeout_s):
                for transports in self._transports(wanted):
                    if rows := await self._fetch_by(transports, wanted):
                        took_s = monotonic() - begun_s
                        return Outcome(wanted, source=rows.source, transport=rows.transport, took_s=took_s)
        except TimeoutError:
            raise DeadlineError(f"the rows did not arrive within {timeout_s:g} s") from None
        raise InternalError("the client ended a fetch without an outcome")

    def _transports(self, wanted: Wanted) -> Iterator[Sequence[str]]:
        """Yield the transports to try, one after the other."""
        if self._staging.has_room(sum(length for _, length in wanted.extents)):
            yield [DEVICE]
        yield BY_DEFAULT if self._settings.shared_memory else [INLINE]

    async def _fetch_by(self, transports: Sequence[str], wanted: Wanted) -> FetchedRows | None:
        """Return the rows once they are kept; None if workers could not copy them from the server's GPU."""
        assert self._client is not None, "images have names only after the service is joined"
        request = RowRequest(
            wanted.name.digest,
            chunk=wanted.chunk,
            needed_in_ms=wanted.needed_in_ms,
            submitted_to=wanted.submitted_to,
            frames=wanted.name.frames,
        )
        async with self._client.for_tenant(wanted.caller.tenant_salt.encode()).fetch(
            [request],
            request_id=wanted.caller.request_id,
            priority=wanted.caller.priority,
            grace_ms=int(1000 * self._settings.grace_s),
            transports=transports,
            timeout_s=self._settings.timeout_s,
            kept=bool(wanted.submitted_to),  # the middleware keeps it submitted
        ) as stream:
            async for rows in stream:
                if rows.transport != DEVICE:
                    await keep(rows, self._memory, wanted.extents, self._shape(wanted))
                    return rows
                self._shape(wanted).check(rows)
                assert rows.handle is not None
                wanted.staged = await self._staging.copy(rows.handle)
                return rows if wanted.staged else None
        return None

    def _shape(self, wanted: Wanted) -> "Shape":
        return Shape(wanted.name.grid, wanted.tokens, self._width, self._dtype)

    async def _close(self) -> None:
        if self._joining is not None:
            self._joining.cancel()
            await asyncio.gather(self._joining, return_exceptions=True)
        if self._client is not None:
            await self._client.close()
        await self._staging.close()


@dataclass(frozen=True, slots=True)
class Shape:
    """The shape that an image's rows must have: `tokens` rows of `width` elements, for this grid."""

    grid: Grid
    tokens: int
    width: int
    dtype: str

    def check(self, rows: FetchedRows) -> None:
        """Raise `InternalError` for rows of another shape."""
        right = rows.grid == self.grid and rows.shape == (self.tokens, self.width)
        if not right or rows.dtype != self.dtype:
            raise InternalError(
                f"the service has grid {rows.grid} and rows {rows.shape} of {rows.dtype}, not {self}"
            )


async def keep(rows: FetchedRows, memory: HostMemory, extents: Sequence[Extent], shape: Shape) -> None:
    """Copy rows into `extents`, on this thread: a copy on another one could outlive a cancelled fetch.

    Raises the image's error, and `InternalError` for rows of another shape.
    """

    def write(fetched: Sequence[FetchedRows]) -> None:
        (rows,) = fetched
        shape.check(rows)
        memory.write(extents, rows.array.reshape(-1).view(np.uint8))

    while True:
        try:
            return use_in_place([rows], write)
        except StaleHandleError as error:
            (rows,) = await asyncio.gather(*again([rows], error))
