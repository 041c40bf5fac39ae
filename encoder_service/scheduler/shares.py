"""A bounded quantity that several holders share: whoever has some leaves a part to those who come later."""

import math
from collections import Counter
from collections.abc import Collection

from encoder_contract.errors import OverloadedError

# What one holder may have of it while nobody else has any.
SHARE = 0.75
# What is held here comes and goes with calls: the next place is about a network round away.
RETRY_AFTER_MS = 200


class Shares:
    """So much of something (`what`, for messages), lent to holders who are known by name.

    A holder may have `SHARE / (1 - SHARE)` times what stays free, so the greedy end up equal and a part stays free for
    a newcomer; the first that a holder takes needs only to fit.
    """

    def __init__(self, size: int, what: str) -> None:
        self._what = what
        self.size = size
        self.held = 0
        self._holders: Counter[str] = Counter()

    def take(self, holders: Collection[str], amount: int = 1) -> None:
        """Lend `amount` in the name of every one of `holders`; raises `OverloadedError`, and lends nothing then."""
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
        """Undo a `take`, or a part of one."""
        self.held -= amount
        for holder in set(holders):
            self._holders[holder] -= amount
            if not self._holders[holder]:
                del self._holders[holder]
