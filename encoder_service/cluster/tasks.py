"""Background tasks: their exceptions are reported at once, and cancelling them is reliable."""

import asyncio
from collections.abc import Coroutine

# The key in the context of the event loop's exception handler that has the name of a failed background task.
FAILED_TASK = "background_task"


def start_task(coroutine: Coroutine[None, None, None], name: str) -> "asyncio.Task[None]":
    """Start a background task. If it raises, the event loop's exception handler is called at once.

    By default asyncio reports the exception only when the task is garbage collected; until then, heartbeats, for
    example, would just stop.
    """
    task = asyncio.get_running_loop().create_task(coroutine, name=name)
    task.add_done_callback(_report)
    return task


def _report(task: "asyncio.Task[None]") -> None:
    if not task.cancelled() and (error := task.exception()) is not None:
        name = task.get_name()
        context = {"message": f"the task {name} died", "exception": error, "task": task, FAILED_TASK: name}
        task.get_loop().call_exception_handler(context)


async def cancel_task(task: "asyncio.Task[None] | None") -> None:
    """Cancel a task, repeatedly until it has ended; does not raise the task's exception.

    Cancelling once is not enough: up to Python 3.11, `asyncio.wait_for`, which redis-py uses, swallows a cancellation
    that arrives just as the awaited future completes (gh-86296).
    """
    while task is not None and not task.done():
        task.cancel()
        await asyncio.wait({task}, timeout=0.05)
