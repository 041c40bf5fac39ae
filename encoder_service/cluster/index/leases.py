"""The leases this replica holds, and the publications that are pending."""

from collections.abc import Callable, Iterable, Mapping
from time import monotonic

from encoder_contract.geometry import Grid

# Work that takes longer than any caller's deadline is not work: after this a lease is no longer renewed, so that
# an address that its holder forgot does not stay locked for as long as the holder lives.
MAX_LEASE_S = 300.0


class Leases:
    """Addresses granted to us, each with the time up to which it is renewed, and those published in vain so far.

    A publication that did not get through is pending: its lease is kept, so that nobody encodes the image again
    meanwhile, and the index publishes it with the next heartbeat.
    """

    def __init__(self, renew_s: float, clock: Callable[[], float] = monotonic) -> None:
        self._renew_s = renew_s
        self._clock = clock
        self._forget_at: dict[bytes, float] = {}
        self._renew_at: dict[bytes, float] = {}
        self.pending: dict[bytes, Grid] = {}

    def add(self, addresses: Iterable[bytes]) -> None:
        """Note leases that were granted just now."""
        now = self._clock()
        for address in addresses:
            self._forget_at.setdefault(address, now + MAX_LEASE_S)
            self._renew_at[address] = now + self._renew_s

    def renewed(self, addresses: Iterable[bytes]) -> None:
        """Note leases that were renewed just now, except those that ended meanwhile."""
        self.add(address for address in addresses if address in self._renew_at)

    def end(self, addresses: Iterable[bytes]) -> None:
        """Forget leases, and what is pending for them."""
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
        """Note publications that did not get through; without a lease nobody waits, and none is pending."""
        self.pending |= {address: grid for address, grid in grids.items() if address in self._renew_at}
