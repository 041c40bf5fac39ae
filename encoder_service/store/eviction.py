"""The order in which a cache evicts: by the learned chance of another use, with a guarantee for each holder.

Rows (`tier.py`) and image files (`image/sources.py`) use it. Not thread-safe: its owner calls it with a lock held.
"""

from collections import OrderedDict
from collections.abc import Hashable
from math import inf
from typing import Any, Generic, TypeAlias, TypeVar

MAX_HOLDERS = 64
"""Most holders with a share of their own. All further holders count against one common share, because each eviction
walks all shares."""
USES = 4
"""Items are told apart by their number of uses so far, up to this one."""
SAME_USE_S = 10.0
"""Requests for an item within this time of its last counted use are part of that use: a Submit, and the Fetches of
its request's chunks."""
LEARNING = 0.005
"""Weight of the newest observation in a chance."""
SELDOM = 0.02
"""Items with a lower chance are evicted before all others."""
CLAIM = 0.3
"""Items with a lower chance are not protected by the guarantee."""
UNUSED_S = 600.0
"""Nor are items that were unused for this long, so that a holder that has left does not keep its share."""
SPREAD = 2.0
"""How much longer an item with chance 1 stays than one with chance 0, in turnovers of the cache."""
MAX_REMEMBERED = 65_536
"""Most dropped items that are remembered, about 20 MB. Each holder has an even part."""


class Item:
    """What a cache evicts: its amounts of the cache's limits, whose share it counts against, and how it was used."""

    __slots__ = ("amounts", "counted_s", "key", "reuse", "share", "used_at", "uses")

    share: "Share[Any]"
    reuse: "ReuseClass[Any]"

    def __init__(self, key: Hashable, *amounts: int) -> None:
        self.key = key
        self.amounts = amounts
        self.uses = 0
        self.counted_s = float("-inf")  # time of the last counted use, seconds
        self.used_at = 0.0  # time of the last use, on the clock of the order

    @property
    def holder(self) -> str:
        """The holder whose share it counts against; empty for the common share."""
        return self.share.name

    def continue_from(self, other: "Item") -> None:
        """Take over how `other`, a copy of this new item in another cache, was used. Call it after `admit`."""
        self.uses, self.counted_s = other.uses, other.counted_s
        self.reuse = self.share.after(self.uses)


AnyItem = TypeVar("AnyItem", bound=Item)


Past: TypeAlias = tuple[int, float, tuple[int, ...]]
"""A dropped item: its number of uses, the time of the last counted one, and its amounts."""


class ReuseClass(Generic[AnyItem]):
    """The evictable items of one holder after the same number of uses, and their chance of another use."""

    __slots__ = ("chance", "items")

    def __init__(self) -> None:
        self.chance = 0.5
        self.items: OrderedDict[AnyItem, None] = OrderedDict()  # the least recently used is first


class Share(Generic[AnyItem]):
    """What one holder has: the amounts of its items, pinned or not, and its items that are evictable.

    `past` has its dropped items, the first dropped first, and `remembered` their amounts.
    """

    __slots__ = ("classes", "held", "name", "past", "remembered")

    def __init__(self, name: str, limits: int) -> None:
        self.name = name
        self.held = [0] * limits
        self.classes: tuple[ReuseClass[AnyItem], ...] = tuple(ReuseClass() for _ in range(USES))
        self.past: OrderedDict[Hashable, Past] = OrderedDict()
        self.remembered = [0] * limits

    def after(self, uses: int) -> ReuseClass[AnyItem]:
        """Return the class of items after this number of uses, at least one."""
        return self.classes[min(uses, USES) - 1]

    def class_of_next_use(self, key: Hashable) -> ReuseClass[AnyItem]:
        """Return the class that a new item is in after its first use."""
        return self.after(1 + self.past[key][0]) if key in self.past else self.classes[0]

    def forget(self, key: Hashable) -> Past:
        """Remove a dropped item from the memory and return it."""
        past = self.past.pop(key)
        for limit, amount in enumerate(past[2]):
            self.remembered[limit] -= amount
        return past

    def learn_unused(self, uses: int) -> None:
        """Count an item that was not used again after this number of uses."""
        reuse = self.after(uses)
        reuse.chance -= LEARNING * reuse.chance


