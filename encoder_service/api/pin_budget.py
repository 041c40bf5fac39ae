"""The pin budget: how many bytes of the store calls may keep pinned, shared among clients."""

import asyncio
from collections import Counter

from encoder_contract.errors import OverloadedError
from encoder_service.scheduler.shares import Shares

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
        return min(
            size_bytes, self._shares.size
        )  # an image larger than the whole budget is pinned when nothing else is
