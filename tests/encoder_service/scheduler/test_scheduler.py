"""The scheduler against its promises: order, batches, single flight, bounds, no starvation."""

from hypothesis import given, settings
from hypothesis import strategies as st

from encoder_service.scheduler import (
    LEAST_WORK_LEFT,
    Claim,
    Limits,
    Scheduler,
    State,
)
from encoder_service.scheduler.policy import STRETCH

PATCHES = 100
ROOMY = Limits(images=10**6, patches=10**9, source_bytes=10**12, claims=10**6)


def make(limits=ROOMY, ahead_patches=10**6, ahead_images=10**6, policy=LEAST_WORK_LEFT) -> Scheduler:
    return Scheduler(limits, max_ahead_patches=ahead_patches, max_ahead_images=ahead_images, policy=policy)


def want(scheduler, address, request="r", *, patches=PATCHES, now=0.0, **claim) -> Claim:
    wanted = Claim(request, claim.pop("client", "c"), **{"demanded": True, **claim})
    scheduler.admit(wanted, address.encode(), patches, 1000, now)
    return wanted


def prepare_all(scheduler, now=0.0) -> None:
    while works := scheduler.next_to_prepare(now, 10**9, 10**6):
        for work in works:
            assert scheduler.prepared(work, now)


def names(works) -> list[str]:
    return [work.address.decode() for work in works]


def encode_order(scheduler, now=0.0) -> list[str]:
    """Return the addresses in the order in which they are encoded, one image a batch."""
    out = []
    while True:
        prepare_all(scheduler, now)
        batch = scheduler.next_batch(now, 1)
        if not batch:
            return out
        out += names(batch)
        scheduler.done(batch, 0.1)


def is_empty(scheduler) -> bool:
    now = scheduler.snapshot()
    return not (sum(now.images.values()) or sum(now.patches.values()) or now.source_bytes or now.requests
                or now.claims or now.clients)  # fmt: skip


# Order


def test_demanded_comes_before_speculative_whatever_its_priority():
    scheduler = make()
    want(scheduler, "guess", "a", priority=8, demanded=False)
    want(scheduler, "demand", "b", priority=-8)
    assert encode_order(scheduler) == ["demand", "guess"]


def test_a_higher_priority_comes_before_less_work():
    scheduler = make()
    want(scheduler, "small", "a", patches=1)
    want(scheduler, "urgent", "b", patches=500, priority=1)
    assert encode_order(scheduler) == ["urgent", "small"]


def test_the_request_with_the_least_work_left_comes_first_and_its_images_by_chunk():
    scheduler = make()
    for chunk in (2, 0, 1):
        want(scheduler, f"big{chunk}", "big", chunk=chunk)
    want(scheduler, "small", "small", chunk=5)
    assert encode_order(scheduler) == ["small", "big0", "big1", "big2"]


def test_work_that_is_done_makes_its_request_smaller():
    scheduler = make()
    for chunk in range(3):
        want(scheduler, f"a{chunk}", "a", chunk=chunk)
    prepare_all(scheduler)
    scheduler.done(scheduler.next_batch(0.0, 2 * PATCHES), 0.1)
    for chunk in range(2):  # two left against one left of a
        want(scheduler, f"b{chunk}", "b", chunk=chunk)
    assert encode_order(scheduler) == ["a2", "b0", "b1"]


def test_an_image_that_blocks_a_chunk_comes_before_one_ahead_of_need_until_that_is_due():
    scheduler = make()
    want(scheduler, "ahead", "small", needed_at=10.0)
    want(scheduler, "blocking1", "big", patches=500)
    want(scheduler, "blocking2", "big", patches=500, chunk=1)
    prepare_all(scheduler)
    assert names(scheduler.next_batch(9.9, 1)) == ["blocking1"]
    assert names(scheduler.next_batch(10.0, 1)) == ["ahead"]
    assert names(scheduler.next_batch(10.0, 1)) == ["blocking2"]


def test_images_ahead_of_need_do_not_leave_the_device_idle():
    scheduler = make()
    want(scheduler, "later", needed_at=1e9)
    assert encode_order(scheduler) == ["later"]


def test_a_work_ranks_by_its_best_claim():
    scheduler = make()
    for chunk in range(4):
        want(scheduler, f"big{chunk}", "big", chunk=chunk)
    want(scheduler, "other", "other", patches=2 * PATCHES)
    want(scheduler, "big3", "tiny")
    assert encode_order(scheduler)[:2] == ["big3", "other"]


def test_a_fetch_promotes_speculative_work_wherever_it_waits():
    scheduler = make()
    for name in ("a", "b", "c"):
        want(scheduler, name, name, demanded=False)
    prepare_all(scheduler)
    want(scheduler, "c", "fetcher")
    assert names(scheduler.next_batch(0.0, 1)) == ["c"]


