"""Batches: which images join a batch, which are prepared ahead, and how a failed batch is split."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from encoder_service.image.decoder import BATCH_IMAGES, DECODE_PIXELS
from encoder_service.scheduler import State
from encoder_service.vision.load import BATCH_PATCHES
from tests.scheduling import PATCHES, encode_order, is_empty, make, names, prepare_all, want


def test_a_batch_is_the_longest_prefix_of_the_order_that_fits_the_budget():
    scheduler = make()
    for number, patches in enumerate((300, 300, 500, 100)):
        want(scheduler, f"{number}", chunk=number, patches=patches)
    prepare_all(scheduler)
    assert names(scheduler.next_batch(0.0, 1000)) == ["0", "1"]
    assert names(scheduler.next_batch(0.0, 1000)) == ["2", "3"]
    assert scheduler.next_batch(0.0, 1000) == []


@pytest.mark.cuda
def test_gpu_batches_hold_one_large_image_or_many_small_ones():
    budget, scheduler = BATCH_PATCHES["cuda"], make()
    for number in range(3):
        want(scheduler, f"1080p {number}", f"r{number}", patches=8160)
        want(scheduler, f"960x1280 {number}", f"s{number}", patches=4800)
    for number in range(44):
        want(scheduler, f"256 {number}", f"t{number}", patches=256)
    prepare_all(scheduler)
    batches = []
    while batch := scheduler.next_batch(0.0, budget):
        batches.append(len(batch))
        scheduler.done(batch, 0.01)
    assert sorted(batches) == [1, 1, 1, 1, 1, 1, 22, 22]


@pytest.mark.cuda
def test_decoding_is_bounded_by_pixels():
    scheduler = make()
    for number in range(40):
        want(scheduler, f"{number}", patches=8160, pixels=1920 * 1080)
    assert len(scheduler.next_to_prepare(0.0, BATCH_IMAGES, DECODE_PIXELS)) == DECODE_PIXELS // (1920 * 1080)
    assert len(scheduler.next_to_prepare(0.0, 8, DECODE_PIXELS)) == 8


def test_an_image_larger_than_the_budget_goes_alone():
    scheduler = make()
    want(scheduler, "huge", patches=5000)
    want(scheduler, "next", chunk=1)
    prepare_all(scheduler)
    assert names(scheduler.next_batch(0.0, 1000)) == ["huge"]


def test_speculative_tasks_run_in_small_separate_batches():
    scheduler = make()
    want(scheduler, "demand", "a")
    for number in range(8):
        want(scheduler, f"guess{number}", "b", demanded=False)
    prepare_all(scheduler)
    assert names(scheduler.next_batch(0.0, 8 * PATCHES)) == ["demand"]
    assert len(scheduler.next_batch(0.0, 8 * PATCHES)) == 2


def test_only_small_demanded_images_of_no_lower_lane_overtake_a_batch():
    scheduler = make()
    want(scheduler, "large", patches=500)
    prepare_all(scheduler)
    batch = scheduler.next_batch(0.0, 1)
    want(scheduler, "guess", "a", patches=10, demanded=False)
    want(scheduler, "lower", "b", patches=10, priority=-1)
    prepare_all(scheduler)
    assert scheduler.next_overtaking(batch, 0.0, 250) == []
    want(scheduler, "small", "c")
    prepare_all(scheduler)
    assert scheduler.next_overtaking(batch, 0.0, PATCHES - 1) == []
    small = scheduler.next_overtaking(batch, 0.0, PATCHES)
    assert names(small) == ["small"]
    assert scheduler.next_overtaking(batch, 0.0, 250) == []
    scheduler.done(small, 0.1)
    scheduler.done(batch, 0.5)
    assert encode_order(scheduler) == ["lower", "guess"]
    assert is_empty(scheduler)


def test_an_image_overtakes_none_that_its_request_needs_no_later():
    scheduler = make()
    want(scheduler, "large", "a", chunk=1, patches=500)
    want(scheduler, "large", "b", chunk=5, demanded=False)
    prepare_all(scheduler)
    batch = scheduler.next_batch(0.0, 1)
    for chunk in (1, 2):
        want(scheduler, f"chunk {chunk}", "a", chunk=chunk)
        prepare_all(scheduler)
        assert scheduler.next_overtaking(batch, 0.0, 250) == []
    want(scheduler, "chunk 0", "a", chunk=0)
    want(scheduler, "speculated", "b", chunk=6)
    prepare_all(scheduler)
    overtaking = []
    while small := scheduler.next_overtaking(batch, 0.0, 250):
        overtaking += names(small)
        scheduler.done(small, 0.1)
    assert sorted(overtaking) == ["chunk 0", "speculated"], "the request b waits for no chunk of the batch"
    scheduler.done(batch, 0.5)
    assert encode_order(scheduler) == ["chunk 1", "chunk 2"]
    assert is_empty(scheduler)


def test_prepared_speculative_tasks_do_not_block_demanded_ones():
    scheduler = make(ahead_patches=3 * PATCHES)
    for number in range(10):
        want(scheduler, f"guess{number}", "b", demanded=False)
    prepare_all(scheduler)
    want(scheduler, "demand", "a")
    assert names(scheduler.next_to_prepare(0.0, 10)) == ["demand"]


def test_a_full_window_does_not_block_the_next_image_of_the_vit():
    scheduler = make(ahead_patches=3 * PATCHES)
    for number in range(10):
        want(scheduler, f"bulk{number}", "bulk")
    prepare_all(scheduler)
    want(scheduler, "small", "small", patches=1)
    assert names(scheduler.next_to_prepare(0.0, 10)) == ["small"]
    assert scheduler.next_to_prepare(0.0, 10) == []


def test_single_decodes_do_not_block_other_images():
    scheduler = make(ahead_patches=3 * PATCHES)
    slow = [want(scheduler, f"slow{number}", patches=3 * PATCHES, single=True).task for number in range(4)]
    assert [scheduler.next_single(0.0, 10**9) for _ in slow] == [[task] for task in slow]
    for number in range(20):
        want(scheduler, f"{number}", "others")
    assert len(encode_order(scheduler)) == 20
    assert all(scheduler.prepared(task, 0.0) for task in slow)
    want(scheduler, "late", "others")
    assert scheduler.next_to_prepare(0.0, 10) == [], "what is ready counts"


@pytest.mark.parametrize("patches", [3 * PATCHES, 4 * PATCHES, 60 * PATCHES])
@pytest.mark.parametrize("single", [False, True])
def test_batched_small_images_do_not_delay_a_large_single_decode(single, patches):
    scheduler, number = make(ahead_patches=3 * PATCHES), 0
    taken = []

    def take(*, by_itself):
        while tasks := scheduler.next_single(0.0, 10**9) if by_itself else scheduler.next_to_prepare(0.0, 1):
            taken.extend(tasks)

    def flood():
        nonlocal number
        while scheduler.waiting_images < 12:
            number += 1
            want(scheduler, f"small{number}", f"r{number}", single=not single)
        take(by_itself=not single)

    flood()
    large = want(scheduler, "large", "large", patches=patches, single=single).task
    for _ in range(100):
        take(by_itself=single)
        if large in taken:
            break
        flood()
        scheduler.prepared(taken.pop(0), 0.0)
        scheduler.done(scheduler.next_batch(0.0, 2 * PATCHES), 0.1)
    assert large in taken


def test_the_decode_window_stays_bounded_when_demands_are_withdrawn():
    scheduler = make(ahead_patches=3 * PATCHES)
    for turn in range(5):
        for number in range(4):
            want(scheduler, f"{turn}.{number}", "a", demanded=False)
        prepare_all(scheduler)
        demands = [want(scheduler, f"{turn}.{number}.d", "b") for number in range(4)]
        for number in range(4):
            want(scheduler, f"{turn}.{number}.d", "a", demanded=False)
        prepare_all(scheduler)
        for claim in demands:
            scheduler.withdraw(claim)
    ahead = scheduler.snapshot().images
    assert ahead[State.PREPARED, True] + ahead[State.PREPARED, False] == 6


@settings(max_examples=200, deadline=None)
@given(st.integers(1, 40), st.data())
def test_a_failed_batch_is_split_until_exactly_the_failing_images_end(count, data):
    culprits = {str(n) for n in data.draw(st.sets(st.integers(0, count - 1), max_size=3))}
    scheduler = make()
    for number in range(count):
        want(scheduler, str(number))
    prepare_all(scheduler)
    failed, encoded, runs = [], [], 0
    while batch := scheduler.next_batch(0.0, 10**9):
        runs += 1
        if culprits & set(names(batch)):
            failed += names(scheduler.failed(batch))
        else:
            encoded += names(batch)
            scheduler.done(batch, 0.1)
    assert set(failed) == culprits
    assert sorted(failed + encoded) == sorted(map(str, range(count)))
    assert runs <= max(1, 2 * count - 1)
    assert is_empty(scheduler)


def test_images_withdrawn_after_a_failed_batch_are_not_retried():
    scheduler = make()
    claims = [want(scheduler, str(number), chunk=number) for number in range(4)]
    prepare_all(scheduler)
    scheduler.failed(scheduler.next_batch(0.0, 10**9))
    assert names([scheduler.withdraw(claims[0])]) == ["0"]
    assert names(scheduler.next_batch(0.0, 10**9)) == ["1"]
