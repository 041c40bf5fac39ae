"""A synchronous face of the client for plain threads: the asynchronous one, on an event loop in a thread of its own."""

import asyncio
import threading
from collections.abc import AsyncIterator, Awaitable, Coroutine, Iterator, Sequence
from concurrent.futures import CancelledError
from contextlib import suppress
from typing import Any, Self, TypeVar

from encoder_contract.errors import StaleHandleError, UnavailableError
from prefill_client.client import DEFAULT_GRACE_MS, DEFAULT_TIMEOUT_S, EncoderClient
from prefill_client.fleet.fetch_stream import FetchStream
from prefill_client.images import FetchedRows, RowRequest, Submitted
from prefill_client.transport import TRANSPORTS
from prefill_client.transport.connection import Description
from prefill_client.transport.reading import Use, again, use_in_place

Result = TypeVar("Result")


class BlockingClient:
    """What `EncoderClient` does, for any number of plain threads at once; make one with `connect` and share it.

    Every call blocks its own thread only. Not to be called from a running event loop: that has `EncoderClient`.
    """

    def __init__(self, loop: "_LoopThread", client: EncoderClient) -> None:
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
        timeout_s: float = 10.0,
        wait: bool = True,
    ) -> Self:
        """Connect as `EncoderClient.connect` does, and raise what it raises."""
        loop = _LoopThread()
        try:
            client = loop.run(
                EncoderClient.connect(
                    endpoints,
                    model_fingerprint=model_fingerprint,
                    processor_fingerprint=processor_fingerprint,
                    client_id=client_id,
                    tenant_salt=tenant_salt,
                    timeout_s=timeout_s,
                    wait=wait,
                )
            )
        except BaseException:
            loop.stop()
            raise
        return cls(loop, client)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Close the connections and end the thread; calls of other threads end with `UnavailableError`."""
        self._loop.stop(self._client.close())

    def submit(
        self,
        files: Sequence[bytes],
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
        transports: Sequence[str] = TRANSPORTS,
        timeout_s: float = DEFAULT_TIMEOUT_S,
    ) -> "BlockingFetch":
        """Ask for rows; iterate it for one outcome per request, in the order of readiness.

        `transports` names how rows may come, best first; inline they always may. Use it in `with`: rows that come by
        shared memory are held until its end, however long after `timeout_s`.
        """

        async def begin() -> FetchStream:
            return self._client.fetch(
                requests,
                request_id=request_id,
                priority=priority,
                grace_ms=grace_ms,
                transports=transports,
                timeout_s=timeout_s,
            )

        return BlockingFetch(self._loop, self._loop.run(begin()))


class BlockingFetch:
    """A fetch under way; belongs to one thread."""

    def __init__(self, loop: "_LoopThread", stream: FetchStream) -> None:
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
        """End the call and with it everything it held."""
        with suppress(UnavailableError):  # the client was closed, and with it this
            self._loop.run(self._stream.__aexit__())

    async def _next(self) -> FetchedRows | None:
        return await anext(self._outcomes, None)


async def _gathered(fetches: Sequence[Awaitable[FetchedRows]]) -> list[FetchedRows]:
    return await asyncio.gather(*fetches)


class _LoopThread:
    """An event loop in a thread of its own."""

    def __init__(self) -> None:
        self._loop = asyncio.new_event_loop()
        self._lock = threading.Lock()
        self._stopped = False
        self._thread = threading.Thread(target=self._loop.run_forever, name="encoder-client", daemon=True)
        self._thread.start()

    def run(self, work: Coroutine[Any, Any, Result]) -> Result:
        """Run `work` on the loop and return its result; a caller that is interrupted cancels it."""
        with self._lock:  # nothing is handed to a loop that will not turn again
            if self._stopped:
                work.close()
                raise UnavailableError("the client is closed")
            future = asyncio.run_coroutine_threadsafe(work, self._loop)
        try:
            return future.result()
        except CancelledError:
            raise UnavailableError("the client was closed meanwhile") from None
        except BaseException:
            future.cancel()
            raise

    def stop(self, last: Coroutine[Any, Any, None] | None = None) -> None:
        """Cancel what runs, do `last`, and end the thread; a second time does nothing."""
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
    """Do `last`, then cancel every other task of the loop."""
    if last is not None:
        await last
    others = asyncio.all_tasks() - {asyncio.current_task()}
    for task in others:
        task.cancel()
    await asyncio.gather(*others, return_exceptions=True)
    loop = asyncio.get_running_loop()
    await loop.shutdown_asyncgens()
    await loop.shutdown_default_executor()
