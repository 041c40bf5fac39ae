"""The leases that this replica holds, and its pending publications."""

from collections.abc import Callable, Iterable, Mapping
from time import monotonic

from encoder_contract.geometry import Grid

# After this a lease is no longer renewed, so that an address that its holder forgot does not stay locked for as long as
# the holder lives. No caller waits this long for an image.
MAX_LEASE_S = 300.0


class Leases:
    """The addresses granted to us, with the time of each one's next renewal, and the publications that are pending.

    A publication is pending if it did not get through. Its lease is kept, so that no other replica encodes the image
    meanwhile, and it is sent again with the next heartbeat.
    """

    def __init__(self, renew_s: float, clock: Callable[[], float] = monotonic) -> None:
        self._renew_s = renew_s
        self._clock = clock
        self._forget_at: dict[bytes, float] = {}
        self._renew_at: dict[bytes, float] = {}
        self.pending: dict[bytes, Grid] = {}

    def add(self, addresses: Iterable[bytes]) -> None:
        """Note leases that were just granted."""
        now = self._clock()
        for address in addresses:
            self._forget_at.setdefault(address, now + MAX_LEASE_S)
            self._renew_at[address] = now + self._renew_s

    def renewed(self, addresses: Iterable[bytes]) -> None:
        """Note leases that were just renewed, except those that ended meanwhile."""
        self.add(address for address in addresses if address in self._renew_at)

    def end(self, addresses: Iterable[bytes]) -> None:
        """Forget leases and their pending publications."""
        for address in addresses:
            self._forget_at.pop(address, None)
            self._renew_at.pop(address, None)
            self.pending.pop(address, None)

    def all(self) -> list[bytes]:
        """Return every lease held."""
        return list(self._renew_at)

    def mark_due(self) -> None:
        """Make every lease due: the index may have lost them."""
        self._renew_at = dict.fromkeys(self._renew_at, self._clock())

    def due(self) -> list[bytes]:
        """Return the leases to renew now; those held for too long are forgotten."""
        now = self._clock()
        self.end([address for address, at in self._forget_at.items() if at <= now])
        return [address for address, at in self._renew_at.items() if at <= now]

    def add_pending(self, grids: Mapping[bytes, Grid]) -> None:
        """Note publications that did not get through; those without a lease are dropped, as nobody waits for them."""
        self.pending |= {address: grid for address, grid in grids.items() if address in self._renew_at}
