"""The scheduler: order, ageing, single flight."""

from encoder_service.scheduler import Claim, State
from encoder_service.scheduler.policy import STRETCH
from tests.scheduling import PATCHES, encode_one, encode_order, is_empty, make, names, prepare_all, want

# Order


def test_demanded_comes_before_speculative_of_any_priority():
    scheduler = make()
    want(scheduler, "guess", "a", priority=8, demanded=False)
    want(scheduler, "demand", "b", priority=-8)
    assert encode_order(scheduler) == ["demand", "guess"]


def test_a_higher_priority_comes_before_less_work():
    scheduler = make()
    want(scheduler, "small", "a", patches=1)
    want(scheduler, "urgent", "b", patches=500, priority=1)
    assert encode_order(scheduler) == ["urgent", "small"]


def test_the_least_work_left_comes_first_then_chunk_order():
    scheduler = make()
    for chunk in (2, 0, 1):
        want(scheduler, f"big{chunk}", "big", chunk=chunk)
    want(scheduler, "small", "small", chunk=5)
    assert encode_order(scheduler) == ["small", "big0", "big1", "big2"]


def test_finished_work_makes_its_request_smaller():
    scheduler = make()
    for chunk in range(3):
        want(scheduler, f"a{chunk}", "a", chunk=chunk)
    prepare_all(scheduler)
    scheduler.done(scheduler.next_batch(0.0, 2 * PATCHES), 0.1)
    for chunk in range(2):  # two left against one left of a
        want(scheduler, f"b{chunk}", "b", chunk=chunk)
    assert encode_order(scheduler) == ["a2", "b0", "b1"]


def test_blocking_images_precede_those_ahead_of_need_until_due():
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


def test_a_task_ranks_by_its_best_claim():
    scheduler = make()
    for chunk in range(4):
        want(scheduler, f"big{chunk}", "big", chunk=chunk)
    want(scheduler, "other", "other", patches=2 * PATCHES)
    want(scheduler, "big3", "tiny")
    assert encode_order(scheduler)[:2] == ["big3", "other"]


def test_a_fetch_promotes_speculative_tasks_in_every_stage():
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


def test_a_reused_request_identifier_does_not_stay_the_oldest():
    scheduler = make()
    want(scheduler, "x0", "endless")
    rival = want(scheduler, "rival", "rival", patches=2 * PATCHES)
    for turn in range(1, 100):
        want(scheduler, f"x{turn}", "endless")  # claimed before the previous image is encoded
        encode_one(scheduler)
        if rival.task is None:
            break
    assert turn <= 2 * STRETCH


# Single flight


def test_many_callers_share_one_task_and_only_the_last_withdrawal_drops_it():
    scheduler = make()
    claims = [want(scheduler, "a", f"r{number}") for number in range(5)]
    assert len({id(claim.task) for claim in claims}) == 1
    assert scheduler.snapshot().images[State.WAITING, True] == 1
    for claim in claims[:-1]:
        assert scheduler.withdraw(claim) is None
    assert names([scheduler.withdraw(claims[-1])]) == ["a"]
    assert is_empty(scheduler)


def test_running_encodes_continue_without_callers_and_can_be_joined():
    scheduler = make()
    first = want(scheduler, "a", "r1")
    prepare_all(scheduler)
    batch = scheduler.next_batch(0.0, 1000)
    assert scheduler.withdraw(first) is None
    late = Claim("r2", "c", demanded=True)
    assert scheduler.claim(late, b"a", 0.0)
    scheduler.done(batch, 0.1)
    assert late.task is None
    assert is_empty(scheduler)


def test_decoded_pixels_without_claims_are_dropped():
    scheduler = make()
    claim = want(scheduler, "a")
    (old,) = scheduler.next_to_prepare(0.0, 10)
    scheduler.withdraw(claim)
    again = want(scheduler, "a")
    assert not scheduler.prepared(old, 0.0)
    assert again.task is not old
    assert again.task.state is State.WAITING


def test_a_claim_on_an_unknown_address_is_not_attached():
    assert not make().claim(Claim("r", "c"), b"nowhere", 0.0)
