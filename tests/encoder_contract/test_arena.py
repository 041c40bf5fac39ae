"""The arena: each page has one owner, and long runs are preferred."""

import itertools
import random
from time import perf_counter

from hypothesis import given, settings
from hypothesis import strategies as st

from encoder_contract.arena import Arena

# A positive number allocates as many pages; a negative one frees the allocation of that rank.
steps = st.lists(st.integers(-8, 12), max_size=60)


def runs_of(free):
    """Return the runs of free pages, (pages, first page), the shortest first."""
    begins = [page for page in sorted(free) if page - 1 not in free]
    return sorted((next(n for n in itertools.count() if page + n not in free), page) for page in begins)


@given(steps=steps, pages=st.integers(1, 40), max_runs=st.integers(1, 5))
@settings(max_examples=400, deadline=None)
def test_the_shortest_run_that_fits_is_taken_else_some_of_the_longest_and_no_page_is_lost(
    steps, pages, max_runs
):
    arena, free, held = Arena(pages), set(range(pages)), []
    for step in steps:
        found = runs_of(free)
        if step > 0:
            taken = arena.allocate(step, max_runs)
            if fitting := [start for length, start in found if length >= step]:
                assert taken == ((fitting[0], step),)
            elif sum(length for length, _ in found[-max_runs:]) < step:
                assert taken is None
            else:
                assert len(taken) <= max_runs
                *whole, (_, rest) = taken
                assert [(length, start) for start, length in whole] == found[: -len(taken) : -1]
                assert sum(length for _, length in whole) + rest == step
            for start, length in taken or ():
                assert free >= {*range(start, start + length)}
                free -= {*range(start, start + length)}
            held += [taken] if taken else []
        elif held:
            arena.free(freed := held.pop(step % len(held)))
            free |= {page for start, length in freed for page in range(start, start + length)}
        found = runs_of(free)
        assert (arena.free_pages, arena.free_runs) == (len(free), len(found))
        assert arena.largest_free_run == max(found, default=(0, 0))[0]


def test_it_counts_the_bytes_of_a_large_host():
    arena = Arena(4 << 40)
    parts = [arena.allocate(1 << 40, 1) for _ in range(4)]
    assert parts == [((number << 40, 1 << 40),) for number in range(4)]
    arena.free(parts[3])
    assert arena.largest_free_run == 1 << 40


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
