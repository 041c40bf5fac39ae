"""Blocking calls on daemon threads: the exit of the interpreter neither refuses them nor waits for them."""

import asyncio
from collections.abc import Callable
from concurrent.futures import Future
from threading import Thread
from typing import TypeVar

Result = TypeVar("Result")


async def on_daemon_thread(call: Callable[[], Result]) -> Result:
    """Return the result of `call`, or raise its error. If this is cancelled, the call goes on by itself.

    The threads of `asyncio.to_thread` refuse work while the interpreter exits, when the loop of a client that nobody
    closed still runs. The interpreter also waits for the work that they have.
    """
    outcome: Future[Result] = Future()
    outcome.set_running_or_notify_cancel()  # from here on, nobody can cancel it

    def run() -> None:
        try:
            outcome.set_result(call())
        except BaseException as error:  # noqa: BLE001 - the caller gets it
            outcome.set_exception(error)

    Thread(target=run, name="blocking-call", daemon=True).start()
    return await asyncio.wrap_future(outcome)
