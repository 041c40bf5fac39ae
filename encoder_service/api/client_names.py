"""Client names: which of the names that callers give themselves have a share of their own."""

from collections.abc import Callable
from time import monotonic

from cachetools import LRUCache

# A share leaves room for three others of its size: with a host's own, five of them leave a sixteenth to other hosts.
MAX_NAMES_OF_A_HOST = 4
# A name holds its place for so long after it was last used: what was queued under it has left by then.
KEPT_S = 600.0
MAX_HOSTS = 4096


class ClientNames:
    """Names cost nothing to invent: the first few of each host count, all others of it are the host itself."""

    def __init__(self, clock: Callable[[], float] = monotonic) -> None:
        self._clock = clock
        self._hosts: LRUCache[str, dict[str, float]] = LRUCache(MAX_HOSTS)

    def counted(self, client_id: str, host: str) -> str:
        """Return the name that the shares of a caller count against; `client_id` is what it says, empty for nothing."""
        if not client_id:
            return host
        now = self._clock()
        used = self._hosts.setdefault(host, {})
        if client_id not in used and len(used) >= MAX_NAMES_OF_A_HOST:
            for name in [name for name, at in used.items() if now - at > KEPT_S]:
                del used[name]
            if len(used) >= MAX_NAMES_OF_A_HOST:
                return host
        used[client_id] = now
        return client_id
