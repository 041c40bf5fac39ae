"""Turns on the event loop: many small pieces of work, a few at a time, clients one after the other."""

import asyncio
from collections import OrderedDict, deque

# Pieces of work between two looks at the sockets. Finding one image's rows takes about 0.1 ms: whoever asks for
# thousands keeps others waiting for a millisecond at a time.
AT_A_TIME = 8


class Turns:
    """Lets `AT_A_TIME` callers of `take` go on in each pass of the event loop, in turn for each client. One loop's."""

    def __init__(self) -> None:
        self._waiting: OrderedDict[str, deque[asyncio.Future[None]]] = OrderedDict()
        self._is_passing = False
        self._left = AT_A_TIME

    async def take(self, client_id: str) -> None:
        """Return when it is this client's turn: at once while few ask."""
        if not self._is_passing:
            self._is_passing = True
            asyncio.get_running_loop().call_soon(self._pass)
        if self._left:
            self._left -= 1
            return
        turn: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._waiting.setdefault(client_id, deque()).append(turn)
        await turn

    def _pass(self) -> None:
        """Begin another pass of the loop: those who wait come before those who come."""
        self._left = AT_A_TIME
        while self._left and self._waiting:
            client_id, turns = self._waiting.popitem(last=False)
            turn = turns.popleft()
            if turns:
                self._waiting[client_id] = turns  # behind the others
            if not turn.done():
                turn.set_result(None)
                self._left -= 1
        self._is_passing = bool(self._waiting) or self._left < AT_A_TIME
        if self._is_passing:
            asyncio.get_running_loop().call_soon(self._pass)
