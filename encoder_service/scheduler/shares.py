"""A bounded resource shared fairly: no holder may take so much that nothing is left for newcomers."""

import math
from collections import Counter
from collections.abc import Collection

from encoder_contract.errors import OverloadedError

# What one holder may take while no other holds any.
SHARE = 0.75
# Shares are held for the length of a call, so one is likely to be free after about a network round trip.
RETRY_AFTER_MS = 200


class Shares:
    """A bounded amount of a resource (`what`, for messages), lent to named holders.

    A holder may have `SHARE / (1 - SHARE)` times what stays free, so greedy holders converge to equal shares and a part
    stays free for newcomers; a holder's first amount only needs to fit.
    """

    def __init__(self, size: int, what: str) -> None:
        self._what = what
        self.size = size
        self.held = 0
        self._holders: Counter[str] = Counter()

    def take(self, holders: Collection[str], amount: int = 1) -> None:
        """Lend `amount`, counted against each of `holders`; raises `OverloadedError`, and then lends nothing."""
        free = self.size - self.held - amount
        if free < 0:
            raise OverloadedError(
                f"the server has no room for more {self._what}", retry_after_ms=RETRY_AFTER_MS
            )
        most = math.floor(free * SHARE / (1 - SHARE))
        if any(held and held + amount > most for held in map(self._holders.__getitem__, holders)):
            raise OverloadedError(
                f"this caller's share of {self._what} is taken", retry_after_ms=RETRY_AFTER_MS
            )
        self.held += amount
        self._holders.update(dict.fromkeys(holders, amount))

    def give_back(self, holders: Collection[str], amount: int = 1) -> None:
        """Undo a `take`, wholly or in part."""
        self.held -= amount
        for holder in set(holders):
            self._holders[holder] -= amount
            if not self._holders[holder]:
                del self._holders[holder]
