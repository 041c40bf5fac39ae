"""Waiting for conditions."""

import asyncio
from collections.abc import Awaitable, Callable

# How long to wait for a condition, and the deadline of calls: a test that passes never waits so long, even on a machine
# with forty times its work. pytest's own timeout ends a test that waits for several of them.
PATIENCE_S = 240.0
# For the start of a process that imports torch, beside others that start: many times as long as it takes alone.
START_S = 240.0
# Time limits for tests of what must happen within a limit. A test that misses a limit because its machine stalled
# tries again with the next.
LIMITS_S = (1.0, 5.0, 25.0)


async def soon(holds: Callable[[], bool | Awaitable[bool]], within_s: float = PATIENCE_S) -> None:
    """Wait until the condition holds. Raises `TimeoutError` if it does not in time."""
    async with asyncio.timeout(within_s):
        while True:
            answer = holds()
            if answer if isinstance(answer, bool) else await answer:
                return
            await asyncio.sleep(0.02)


def until(holds: Callable[[], bool]) -> None:
    """Do the same in a thread without an event loop."""
    asyncio.run(soon(holds))


async def settled() -> None:
    """Run all tasks until they block: also those of a server of this loop, which end the calls of its clients."""
    for _ in range(20):
        await asyncio.sleep(0)


async def within_some_limit(attempt: Callable[[float], Awaitable[bool]]) -> None:
    """Make attempts with longer and longer limits in seconds, until one succeeds."""
    for limit_s in LIMITS_S:
        if await attempt(limit_s):
            return
    raise TimeoutError(f"not even {LIMITS_S[-1]:g} s were enough")
