"""The pin budget: how many bytes of the store calls may keep pinned, shared among clients; and what one call keeps."""

import asyncio
from collections import Counter
from collections.abc import Awaitable, Callable
from contextlib import ExitStack

from encoder_contract.errors import OverloadedError
from encoder_service.scheduler.shares import Shares
from encoder_service.store import Pin

# Rows that are being sent, or read during a forward pass, are released sooner; a writer waits as long for space in
# the store.
WAIT_S = 2.0


class PinRoom:
    """Bytes of pinned rows by client; an image that a client pins in several calls counts once. For one event loop."""

    def __init__(self, size_bytes: int) -> None:
        self._shares = Shares(size_bytes, "pinned rows")
        self._pins: Counter[tuple[str, bytes]] = Counter()  # client and address
        self._released = asyncio.Event()

    @property
    def held_bytes(self) -> int:
        """Bytes pinned."""
        return self._shares.held

    async def take(self, client_id: str, address: bytes, size_bytes: int) -> None:
        """Count a pin; waits up to `WAIT_S` for space, then raises `OverloadedError`."""
        try:
            async with asyncio.timeout(WAIT_S):
                while not self.taken_at_once(client_id, address, size_bytes):
                    self._released.clear()
                    await self._released.wait()
        except TimeoutError:
            self._take(client_id, address, size_bytes)

    def taken_at_once(self, client_id: str, address: bytes, size_bytes: int) -> bool:
        """Count a pin if there is space now; return whether there was."""
        try:
            self._take(client_id, address, size_bytes)
        except OverloadedError:
            return False
        return True

    def give_back(self, client_id: str, address: bytes, size_bytes: int) -> None:
        """Undo a `take`."""
        self._pins[client_id, address] -= 1
        if not self._pins[client_id, address]:
            del self._pins[client_id, address]
            self._shares.give_back((client_id,), self._counted(size_bytes))
            self._released.set()

    def _take(self, client_id: str, address: bytes, size_bytes: int) -> None:
        if not self._pins[client_id, address]:
            self._shares.take((client_id,), self._counted(size_bytes))
        self._pins[client_id, address] += 1

    def _counted(self, size_bytes: int) -> int:
        # An image larger than the whole budget is pinned when nothing else is.
        return min(size_bytes, self._shares.size)


class Holds:
    """The rows that one call keeps pinned: `places` images at a time, each within its client's room for pins."""

    def __init__(self, room: PinRoom, client_id: str, places: int, row_bytes: int) -> None:
        self._room = room
        self._client_id = client_id
        self._places = asyncio.Semaphore(places)
        self._row_bytes = row_bytes
        self._held: set[ExitStack] = set()

    async def keep(self, pin: Pin, again: Callable[[], Awaitable[Pin]]) -> tuple[Pin, ExitStack]:
        """Return a pin on the rows of `pin`, which is taken over, and what `release` is called with.

        Rows that have to wait for a place are not pinned meanwhile: `again` finds them, or makes them, once more.
        """
        counted = (self._client_id, pin.address, pin.tokens * self._row_bytes)
        at_once = not self._places.locked() and self._room.taken_at_once(*counted)
        if not at_once:
            pin.release()
        with ExitStack() as hold:
            await self._places.acquire()
            hold.callback(self._places.release)
            if not at_once:
                await self._room.take(*counted)
            hold.callback(self._room.give_back, *counted)
            if not at_once:
                pin = await again()
            hold.push(pin)
            kept = hold.pop_all()
        self._held.add(kept)
        return pin, kept

    def release(self, hold: ExitStack) -> None:
        """Release the rows of one image."""
        hold.close()
        self._held.discard(hold)

    def __len__(self) -> int:
        return len(self._held)

    def close(self) -> None:
        """Release all."""
        for hold in self._held:
            hold.close()
