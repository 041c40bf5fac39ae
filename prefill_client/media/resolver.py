"""Names of hosts to addresses: in a bounded number of threads, each name once at a time."""

import asyncio
import ipaddress
import socket
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

# A lookup blocks its thread for as long as the system's resolver likes: 10 s by default for a name server that is down.
THREADS = 32


@dataclass(eq=False, slots=True)
class _Lookup:
    """A lookup that waits for a thread or has one, and how many wait for it."""

    future: "Future[list[Any]]"
    waiting: int = 0


class Resolver:
    """Looks names up. Belongs to one event loop."""

    def __init__(self) -> None:
        self._threads = ThreadPoolExecutor(THREADS, thread_name_prefix="resolve")
        self._lookups: dict[tuple[str, int], _Lookup] = {}

    async def addresses(self, host: str, port: int) -> list[str]:
        """Return the addresses of a host, as text; those of an address at once. Raises `OSError`."""
        if _is_address(host):
            return [host]
        lookup = self._lookups.get((host, port)) or self._begin(host, port)
        lookup.waiting += 1
        try:
            found = await asyncio.shield(asyncio.wrap_future(lookup.future))
        finally:
            lookup.waiting -= 1
            if not lookup.waiting and lookup.future.cancel():  # it had no thread yet
                self._end(host, port, lookup)
        return [str(address[0]) for *_, address in found]

    def _begin(self, host: str, port: int) -> _Lookup:
        loop = asyncio.get_running_loop()
        future = self._threads.submit(socket.getaddrinfo, host, port, type=socket.SOCK_STREAM)
        lookup = self._lookups[host, port] = _Lookup(future)

        def ended(_: object) -> None:
            with suppress(RuntimeError):  # the loop was closed while the thread was blocked
                loop.call_soon_threadsafe(self._end, host, port, lookup)

        future.add_done_callback(ended)
        return lookup

    def _end(self, host: str, port: int, lookup: _Lookup) -> None:
        if self._lookups.get((host, port)) is lookup:
            del self._lookups[host, port]


def _is_address(host: str) -> bool:
    try:
        ipaddress.ip_address(host)
    except ValueError:
        return False
    return True
