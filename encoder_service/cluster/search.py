"""Search: images that nobody has submitted here, looked for at the other replicas in one sweep for all."""

import asyncio
from collections.abc import Awaitable, Callable, Collection, Mapping
from itertools import islice

from encoder_service.address import ImageKey
from encoder_service.cluster.contract import Locations

# How often the sweep looks whether images have turned up elsewhere, and for how many of them at a time, those first
# that were looked for longest ago: some thousand keys a second, whoever waits for however many.
SWEEP_S = 0.25
SWEEP_IMAGES = 256

# As `Cluster.find`.
Find = Callable[[Collection[ImageKey]], Awaitable[Mapping[bytes, Locations]]]
Found = Callable[[bytes, Locations], None]


class Search:
    """Any number of images, each until it is found or `end` is called. One event loop's."""

    def __init__(self, find: Find, has_peers: Callable[[], bool]) -> None:
        """`find` asks about many images at once, and only while it `has_peers`: nothing turns up with nobody."""
        self._find = find
        self._has_peers = has_peers
        self._sought: dict[bytes, tuple[ImageKey, Found]] = {}  # in the order in which they are looked for
        self._sweeping: asyncio.Task[None] | None = None

    def begin(self, key: ImageKey, found: Found) -> None:
        """Call `found` once the image turns up."""
        self._sought[key.address] = key, found
        if self._sweeping is None:
            self._sweeping = asyncio.create_task(self._sweep(), name="cluster-search")

    def end(self, address: bytes) -> None:
        """Look for the address no longer."""
        self._sought.pop(address, None)

    async def _sweep(self) -> None:
        try:
            while self._sought:
                await asyncio.sleep(SWEEP_S)
                if self._has_peers():
                    await self._look()
        finally:
            self._sweeping = None

    async def _look(self) -> None:
        keys = [key for key, _ in islice(self._sought.values(), SWEEP_IMAGES)]
        for key in keys:
            self._sought[key.address] = self._sought.pop(key.address)  # last in line
        for address, locations in (await self._find(keys)).items():
            if address in self._sought:
                self._sought.pop(address)[1](address, locations)
