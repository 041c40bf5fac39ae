"""Runs coroutines at the same time, and keeps nothing of them."""

import asyncio
from collections.abc import Awaitable, Coroutine, Iterable
from typing import Any


async def together(work: Iterable[Coroutine[Any, Any, None]]) -> None:
    """Run coroutines, at least one, until all have ended; at the first error, cancel the others and raise it.

    An error refers to this frame. The frame keeps no task, because a task refers to its error, and the circle would
    keep all that the coroutines held until the garbage collector finds it.
    """
    tasks = [asyncio.create_task(each) for each in work]
    try:
        await asyncio.wait(tasks, return_when=asyncio.FIRST_EXCEPTION)
        failed = _errors_of(tasks)
    finally:
        await _end(tasks)
        tasks.clear()
    if failed:
        raise failed.pop(0)


def _errors_of(tasks: list[asyncio.Task[None]]) -> list[BaseException]:
    return [error for task in tasks if task.done() and (error := task.exception()) is not None]


async def _end(tasks: list[asyncio.Task[None]]) -> None:
    for task in tasks:
        task.cancel()
    await asyncio.wait(tasks)


async def in_time(limit_s: float, work: Awaitable[object]) -> bool:
    """Await `work` for at most `limit_s`; return whether it ended. Its own errors are raised.

    An error that is raised after this has no `TimeoutError` as its context, which would refer to its own task.
    """
    try:
        async with asyncio.timeout(limit_s):
            await work
    except TimeoutError:
        return False
    return True
