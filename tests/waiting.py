"""Waiting for what will come true."""

import asyncio
from collections.abc import Awaitable, Callable

# What separates "soon" from "never": many times what anything takes here, on a machine that does ten other things too.
PATIENCE_S = 30.0


async def soon(holds: Callable[[], bool | Awaitable[bool]], within_s: float = PATIENCE_S) -> None:
    """Return when it holds; fail when it does not in time."""
    async with asyncio.timeout(within_s):
        while True:
            answer = holds()
            if answer if isinstance(answer, bool) else await answer:
                return
            await asyncio.sleep(0.02)
