"""Stopping a client's loop ends calls of other threads and all connections, also after errors."""

import asyncio
import threading
from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from encoder_contract.credentials import NO_CREDENTIALS
from encoder_contract.errors import UnavailableError
from prefill_client.blocking import LoopThread
from prefill_client.fleet.pool import Pool
from prefill_client.transport.channels import Channels
from prefill_client.transport.connection import Connection
from tests.waiting import PATIENCE_S


class Opened(Connection):
    """A connection of which only the end matters."""

    def __init__(self) -> None:
        self.closed = False

    async def close(self, after_s: float = 0.0) -> None:
        """Yield to other tasks, as closing a channel does."""
        await asyncio.sleep(0)
        self.closed = True


class TwoOfThree(Pool):
    """Servers a and b are there, c is not."""

    def __init__(self) -> None:
        super().__init__(
            ["a", "b", "c"],
            model=b"",
            processor=b"",
            channels=Channels(NO_CREDENTIALS),
            connect_timeout_s=PATIENCE_S,
            wait=False,
        )
        self.opened: list[Opened] = []

    async def _connect(self, endpoint: str) -> Connection:
        if endpoint == "c":
            raise UnavailableError("c is not there")
        self.opened.append(Opened())
        return self.opened[-1]


@contextmanager
def a_call_that_closing_ends(loop: LoopThread) -> Iterator[None]:
    """Start an endless wait in another thread; fail unless it ends like the calls of a closed client."""
    waits = threading.Event()
    errors: list[BaseException] = []

    async def never() -> None:
        waits.set()
        await asyncio.Event().wait()

    def call() -> None:
        try:
            loop.run(never())
        except UnavailableError as error:
            errors.append(error)

    thread = threading.Thread(target=call, daemon=True)  # one that hangs is not to keep the tests alive
    thread.start()
    assert waits.wait(PATIENCE_S)
    yield
    thread.join(PATIENCE_S)
    assert [str(error) for error in errors] == ["the client was closed"]


def test_a_reconnect_during_close_leaves_nothing_open() -> None:
    loop, pool = LoopThread("test-loop"), TwoOfThree()
    for endpoint in ("a", "b"):
        loop.run(pool.connection(endpoint))

    async def last() -> None:
        retry = asyncio.create_task(pool.connection("c"))
        await pool.close()
        with pytest.raises(UnavailableError, match="closed"):
            await retry

    with a_call_that_closing_ends(loop):
        loop.stop(last())
    assert [connection.closed for connection in pool.opened] == [True, True]


def test_a_failing_close_still_ends_calls_of_other_threads() -> None:
    loop = LoopThread("test-loop")

    async def last() -> None:
        raise OSError("the last deed failed")

    with a_call_that_closing_ends(loop), pytest.raises(OSError, match="the last deed failed"):
        loop.stop(last())