def test_withdrawing_the_demand_makes_the_work_speculative_again():
    scheduler = make()
    want(scheduler, "a", "submitter", demanded=False)
    fetch = want(scheduler, "a", "fetcher")
    want(scheduler, "b", "other", patches=500)
    prepare_all(scheduler)
    assert scheduler.withdraw(fetch) is None
    assert encode_order(scheduler) == ["b", "a"]


# Ageing


def test_a_request_identifier_used_for_ever_does_not_stay_the_oldest():
    scheduler = make()
    want(scheduler, "x0", "for-ever")
    rival = want(scheduler, "rival", "rival", patches=2 * PATCHES)
    for turn in range(1, 100):
        want(scheduler, f"x{turn}", "for-ever")  # named before the one before it is done
        prepare_all(scheduler)
        scheduler.done(scheduler.next_batch(0.0, 1), 0.1)
        if rival.work is None:
            break
    assert turn <= 2 * STRETCH


# Batches


def test_a_batch_is_the_longest_head_of_the_order_that_fits_the_budget():
    scheduler = make()
    for number, patches in enumerate((300, 300, 500, 100)):
        want(scheduler, f"{number}", chunk=number, patches=patches)
    prepare_all(scheduler)
    assert names(scheduler.next_batch(0.0, 1000)) == ["0", "1"]
    assert names(scheduler.next_batch(0.0, 1000)) == ["2", "3"]
    assert scheduler.next_batch(0.0, 1000) == []


def test_an_image_larger_than_the_budget_goes_alone():
    scheduler = make()
    want(scheduler, "huge", patches=5000)
    want(scheduler, "next", chunk=1)
    prepare_all(scheduler)
    assert names(scheduler.next_batch(0.0, 1000)) == ["huge"]


def test_speculative_work_joins_no_demanded_batch_and_makes_only_small_ones():
    scheduler = make()
    want(scheduler, "demand", "a")
    for number in range(8):
        want(scheduler, f"guess{number}", "b", demanded=False)
    prepare_all(scheduler)
    assert names(scheduler.next_batch(0.0, 8 * PATCHES)) == ["demand"]
    assert len(scheduler.next_batch(0.0, 8 * PATCHES)) == 2


def test_prepared_guesses_do_not_keep_a_demand_from_being_prepared():
    scheduler = make(ahead_patches=3 * PATCHES)
    for number in range(10):
        want(scheduler, f"guess{number}", "b", demanded=False)
    prepare_all(scheduler)
    want(scheduler, "demand", "a")
    assert names(scheduler.next_to_prepare(0.0, 10**9, 10)) == ["demand"]


def test_what_lies_ahead_stays_bounded_when_demands_turn_into_guesses():
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
def test_a_failed_batch_is_split_until_exactly_the_culprits_fail(count, data):
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


def test_who_leaves_after_the_batch_failed_is_not_tried_again():
    scheduler = make()
    claims = [want(scheduler, str(number), chunk=number) for number in range(4)]
    prepare_all(scheduler)
    scheduler.failed(scheduler.next_batch(0.0, 10**9))
    assert names([scheduler.withdraw(claims[0])]) == ["0"]
    assert names(scheduler.next_batch(0.0, 10**9)) == ["1"]


# Single flight


def test_many_callers_share_one_work_and_only_the_last_withdrawal_drops_it():
    scheduler = make()
    claims = [want(scheduler, "a", f"r{number}") for number in range(5)]
    assert len({id(claim.work) for claim in claims}) == 1
    assert scheduler.snapshot().images[State.WAITING, True] == 1
    for claim in claims[:-1]:
        assert scheduler.withdraw(claim) is None
    assert names([scheduler.withdraw(claims[-1])]) == ["a"]
    assert is_empty(scheduler)


def test_work_that_is_being_encoded_goes_on_without_callers_and_new_ones_join_it():
    scheduler = make()
    first = want(scheduler, "a", "r1")
    prepare_all(scheduler)
    batch = scheduler.next_batch(0.0, 1000)
    assert scheduler.withdraw(first) is None
    late = Claim("r2", "c", demanded=True)
    assert scheduler.claim(late, b"a", 0.0)
    scheduler.done(batch, 0.1)
    assert late.work is None
    assert is_empty(scheduler)


def test_what_comes_back_from_decoding_after_everyone_left_is_refused_even_if_it_was_admitted_anew():
    scheduler = make()
    claim = want(scheduler, "a")
    (old,) = scheduler.next_to_prepare(0.0, 1000, 10)
    scheduler.withdraw(claim)
    again = want(scheduler, "a")
    assert not scheduler.prepared(old, 0.0)
    assert again.work is not old
    assert again.work.state is State.WAITING


def test_a_claim_on_an_address_that_nobody_admitted_is_not_attached():
    assert not make().claim(Claim("r", "c"), b"nowhere", 0.0)
