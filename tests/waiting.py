"""Waiting for what will come true."""

import asyncio
from collections.abc import Awaitable, Callable


async def soon(holds: Callable[[], bool | Awaitable[bool]], within_s: float) -> None:
    """Return when it holds; fail when it does not in time."""
    async with asyncio.timeout(within_s):
        while True:
            answer = holds()
            if answer if isinstance(answer, bool) else await answer:
                return
            await asyncio.sleep(0.02)