class EvictionOrder(Generic[AnyItem]):
    """Says which item a cache with one or more limits evicts next. The cache keeps the items.

    **Order.** The item with the lowest rank goes first: the time of its last use plus (chance - 1/2) times `SPREAD`
    turnovers of the cache. The chance is the share of such items (same holder, as many uses) that were used again. The
    clock advances by the first amount of each item that is used. Items that are `SELDOM` used again go before all
    others.

    **Memory.** A dropped item is remembered until its holder has dropped an even share more. A request for it until
    then is another use, as if it had been kept: so what is learned does not depend on what was kept, and a holder
    whose items were never used again gets its share back when they are.

    **Guarantee.** Each holder has a claim to an even share of each limit. A holder that has more cannot evict the items
    of one that has less, and a holder that has less evicts none of its own. Items whose chance is below `CLAIM`, or
    that were unused for `UNUSED_S`, are not protected. For a new item whose like has so low a chance, a holder has no
    claim, and may evict any of its own.

    A pinned item is not in the order. `victim` looks at the oldest item of each class, so at a bounded number of items;
    all other methods take the same time for any number of items and holders.
    """

    def __init__(self, *limits: float) -> None:
        """The cache is full when the sum of any of the items' amounts is above its limit."""
        self.shares: dict[str, Share[AnyItem]] = {
            "": Share("", len(limits))
        }  # by holder; "" is the common one
        self._idle = {""}  # the holders that have nothing
        self._limits = limits
        self._clock = 0.0

    @property
    def held(self) -> dict[str, tuple[int, ...]]:
        """The amounts that each holder has, without holders that have nothing."""
        return {name: tuple(share.held) for name, share in self.shares.items() if any(share.held)}

    def admit(self, item: AnyItem, holder: str) -> None:
        """Count a new item against the share of `holder`. It is not evictable until `add`."""
        share = self._share(holder)
        item.share, item.reuse = share, share.classes[0]
        self._idle.discard(share.name)
        for limit, amount in enumerate(item.amounts):
            share.held[limit] += amount

    def release(self, item: AnyItem) -> None:
        """Undo `admit`: the item is not evictable and has left the cache."""
        for limit, amount in enumerate(item.amounts):
            item.share.held[limit] -= amount
        if not any(item.share.held):
            self._idle.add(item.share.name)

    def use(self, item: AnyItem, now: float) -> None:
        """Count a use of an item that is not in the order. `now` is in seconds.

        A use within `SAME_USE_S` of the last counted one is part of that one.
        """
        if not item.uses and item.key in item.share.past:
            self.recall(item, now)
        if now - item.counted_s < SAME_USE_S:
            return
        if item.uses:
            item.reuse.chance += LEARNING * (1 - item.reuse.chance)
        if item.uses < USES:
            item.reuse = item.share.classes[item.uses]
        item.uses += 1
        item.counted_s = now
        self._clock += item.amounts[0]

    def add(self, item: AnyItem) -> None:
        """Make an item evictable, as the most recently used one of its class."""
        item.used_at = self._clock
        item.reuse.items[item] = None

    def remove(self, item: AnyItem) -> None:
        """Remove an item that is pinned or dropped."""
        del item.reuse.items[item]

    def dropped(self, item: AnyItem) -> None:
        """Remember an item that makes room for others. Its class learns that it was not used when it is forgotten."""
        share = item.share
        if item.key in share.past:  # of a time before this item came as a copy
            share.forget(item.key)
        share.past[item.key] = item.uses, item.counted_s, item.amounts
        holders = max(1, len(self.shares) - len(self._idle))
        for limit, amount in enumerate(item.amounts):
            share.remembered[limit] += amount
            even = self._limits[limit] / holders
            while share.remembered[limit] > even or len(share.past) > MAX_REMEMBERED / holders:
                share.learn_unused(share.forget(next(iter(share.past)))[0])

    def recall(self, item: AnyItem, now: float) -> bool:
        """Take over how a new item was used before it was dropped; return whether that is remembered."""
        share = item.share
        if item.key not in share.past:
            return False
        uses, counted_s, _ = share.forget(item.key)
        if now - counted_s > UNUSED_S:
            share.learn_unused(uses)
            return False
        item.uses, item.counted_s, item.reuse = uses, counted_s, share.after(uses)
        return True

    def victim(
        self, now: float, holder: str | None = None, new: int = 0, limit: int = 0, key: Hashable = None
    ) -> AnyItem | None:
        """Return the item to evict so that `holder` can add item `key`, which has `new` of a limit; None without one.

        `limit` is the number of the limit that is short: shares are shares of that one. `now` is as in `use`.
        """
        writer = None if holder is None else self._share(holder)
        has_claim = writer is not None and writer.class_of_next_use(key).chance >= CLAIM
        holders = len(self.shares) - len(self._idle) + (writer is not None and writer.name in self._idle)
        even = self._limits[limit] / max(1, holders)
        turnovers = SPREAD * self._limits[0]
        far = 2 * (self._clock + turnovers)  # more than any difference of two ranks
        victim: AnyItem | None = None
        lowest = inf
        for share in self.shares.values():
            held = share.held[limit] + (new if share is writer else 0)
            is_open = held > even or (share is writer and not has_claim)
            for each in share.classes:
                if not each.items:
                    continue
                oldest = next(iter(each.items))
                rank = oldest.used_at + turnovers * each.chance
                if each.chance < SELDOM:
                    rank -= far
                elif not is_open and each.chance >= CLAIM and now - oldest.counted_s <= UNUSED_S:
                    rank += far
                if rank < lowest:
                    victim, lowest = oldest, rank
        return victim

    def _share(self, holder: str) -> Share[AnyItem]:
        """Return the share of `holder`, or the common one. Holders that have nothing make room for another."""
        share = self.shares.get(holder)
        if share is None and len(self.shares) > MAX_HOLDERS and (left := next(iter(self._idle - {""}), None)):
            self._idle.discard(left)
            del self.shares[left]
        if share is None and len(self.shares) > MAX_HOLDERS:
            share = self.shares[""]
        if share is None:
            share = self.shares[holder] = Share(holder, len(self._limits))
            self._idle.add(holder)
        return share
