"""The leases this replica holds, and the publications it still owes."""

from collections.abc import Callable, Iterable
from time import monotonic

from encoder_service.index.contract import MAX_LEASE_S, Tier


class Leases:
    """Addresses granted to us, each with the time up to which it is renewed, and those published in vain so far.

    A publication that did not get through is owed: its lease is kept, so that nobody encodes the image again
    meanwhile, and the index publishes it with the next heartbeat.
    """

    def __init__(self, clock: Callable[[], float] = monotonic) -> None:
        self._clock = clock
        self._until: dict[bytes, float] = {}
        self._owed: dict[bytes, Tier] = {}

    def __len__(self) -> int:
        return len(self._until)

    def add(self, addresses: Iterable[bytes]) -> None:
        """Note leases that were granted."""
        until = self._clock() + MAX_LEASE_S
        for address in addresses:
            self._until.setdefault(address, until)

    def end(self, addresses: Iterable[bytes]) -> None:
        """Forget leases, and what is owed for them."""
        for address in addresses:
            self._until.pop(address, None)
            self._owed.pop(address, None)

    def owe(self, addresses: Iterable[bytes], tier: Tier) -> None:
        """Note publications that did not get through; without a lease nobody waits, and none is owed."""
        for address in addresses:
            if address in self._until:
                self._owed[address] = tier

    def owed(self, tier: Tier) -> list[bytes]:
        """Return the addresses whose publication at `tier` is owed."""
        return [address for address, owed_tier in self._owed.items() if owed_tier is tier]

    def all(self) -> list[bytes]:
        """Return every lease held."""
        return list(self._until)

    def to_renew(self) -> list[bytes]:
        """Return the leases to renew now; those held for too long are forgotten."""
        now = self._clock()
        self.end([address for address, until in self._until.items() if until <= now])
        return list(self._until)
