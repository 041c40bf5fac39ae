"""Round robin: each holder's turn comes once a round, and a holder's own items keep their order."""

import pytest

from encoder_service.round_robin import RoundRobin


def test_holders_take_turns_and_a_holders_items_keep_their_order() -> None:
    queue: RoundRobin[str] = RoundRobin()
    for item in ("a1", "a2", "a3", "b1", "c1", "b2"):
        queue.put(item[0], item)
    order = []
    while queue:
        order.append(queue.pop())
    assert order == ["a1", "b1", "c1", "a2", "b2", "a3"]


def test_a_holder_that_comes_back_goes_behind_the_others() -> None:
    queue: RoundRobin[str] = RoundRobin()
    for item in ("a1", "b1"):
        queue.put(item[0], item)
    assert queue.pop() == "a1"
    queue.put("a", "a2")
    assert [queue.pop(), queue.pop()] == ["b1", "a2"]
    with pytest.raises(KeyError):
        queue.pop()


def test_clear_removes_every_item() -> None:
    queue: RoundRobin[int] = RoundRobin()
    queue.put("a", 1)
    queue.clear()
    assert not queue
