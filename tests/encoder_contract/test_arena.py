"""The arena: each page has one owner, and long runs are preferred."""

import random
from time import perf_counter

from hypothesis import given, settings
from hypothesis import strategies as st

from encoder_contract.arena import Arena

# A positive number allocates as many pages; a negative one frees the allocation of that rank.
steps = st.lists(st.integers(-8, 12), max_size=60)


def pages_of(runs):
    return [page for start, count in runs for page in range(start, start + count)]


@given(steps=steps, pages=st.integers(1, 40), max_runs=st.integers(1, 5))
@settings(max_examples=300, deadline=None)
def test_no_page_ever_has_two_owners_and_none_is_lost(steps, pages, max_runs):
    arena = Arena(pages)
    held = []
    for step in steps:
        if step > 0:
            runs = arena.allocate(step, max_runs)
            if runs is not None:
                assert len(runs) <= max_runs
                assert len(pages_of(runs)) == step
                held.append(runs)
        elif held:
            arena.free(held.pop(step % len(held)))
        owned = [page for runs in held for page in pages_of(runs)]
        assert len(owned) == len(set(owned))
        assert all(0 <= page < pages for page in owned)
        assert arena.free_pages == pages - len(owned)
        free = sorted(set(range(pages)) - set(owned))
        assert arena.free_runs == sum(page - 1 not in free for page in free)


@given(steps=steps, pages=st.integers(1, 40))
@settings(max_examples=100, deadline=None)
def test_allocation_fails_only_if_the_longest_free_runs_are_too_short(steps, pages):
    arena = Arena(pages)
    owned, held = set(), []
    for step in steps:
        if step > 0:
            lengths, page = [], 0
            while page < pages:
                end = page
                while end < pages and end not in owned:
                    end += 1
                lengths.append(end - page)
                page = end + 1
            runs = arena.allocate(step, 2)
            assert (runs is None) == (sum(sorted(lengths)[-2:]) < step)
            if runs is not None:
                held.append(runs)
                owned |= set(pages_of(runs))
        elif held:
            runs = held.pop(step % len(held))
            arena.free(runs)
            owned -= set(pages_of(runs))


def test_the_shortest_run_that_fits_is_taken():
    arena = Arena(100)
    parts = [arena.allocate(count, 1) for count in (10, 1, 4, 1, 6, 78)]
    for part in parts[0:6:2]:
        arena.free(part)
    assert arena.allocate(4, 1) == parts[2]
    assert arena.allocate(5, 1) == ((parts[4][0][0], 5),)


def test_it_counts_the_bytes_of_a_large_host():
    arena = Arena(4 << 40)
    parts = [arena.allocate(1 << 40, 1) for _ in range(4)]
    assert parts == [((number << 40, 1 << 40),) for number in range(4)]
    arena.free(parts[3])
    assert arena.largest_free_run == 1 << 40


def test_an_embedding_is_split_only_when_no_run_holds_it():
    arena = Arena(10)
    parts = [arena.allocate(2, 1) for _ in range(5)]
    arena.free(parts[0])
    arena.free(parts[2])
    assert arena.allocate(4, 1) is None
    assert sorted(arena.allocate(4, 2)) == [parts[0][0], parts[2][0]]


def test_an_allocation_costs_the_same_beside_thousands():
    def seconds(images):
        """Return the least time of a release and an allocation beside this many allocations."""
        arena = Arena(images * 4096)
        held = [arena.allocate(3072, 1) for _ in range(images)]
        random.Random(1).shuffle(held)
        times = []
        for _ in range(200):
            begun = perf_counter()
            arena.free(held.pop(0))
            held.append(arena.allocate(3072, 1))
            times.append(perf_counter() - begun)
        return min(times)

    assert seconds(5000) < 20 * seconds(10), "walking the free runs would take hundreds of times as long"
