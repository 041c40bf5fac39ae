"""Fetches that wait for images which nobody has submitted yet, and one sweep that looks elsewhere for all of them."""

import asyncio
from collections.abc import Awaitable, Callable, Collection, Mapping
from itertools import islice

from encoder_service.address import ImageKey
from encoder_service.cluster.index import Locations
from encoder_service.scheduler.shares import Shares

# How often the sweep looks whether images that are waited for have turned up elsewhere, and for how many of them at a
# time, those first that were looked for longest ago: some thousand keys a second, whoever waits for however many.
SWEEP_S = 0.25
SWEEP_IMAGES = 256

# Returns those of the images that turned up, by address: where they are held, or nowhere when it is their bytes that
# are there.
Look = Callable[[Collection[ImageKey]], Awaitable[Mapping[bytes, Locations]]]


class SubmitWaiters:
    """Up to `max_waiters` waiters, shared among clients, for any number of addresses. One event loop's."""

    def __init__(self, look: Look, can_look: Callable[[], bool], max_waiters: int) -> None:
        """`look` asks others for many addresses at once; `can_look` says whether there is anyone to ask."""
        self._look = look
        self._can_look = can_look
        self._room = Shares(max_waiters, "images that nobody has submitted")
        self._waiters: dict[bytes, set[asyncio.Future[Locations]]] = {}
        self._keys: dict[bytes, ImageKey] = {}  # what is waited for, in the order in which it is looked for
        self._sweeping: asyncio.Task[None] | None = None

    async def wait(self, key: ImageKey, client_id: str, until: float) -> Locations:
        """Return when the image is submitted here (then nothing) or elsewhere (then where, if it is held there).

        Raises `TimeoutError` at `until`, on the clock of the loop, and `OverloadedError` when too many wait.
        """
        self._room.take((client_id,))
        waiter: asyncio.Future[Locations] = asyncio.get_running_loop().create_future()
        self._waiters.setdefault(key.address, set()).add(waiter)
        self._keys[key.address] = key
        if self._sweeping is None:
            self._sweeping = asyncio.create_task(self._sweep(), name="submit-waiters")
        try:
            async with asyncio.timeout_at(until):
                return await waiter
        finally:
            self._room.give_back((client_id,))
            self._leave(key.address, waiter)

    def wake(self, address: bytes, locations: Locations = ()) -> None:
        """Say that `address` is here, or at these locations."""
        self._keys.pop(address, None)
        for waiter in self._waiters.pop(address, ()):
            if not waiter.done():
                waiter.set_result(locations)

    def _leave(self, address: bytes, waiter: "asyncio.Future[Locations]") -> None:
        waiting = self._waiters.get(address)
        if waiting is not None:
            waiting.discard(waiter)
            if not waiting:
                del self._waiters[address], self._keys[address]

    async def _sweep(self) -> None:
        try:
            while self._waiters:
                await asyncio.sleep(SWEEP_S)
                if self._can_look():
                    sought = list(islice(self._keys.values(), SWEEP_IMAGES))
                    for key in sought:
                        self._keys[key.address] = self._keys.pop(key.address)  # last in line
                    for address, locations in (await self._look(sought)).items():
                        self.wake(address, locations)
        finally:
            self._sweeping = None
