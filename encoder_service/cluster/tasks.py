"""Background tasks: begun so that a death is noticed at once, and ended reliably."""

import asyncio
from collections.abc import Coroutine

# The key under which the event loop's exception handler is told the name of a background task that died.
DIED = "background_task"


def begin(work: Coroutine[None, None, None], name: str) -> "asyncio.Task[None]":
    """Start a background task. If it dies of an exception, the event loop's exception handler is told at once.

    Without that, the error would stay unseen as long as the task is referenced: heartbeats would just stop.
    """
    task = asyncio.get_running_loop().create_task(work, name=name)
    task.add_done_callback(_report)
    return task


def _report(task: "asyncio.Task[None]") -> None:
    if not task.cancelled() and (error := task.exception()) is not None:
        name = task.get_name()
        context = {"message": f"the task {name} died", "exception": error, "task": task, DIED: name}
        task.get_loop().call_exception_handler(context)


async def end(task: "asyncio.Task[None] | None") -> None:
    """Cancel a task until it has ended; its own exception, if any, is not raised here.

    Cancelling once is not enough: up to Python 3.11, `asyncio.wait_for`, which redis-py uses, swallows a cancellation
    that arrives just as what it waits for ends (gh-86296).
    """
    while task is not None and not task.done():
        task.cancel()
        await asyncio.wait({task}, timeout=0.05)
