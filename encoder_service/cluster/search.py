"""The search for images that nobody has submitted here: one sweep over the other replicas for all of them."""

import asyncio
from collections.abc import Awaitable, Callable, Collection, Mapping
from itertools import islice

from encoder_service.address import ImageKey
from encoder_service.cluster.contract import Locations
from encoder_service.cluster.index.tasks import begin

# How often the sweep asks whether images have turned up elsewhere, and about how many, those first that were looked up
# longest ago: about a thousand keys a second, however many images are waited for.
SWEEP_S = 0.25
SWEEP_IMAGES = 256

# As `Cluster.find`.
Find = Callable[[Collection[ImageKey]], Awaitable[Mapping[bytes, Locations]]]
Found = Callable[[bytes, Locations], None]


class Search:
    """Looks for any number of images, each until it is found or `end` is called. Belongs to one event loop."""

    def __init__(self, find: Find, has_peers: Callable[[], bool]) -> None:
        """`find` looks many images up at once; it is called only while `has_peers` is true."""
        self._find = find
        self._has_peers = has_peers
        self._sought: dict[bytes, tuple[ImageKey, Found]] = {}  # the next to look up first
        self._sweeping: asyncio.Task[None] | None = None

    def begin(self, key: ImageKey, found: Found) -> None:
        """Call `found` once the image turns up."""
        self._sought[key.address] = key, found
        if self._sweeping is None:
            self._sweeping = begin(self._sweep(), "cluster-search")

    def end(self, address: bytes) -> None:
        """Stop looking for the address."""
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
