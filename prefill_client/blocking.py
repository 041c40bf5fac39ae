"""The blocking client: `EncoderClient` on an event loop in a background thread."""

import asyncio
import threading
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine, Iterator, Sequence
from concurrent.futures import CancelledError
from contextlib import suppress
from functools import wraps
from typing import Any, Concatenate, ParamSpec, Self, TypeVar, TypeVarTuple

from encoder_contract.errors import EncoderError, InvalidRequestError, StaleHandleError, UnavailableError
from prefill_client.client import EncoderClient
from prefill_client.fleet.fetch_stream import FetchStream
from prefill_client.fleet.submission import KeptImages
from prefill_client.forks import check_process, is_forked
from prefill_client.images import (
    FetchedRows,
    Submitted,
    Use,
    refetch_lost,
    use_in_place,
)
from prefill_client.transport.connection import Description

Result = TypeVar("Result")
Arguments = TypeVarTuple("Arguments")
Parameters = ParamSpec("Parameters")
Converted = TypeVar("Converted")


class LoopThread:
    """An event loop in a daemon thread that runs work for other threads, from construction until `stop`."""

    def __init__(self, name: str) -> None:
        self._loop = asyncio.new_event_loop()
        self._lock = threading.Lock()
        self._stopped = False
        self._thread = threading.Thread(target=self._loop.run_forever, name=name, daemon=True)
        self._thread.start()

    def run(self, work: Coroutine[Any, Any, Result]) -> Result:
        """Run `work` on the loop and return its result. Interrupting the caller cancels the work.

        Raises the work's error, `UnavailableError` after `stop`, and `InvalidRequestError` in a forked process, which
        lacks the thread.
        """
        try:
            check_process()
        except InvalidRequestError:
            work.close()
            raise
        with self._lock:  # a stopped loop would never run the work
            if self._stopped:
                work.close()
                raise UnavailableError("the client is closed")
            future = asyncio.run_coroutine_threadsafe(work, self._loop)
        try:
            return future.result()
        except CancelledError:
            raise UnavailableError("the client was closed") from None
        except BaseException:  # Ctrl-C in this thread; cancel has no effect if the work itself failed
            future.cancel()
            raise

    def call(self, call: Callable[[*Arguments], object], *arguments: *Arguments) -> None:
        """Schedule a call on the loop without waiting for it."""
        self._loop.call_soon_threadsafe(call, *arguments)

    def stop(self, last: Coroutine[Any, Any, None] | None = None) -> None:
        """Run `last`, cancel all other work, and end the thread. Further calls do nothing, nor do those in a fork."""
        if is_forked():  # another thread may have held the lock
            if last is not None:
                last.close()
            return
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
    """Run `last`, then cancel every other task, even if `last` failed: threads wait for these tasks."""
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


def _blocking(
    method: Callable[Concatenate[EncoderClient, Parameters], Coroutine[Any, Any, Result]],
    convert: Callable[[LoopThread, Result], Converted],
) -> Callable[Concatenate["BlockingClient", Parameters], Converted]:
    """Return the blocking version of a method of `EncoderClient`: the same parameters, documentation and errors."""

    @wraps(method)
    def call(client: "BlockingClient", /, *args: Parameters.args, **named: Parameters.kwargs) -> Converted:
        return convert(client._loop, client._loop.run(method(client._client, *args, **named)))

    return call


def _on_loop(
    method: Callable[Concatenate[EncoderClient, Parameters], Result],
) -> Callable[Concatenate[EncoderClient, Parameters], Coroutine[Any, Any, Result]]:
    @wraps(method)
    async def call(client: EncoderClient, /, *args: Parameters.args, **named: Parameters.kwargs) -> Result:
        return method(client, *args, **named)

    return call


def connecting(
    connect: Callable[Parameters, Coroutine[Any, Any, EncoderClient]],
) -> Callable[Parameters, "BlockingClient"]:
    """Return the blocking version of a function that connects: the same parameters, documentation and errors."""

    @wraps(connect)
    def call(*args: Parameters.args, **named: Parameters.kwargs) -> "BlockingClient":
        check_process()  # before there is a thread, which would stay
        loop = LoopThread("encoder-client")
        try:
            return BlockingClient(loop, loop.run(connect(*args, **named)))
        except BaseException:  # Ctrl-C too: the caller gets no client to close
            loop.stop()
            raise

    return call


class BlockingClient:
    """Blocking version of `EncoderClient`. Create one with `connect` and share it between any number of threads.

    A call blocks only its own thread. On an event loop, use `EncoderClient` instead. `description` has the model,
    geometry and limits, as reported by the first server that answered.
    """

    connect = staticmethod(connecting(EncoderClient.connect))
    submit = _blocking(EncoderClient.submit, lambda _, answers: answers)
    keep = _blocking(EncoderClient.keep, lambda loop, kept: BlockingKept(loop, kept))
    keep_known = _blocking(EncoderClient.keep_known, lambda loop, kept: BlockingKept(loop, kept))
    fetch = _blocking(_on_loop(EncoderClient.fetch), lambda loop, stream: BlockingFetch(loop, stream))

    def __init__(self, loop: LoopThread, client: EncoderClient) -> None:
        self.description: Description = client.description
        self._loop = loop
        self._client = client

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Close the connections and end the background thread. Calls in other threads raise `UnavailableError`."""
        self._loop.stop(self._client.close())


class BlockingKept:
    """Images that stay submitted until `close`. Use it with `with`, and fetch them with `kept=True`."""

    def __init__(self, loop: LoopThread, kept: KeptImages) -> None:
        self._loop = loop
        self._kept = kept

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    @property
    def answers(self) -> list[Submitted]:
        """The servers' first answer to each image, in order."""
        return self._kept.answers

    @property
    def error(self) -> EncoderError | None:
        """Why some of the images are not at any server now; None if all are."""
        return self._kept.error

    def leave(self) -> None:
        """End keeping: the images stay submitted, as after `submit`."""
        self._loop.run(self._kept.leave())

    def close(self) -> None:
        """Release the images: servers drop those that no other caller wants."""
        with suppress(
            UnavailableError, InvalidRequestError
        ):  # the client was closed, which released them too
            self._loop.run(self._kept.close())


class BlockingFetch:
    """A running fetch. Iterate it for one `FetchedRows` per request; use it from one thread."""

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
        """Call `use` with the rows in place and return its result, as `prefill_client.read` does.

        `use` runs in this thread, and once more if rows are lost while it reads them. Raises the error of a failed
        outcome.
        """
        while True:
            try:
                return use_in_place(rows, use)
            except StaleHandleError as error:
                rows = self._loop.run(_gathered(refetch_lost(rows, error)))

    def close(self) -> None:
        """End the call and release the rows that it holds."""
        with suppress(
            UnavailableError, InvalidRequestError
        ):  # the client was closed, which ended this call too
            self._loop.run(self._stream.__aexit__())

    async def _next(self) -> FetchedRows | None:
        return await anext(self._outcomes, None)


async def _gathered(fetches: Sequence[Awaitable[FetchedRows]]) -> list[FetchedRows]:
    return await asyncio.gather(*fetches)
