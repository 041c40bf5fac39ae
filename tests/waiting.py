"""Waiting for what will come true."""

import asyncio
from collections.abc import Awaitable, Callable

# What separates "soon" from "never": many times what anything takes here, on a machine that does ten other things too.
PATIENCE_S = 30.0
# The start of a process that imports torch, beside others that do the same: ten times what it takes alone.
START_S = 100.0
# Limits on time that a test lets pass, for what has to be done within them: whoever is too slow for one, because its
# machine stood still, is given the next.
LIMITS_S = (1.0, 5.0, 25.0)


async def soon(holds: Callable[[], bool | Awaitable[bool]], within_s: float = PATIENCE_S) -> None:
    """Return when it holds; fail when it does not in time."""
    async with asyncio.timeout(within_s):
        while True:
            answer = holds()
            if answer if isinstance(answer, bool) else await answer:
                return
            await asyncio.sleep(0.02)


async def within_some_limit(attempt: Callable[[float], Awaitable[bool]]) -> None:
    """Make an attempt with a limit of so many seconds, and with longer ones until it was quick enough for one."""
    for limit_s in LIMITS_S:
        if await attempt(limit_s):
            return
    raise TimeoutError(f"not even {LIMITS_S[-1]:g} s were enough")
