"""The client for plain threads: `EncoderClient` on an event loop in a thread of its own."""

import asyncio
import threading
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine, Iterator, Sequence
from concurrent.futures import CancelledError
from contextlib import suppress
from typing import Any, Self, TypeVar, TypeVarTuple

import numpy as np
from numpy.typing import NDArray

from encoder_contract.credentials import NO_CREDENTIALS, Credentials
from encoder_contract.errors import StaleHandleError, UnavailableError
from encoder_contract.producer import Producer
from prefill_client.client import DEFAULT_GRACE_MS, DEFAULT_TIMEOUT_S, EncoderClient
from prefill_client.fleet.fetch_stream import FetchStream
from prefill_client.fleet.put_session import PutSession
from prefill_client.images import (
    FetchedRows,
    Image,
    PutAnswer,
    PutImage,
    RowRequest,
    Submitted,
    Use,
    again,
    use_in_place,
)
from prefill_client.transport import BY_DEFAULT
from prefill_client.transport.connection import Description

Result = TypeVar("Result")
Arguments = TypeVarTuple("Arguments")


class LoopThread:
    """Runs from construction until `stop`; a daemon: it does not keep the process alive."""

    def __init__(self, name: str) -> None:
        self._loop = asyncio.new_event_loop()
        self._lock = threading.Lock()
        self._stopped = False
        self._thread = threading.Thread(target=self._loop.run_forever, name=name, daemon=True)
        self._thread.start()

    def run(self, work: Coroutine[Any, Any, Result]) -> Result:
        """Run `work` on the loop and return its result; a caller that is interrupted cancels it.

        Raises `UnavailableError` once the loop was told to stop.
        """
        with self._lock:  # no work may be handed to a loop that has stopped
            if self._stopped:
                work.close()
                raise UnavailableError("the client is closed")
            future = asyncio.run_coroutine_threadsafe(work, self._loop)
        try:
            return future.result()
        except CancelledError:
            raise UnavailableError("the client was closed") from None
        except BaseException:  # Ctrl-C in this thread; after an error of the work itself, this does nothing
            future.cancel()
            raise

    def call(self, call: Callable[[*Arguments], object], *arguments: *Arguments) -> None:
        """Make a call on the loop, and do not wait for it."""
        self._loop.call_soon_threadsafe(call, *arguments)

    def stop(self, last: Coroutine[Any, Any, None] | None = None) -> None:
        """Do `last`, cancel what runs, and end the thread; a second time does nothing."""
        with self._lock:
            if self._stopped:
                if last is not None:
                    last.close()
                return
            self._stopped = True
            ended = asyncio.run_coroutine_threadsafe(_end(last), self._loop)
        try:
            ended.result()
        finally:
            self._loop.call_soon_threadsafe(self._loop.stop)
            self._thread.join()
            self._loop.close()


async def _end(last: Coroutine[Any, Any, None] | None) -> None:
    """Do `last`, then, even if that failed, cancel every other task of the loop: threads wait for them."""
    try:
        if last is not None:
            await last
    finally:
        others = asyncio.all_tasks() - {asyncio.current_task()}
        for task in others:
            task.cancel()
        await asyncio.gather(*others, return_exceptions=True)
        loop = asyncio.get_running_loop()
        await loop.shutdown_asyncgens()
        await loop.shutdown_default_executor()


