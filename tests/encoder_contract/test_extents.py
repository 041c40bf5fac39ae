"""Bytes over extents: everything is moved, once, in order, and nothing beside it."""

import itertools
import math
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from encoder_contract.errors import InternalError
from encoder_contract.extents import Extent, Filling, cut, move_all, pairs, views
from encoder_contract.framing import checksum

MEMORY = 256
parts = st.lists(st.integers(0, 12), max_size=8)
KINDS: dict[str, Callable[[bytearray], Any]] = {
    "memoryview": memoryview,
    "array": lambda data: np.frombuffer(data, np.uint8),
    "tensor": lambda data: torch.frombuffer(data, dtype=torch.uint8),
}


@st.composite
def layouts(draw: st.DrawFn, total: int | None = None) -> list[Extent]:
    """Extents that do not overlap, in any order, of `total` bytes in all."""
    lengths = draw(parts.filter(any)) if total is None else []
    while (left := (total or 0) - sum(lengths)) > 0:
        lengths.append(draw(st.integers(1, left)))
    gaps = draw(st.lists(st.integers(0, 9), min_size=len(lengths), max_size=len(lengths)))
    ends = itertools.accumulate(map(sum, zip(lengths, gaps, strict=True)))
    extents = [(end - length, length) for end, length in zip(ends, lengths, strict=True)]
    return draw(st.permutations(extents))


def total_of(extents: list[Extent]) -> int:
    return sum(length for _, length in extents)


def bytes_in(memory: bytearray, extents: list[Extent]) -> bytes:
    return b"".join(memory[offset : offset + length] for offset, length in extents)


def random_bytes(seed: int, size: int = MEMORY) -> bytearray:
    return bytearray(np.random.default_rng(seed).bytes(size))


def outside(memory: bytearray, extents: list[Extent]) -> bytes:
    """Return the bytes that belong to no extent."""
    inside = {at for offset, length in extents for at in range(offset, offset + length)}
    return bytes(byte for at, byte in enumerate(memory) if at not in inside)


@given(data=st.data(), targets=layouts(), base=st.integers(0, 9))
@pytest.mark.parametrize("kind", KINDS)
def test_pairs_copy_every_byte_once_and_touch_no_other(
    kind: str, data: st.DataObject, targets: list[Extent], base: int
) -> None:
    sources = data.draw(layouts(total_of(targets)))
    into, before, source = random_bytes(1), random_bytes(1), random_bytes(2)
    view = KINDS[kind]
    counts = []
    for target, part in pairs(views(view(into), targets, base), views(view(source), sources)):
        assert len(target) == len(part) > 0
        target[:] = part
        counts.append(len(target))
    moved = [(base + offset, length) for offset, length in targets]
    assert bytes_in(into, moved) == bytes_in(source, sources)
    assert outside(into, moved) == outside(before, moved)
    assert sum(counts) == total_of(targets)
    assert len(counts) < len(targets) + len(sources) or not counts, "no cut that neither side has"


@pytest.mark.parametrize(
    ("targets", "sources"), [([3], [2]), ([2], [3]), ([2], [2, 1]), ([], [1]), ([1], [])]
)
def test_unequal_totals_are_an_error(targets: list[int], sources: list[int]) -> None:
    with pytest.raises(AssertionError, match="bytes than the targets"):
        list(pairs(map(bytes, targets), map(bytes, sources)))


@given(layout=layouts(), most=st.integers(1, 9))
def test_parts_are_small_enough_and_no_smaller_than_they_must_be(layout: list[Extent], most: int) -> None:
    memory = random_bytes(3)
    found = list(cut(views(memoryview(memory), layout), lambda _: most))
    assert b"".join(found) == bytes_in(memory, layout)
    assert all(0 < len(part) <= most for part in found)
    assert len(found) == sum(math.ceil(length / most) for _, length in layout)


@given(st.integers(0, 20), st.lists(st.integers(0, 5), max_size=30))
def test_a_view_is_moved_until_it_is_complete_or_nothing_comes(size: int, counts: list[int]) -> None:
    view, calls = memoryview(bytes(range(size))), []

    def move(rest: memoryview, moved: int) -> int:
        assert bytes(rest) == bytes(view[moved:])
        calls.append(min(counts[len(calls)], len(rest)) if len(calls) < len(counts) else 0)
        return calls[-1]

    moved = move_all(view, move)
    assert moved == sum(calls)
    assert moved == size or calls[-1] == 0
    assert all(calls[:-1])


@given(layout=layouts(), data=st.data())
def test_arriving_bytes_fill_the_views_in_order(layout: list[Extent], data: st.DataObject) -> None:
    size, memory, before = total_of(layout), random_bytes(4), random_bytes(4)
    sent, at = bytes(random_bytes(5, size)), 0
    filling = Filling(views(memoryview(memory), layout))
    while at < size:
        count = data.draw(st.integers(0, size - at))
        filling.add(memoryview(sent)[at : at + count])
        at += count
        assert filling.missing_bytes == size - at
        assert filling.checksum == checksum([memoryview(sent)[:at]])
    assert bytes_in(memory, layout) == sent
    assert outside(memory, layout) == outside(before, layout)


@given(layout=layouts(), data=st.data())
def test_bytes_past_the_end_are_refused_and_none_is_written(
    layout: list[Extent], data: st.DataObject
) -> None:
    size, memory = total_of(layout), bytearray(MEMORY)
    filling = Filling(views(memoryview(memory), layout))
    first = data.draw(st.integers(0, size))
    filling.add(memoryview(bytes(first)))
    with pytest.raises(InternalError, match="are missing"):
        filling.add(memoryview(b"\1" * (size - first + data.draw(st.integers(1, 9)))))
    assert not any(memory)
    assert filling.missing_bytes == size - first
