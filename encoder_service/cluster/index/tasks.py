"""Background tasks: how one is ended for certain."""

import asyncio


async def end(task: "asyncio.Task[None] | None") -> None:
    """Cancel a task until it is over; its own failure, if it had one, is not ours.

    Once is not enough: up to Python 3.11 `asyncio.wait_for`, on which redis-py sends, swallows a cancellation that
    meets the end of what it waits for (gh-86296).
    """
    while task is not None and not task.done():
        task.cancel()
        await asyncio.wait({task}, timeout=0.05)
