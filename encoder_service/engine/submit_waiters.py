"""Fetches that wait for images which are not here, and callers that have the files and can send them again."""

import asyncio

from encoder_contract.errors import EncoderError, UnknownImageError
from encoder_service.address import ImageKey
from encoder_service.cluster.contract import Cluster, Locations
from encoder_service.scheduler.shares import Shares


class Keeper:
    """A caller that has the files of images for as long as its call is open."""

    def __init__(self) -> None:
        self.turned = asyncio.Event()
        """Set when one of the two below has changed."""
        self.asked: dict[
            bytes, None
        ] = {}  # addresses of images that a Fetch waits for, in the order of the Fetches
        self.end: EncoderError | None = None


class SubmitWaiters:
    """Up to `max_waiters` waiters, shared among holders, for any number of addresses. One event loop's."""

    def __init__(self, cluster: Cluster, max_waiters: int) -> None:
        self._cluster = cluster
        self._room = Shares(max_waiters, "images that nobody has submitted")
        self._waiters: dict[bytes, set[asyncio.Future[Locations]]] = {}
        self._keepers: dict[bytes, dict[Keeper, None]] = {}
        self._end: EncoderError | None = None

    async def wait(self, key: ImageKey, holder: str, until: float) -> Locations:
        """Return when the image is submitted here (then nothing) or elsewhere (then where, if it is held there).

        A caller that keeps the image is asked for it. Raises `UnknownImageError` at `until`, on the clock of the loop,
        or when `give_up` says so, `OverloadedError` when too many wait, and what `end` was told.
        """
        if self._end is not None:
            raise self._end
        unknown = UnknownImageError(key.unknown)
        if asyncio.get_running_loop().time() >= until:
            raise unknown
        self._room.take((holder,))
        waiter: asyncio.Future[Locations] = asyncio.get_running_loop().create_future()
        self._waiters.setdefault(key.address, set()).add(waiter)
        self._cluster.search(key, self.wake)
        self._ask(key.address)
        try:
            async with asyncio.timeout_at(until):
                return await waiter
        except TimeoutError:
            raise unknown from None
        finally:
            self._room.give_back((holder,))
            self._leave(key.address, waiter)

    def keep(self, address: bytes, keeper: Keeper) -> None:
        """Note that `keeper` has the file of an image."""
        self._keepers.setdefault(address, {})[keeper] = None
        keeper.end = self._end

    def keep_no_more(self, address: bytes, keeper: Keeper) -> None:
        """Undo `keep`. If someone waits for the image, another keeper is asked."""
        if keepers := self._keepers.get(address):
            keepers.pop(keeper, None)
            if not keepers:
                del self._keepers[address]
            elif address in self._waiters:
                self._ask(address)

    def end(self, error: EncoderError) -> None:
        """Say that nothing will be submitted here any more: whoever waits, comes to, or keeps images, hears `error`."""
        self._end = error
        self.end_keeping(error)
        for waiter in [waiter for waiters in self._waiters.values() for waiter in waiters]:
            if not waiter.done():
                waiter.set_exception(error)

    def end_keeping(self, error: EncoderError) -> None:
        """Say to all who keep images, with `error`, that they are to submit them elsewhere."""
        for keeper in {keeper for keepers in self._keepers.values() for keeper in keepers}:
            keeper.end = error
            keeper.turned.set()

    def wake(self, address: bytes, locations: Locations = ()) -> None:
        """Say that `address` is here, or at these locations."""
        self._cluster.end_search(address)
        for waiter in self._waiters.pop(address, ()):
            if not waiter.done():
                waiter.set_result(locations)

    def give_up(self, key: ImageKey) -> None:
        """Say that whoever was at this image will not finish it: those who wait for it need not wait on."""
        self._cluster.end_search(key.address)
        for waiter in self._waiters.pop(key.address, ()):
            if not waiter.done():
                waiter.set_exception(UnknownImageError(key.unknown))

    def _ask(self, address: bytes) -> None:
        if keepers := self._keepers.get(address):
            keeper = next(reversed(keepers))
            keeper.asked[address] = None
            keeper.turned.set()

    def _leave(self, address: bytes, waiter: "asyncio.Future[Locations]") -> None:
        waiting = self._waiters.get(address)
        if waiting is not None:
            waiting.discard(waiter)
            if not waiting:
                del self._waiters[address]
                self._cluster.end_search(address)
