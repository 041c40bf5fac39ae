"""Round robin: a queue in which holders take turns, however many items each of them has."""

from collections import OrderedDict, deque
from typing import Generic, TypeVar

T = TypeVar("T")


class RoundRobin(Generic[T]):
    """Items by holder. `pop` returns the oldest item of the holder that has waited longest. Not thread-safe."""

    def __init__(self) -> None:
        self._items: OrderedDict[str, deque[T]] = OrderedDict()

    def put(self, holder: str, item: T) -> None:
        self._items.setdefault(holder, deque()).append(item)

    def pop(self) -> T:
        """Remove an item and return it. Raises `KeyError` if there is none."""
        holder, items = self._items.popitem(last=False)
        item = items.popleft()
        if items:
            self._items[holder] = items  # behind the other holders
        return item

    def clear(self) -> None:
        self._items.clear()

    def __bool__(self) -> bool:
        return bool(self._items)