class BlockingClient:
    """What `EncoderClient` does, for any number of plain threads at once; make one with `connect` and share it.

    A call blocks only the thread that makes it. Inside a running event loop, use `EncoderClient` instead.
    """

    def __init__(self, loop: LoopThread, client: EncoderClient) -> None:
        self.description: Description = client.description
        self._loop = loop
        self._client = client

    @classmethod
    def connect(
        cls,
        endpoints: str | Sequence[str],
        *,
        model_fingerprint: bytes = b"",
        processor_fingerprint: bytes = b"",
        client_id: str = "",
        tenant_salt: bytes = b"",
        credentials: Credentials = NO_CREDENTIALS,
        timeout_s: float = 10.0,
        wait: bool = True,
    ) -> Self:
        """Connect as `EncoderClient.connect` does, and raise what it raises."""
        loop = LoopThread("encoder-client")
        try:
            client = loop.run(
                EncoderClient.connect(
                    endpoints,
                    model_fingerprint=model_fingerprint,
                    processor_fingerprint=processor_fingerprint,
                    client_id=client_id,
                    tenant_salt=tenant_salt,
                    credentials=credentials,
                    timeout_s=timeout_s,
                    wait=wait,
                )
            )
        except BaseException:  # Ctrl-C too: nobody else would end the thread
            loop.stop()
            raise
        return cls(loop, client)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Close the connections and end the loop's thread; calls of other threads end with `UnavailableError`."""
        self._loop.stop(self._client.close())

    def submit(
        self,
        files: Sequence[bytes | Image],
        *,
        request_id: str = "",
        priority: int = 0,
        timeout_s: float = DEFAULT_TIMEOUT_S,
    ) -> list[Submitted]:
        """Submit image files; return, in order, the confirmed grid and token count of each, or its error."""
        return self._loop.run(
            self._client.submit(files, request_id=request_id, priority=priority, timeout_s=timeout_s)
        )

    def fetch(
        self,
        requests: Sequence[RowRequest],
        *,
        request_id: str = "",
        priority: int = 0,
        grace_ms: int = DEFAULT_GRACE_MS,
        transports: Sequence[str] = BY_DEFAULT,
        timeout_s: float = DEFAULT_TIMEOUT_S,
        producer: Producer | None = None,
    ) -> "BlockingFetch":
        """Ask for rows; iterate it for one outcome per request, in the order of readiness.

        `transports` lists the transports to use, best first; inline is always possible. Use it in `with`: rows in
        shared memory are held until it ends, however long after `timeout_s`. With a `producer`, the rows are those that
        it put.
        """

        async def begin() -> FetchStream:
            return self._client.fetch(
                requests,
                request_id=request_id,
                priority=priority,
                grace_ms=grace_ms,
                transports=transports,
                timeout_s=timeout_s,
                producer=producer,
            )

        return BlockingFetch(self._loop, self._loop.run(begin()))

    def put(
        self,
        producer: Producer,
        *,
        request_id: str = "",
        transports: Sequence[str] = BY_DEFAULT,
        timeout_s: float = DEFAULT_TIMEOUT_S,
    ) -> "BlockingPut":
        """Put rows that `producer` computes; keep it open, in `with`, while anything is put, from any thread."""
        session = self._client.put(
            producer, request_id=request_id, transports=transports, timeout_s=timeout_s
        )
        return BlockingPut(self._loop, session)


class BlockingFetch:
    """A fetch under way; belongs to one thread."""

    def __init__(self, loop: LoopThread, stream: FetchStream) -> None:
        self._loop = loop
        self._stream = stream
        self._outcomes: AsyncIterator[FetchedRows] = aiter(stream)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def __iter__(self) -> Iterator[FetchedRows]:
        while (outcome := self._loop.run(self._next())) is not None:
            yield outcome

    def read(self, rows: Sequence[FetchedRows], use: Use[Result]) -> Result:
        """Return `use(rows)`, called here with the rows in place, and again with those that were lost meanwhile.

        As `prefill_client.read`.
        """
        while True:
            try:
                return use_in_place(rows, use)
            except StaleHandleError as error:
                rows = self._loop.run(_gathered(again(rows, error)))

    def close(self) -> None:
        """End the call and release everything that it holds."""
        with suppress(UnavailableError):  # the client was closed, and with it this
            self._loop.run(self._stream.__aexit__())

    async def _next(self) -> FetchedRows | None:
        return await anext(self._outcomes, None)


class BlockingPut:
    """What `PutSession` does, for any number of plain threads at once."""

    def __init__(self, loop: LoopThread, session: PutSession) -> None:
        self._loop = loop
        self._session = session

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def name(self, images: Sequence[PutImage]) -> list[PutAnswer]:
        """Name images together; return the answer to each, in order, which may be its error."""
        return self._loop.run(self._session.name(images))

    def put(self, answer: PutAnswer, rows: NDArray[np.generic]) -> PutAnswer:
        """Send the rows [tokens, width] of an image that is `yours`; return its last answer: `held`, or its error."""
        return self._loop.run(self._session.put(answer, rows))

    def abandon(self, answer: PutAnswer) -> None:
        """Give up an image that is `yours`: another caller may compute it."""
        self._loop.run(self._session.abandon(answer))

    def close(self) -> None:
        """End the calls; leases are released, and rows that are not complete are dropped."""
        with suppress(UnavailableError):  # the client was closed, and with it this
            self._loop.run(self._session.close())


async def _gathered(fetches: Sequence[Awaitable[FetchedRows]]) -> list[FetchedRows]:
    return await asyncio.gather(*fetches)
