"""Shares between holders: the order of images, queue seconds, decode time and request identifiers."""

from functools import partial

import pytest

from encoder_contract.errors import OverloadedError
from encoder_service.scheduler import Claim, State
from encoder_service.scheduler.policy import MAX_ABSENT, FairQueue, Line, LlmRequest
from tests.scheduling import (
    PATCHES,
    encode_one,
    encode_order,
    make,
    measured,
    names,
    prepare_all,
    seconds_of,
    want,
)


def fill(scheduler, client, count, *, requests=1, prefix="", **kind) -> list[Claim]:
    """Submit `count` images for one holder, spread over `requests` requests."""
    return [
        want(scheduler, f"{prefix or client}{n}", f"{client}-r{n % requests}", client=client, **kind)
        for n in range(count)
    ]


# Device time


def test_a_priority_orders_images_within_its_holder_only():
    scheduler = make()
    fill(scheduler, "loud", 40, priority=8)
    fill(scheduler, "calm", 3)
    order = encode_order(scheduler)
    assert {name[:4] for name in order[:2]} == {"loud", "calm"}
    assert [name for name in order[:6] if name.startswith("calm")] == ["calm0", "calm1", "calm2"]


def test_a_small_image_does_not_wait_for_the_requests_of_another_holder():
    scheduler = make(ahead_patches=4 * PATCHES, ahead_images=4)
    fill(scheduler, "busy", 24, requests=24)
    encode_one(scheduler, 1.0)
    want(scheduler, "small", "one", client="small", patches=PATCHES)
    assert encode_order(scheduler).index("small") <= 1


def test_busy_holders_get_equal_patches_for_images_of_any_size():
    scheduler = make()
    fill(scheduler, "large", 20, patches=400)
    fill(scheduler, "small", 200, patches=40)
    done = {"large": 0, "small": 0}
    prepare_all(scheduler)
    for _ in range(60):
        [task] = batch = scheduler.next_batch(0.0, 1)
        done[task.holder] += task.patches
        scheduler.done(batch, seconds_of(batch))
        assert abs(done["large"] - done["small"]) <= 400


def test_busy_holders_get_equal_times_if_patches_of_large_images_take_longer():
    scheduler = make()
    fill(scheduler, "large", 40, patches=400)
    fill(scheduler, "small", 1000, patches=40)
    spent = {"large": 0.0, "small": 0.0}
    prepare_all(scheduler)
    for _ in range(200):
        [task] = batch = scheduler.next_batch(0.0, 1)
        seconds = seconds_of(batch) * (4 if task.holder == "large" else 1)
        spent[task.holder] += seconds
        scheduler.done(batch, seconds)
    assert abs(spent["large"] - spent["small"]) <= 2 * 400 * 4 / 1000, "two large images"
    assert min(spent.values()) > 5


def test_the_first_image_of_a_holder_passes_a_large_one_that_has_no_room():
    scheduler = make(ahead_patches=2000, ahead_images=10)
    fill(scheduler, "large", 4, patches=900)
    prepare_all(scheduler)
    for number in range(40):  # soon more patches than those of the large images that are decoded
        want(scheduler, f"small{number}", f"s{number}", client="small", patches=100)
        [small] = scheduler.next_to_prepare(0.0, 10)
        assert small.holder == "small"
        assert scheduler.prepared(small, 0.0)
        scheduler.drop(small)
    want(scheduler, "one", "s", client="small", patches=100)
    want(scheduler, "two", "s", client="small", patches=100)
    prepare_all(scheduler)
    assert scheduler.next_to_prepare(0.0, 10) == []
    assert scheduler.snapshot().images[State.WAITING, True] == 2, "two large images"


def test_a_batch_holds_images_of_every_holder_that_has_some():
    scheduler = make()
    for client in ("a", "b", "c"):
        fill(scheduler, client, 10)
    prepare_all(scheduler)
    batch = names(scheduler.next_batch(0.0, 6 * PATCHES))
    assert sorted(name[0] for name in batch) == ["a", "a", "b", "b", "c", "c"]


def test_a_holder_alone_gets_the_whole_device():
    scheduler = make()
    fill(scheduler, "a", 5)
    fill(scheduler, "b", 1)
    order = encode_order(scheduler)
    assert sorted(order) == ["a0", "a1", "a2", "a3", "a4", "b0"]
    assert order[2:] == ["a1", "a2", "a3", "a4"]


@pytest.mark.parametrize("demanded", [True, False])
def test_neither_a_pause_nor_an_unencoded_guess_earns_a_holder_credit(demanded):
    scheduler = make()
    want(scheduler, "early", "e", client="idle", demanded=demanded)
    fill(scheduler, "busy", 200)
    prepare_all(scheduler)
    for _ in range(101):
        scheduler.done(scheduler.next_batch(0.0, 1), 0.1)
    fill(scheduler, "idle", 50)
    order = encode_order(scheduler)
    assert 45 <= sum(name.startswith("busy") for name in order[:100]) <= 55


def test_submitting_one_image_at_a_time_gains_no_extra_share():
    """An idle holder keeps its tag while other holders wait."""
    scheduler = make()
    fill(scheduler, "queued", 400, patches=10)
    done = {"queued": 0, "single": 0}
    for turn in range(40):
        want(scheduler, f"single{turn}", f"s{turn}", client="single", patches=100)
        prepare_all(scheduler)
        while scheduler.waiting_images:
            [task] = batch = scheduler.next_batch(0.0, 1)
            scheduler.done(batch, seconds_of(batch))
            done[task.holder] += task.patches
            if task.holder == "single":
                break
    assert done["single"] <= done["queued"] + 200


def test_an_image_that_two_holders_want_counts_against_both():
    """Otherwise a client could submit under one name and fetch under another, and double its share."""
    scheduler = make()
    for number in range(40):
        want(scheduler, f"shared{number}", "s", client="submitter")
        want(scheduler, f"shared{number}", "f", client="fetcher")
    fill(scheduler, "other", 40)
    order = encode_order(scheduler)
    assert 18 <= sum(name.startswith("other") for name in order[:40]) <= 22


def test_a_small_image_of_another_holder_overtakes_a_priority_batch():
    scheduler = make()
    fill(scheduler, "large", 1, patches=1000, priority=8)
    prepare_all(scheduler)
    batch = scheduler.next_batch(0.0, 1)
    want(scheduler, "own", "r", client="large", patches=100)
    prepare_all(scheduler)
    overtaking = partial(scheduler.next_overtaking, batch, 0.0, 500, most_of=lambda _: 500)
    assert overtaking() == [], "of its own holder, and of a lower priority"
    want(scheduler, "other", "r", client="small", patches=100)
    prepare_all(scheduler)
    assert names(overtaking()) == ["other"]


# Decoding


def test_a_full_decode_window_of_one_holder_does_not_block_another():
    scheduler = make(ahead_patches=10 * PATCHES, ahead_images=10)
    fill(scheduler, "busy", 100, requests=100)
    encode_one(scheduler)
    prepare_all(scheduler)
    want(scheduler, "other", "r", client="other")
    assert names(scheduler.next_to_prepare(0.0, 10)) == ["other"]
    want(scheduler, "png", "r", client="png", single=True)
    assert names(scheduler.next_single(0.0, 1000)) == ["png"]


def test_images_of_all_holders_are_decoded_in_turn():
    scheduler = make()
    fill(scheduler, "busy", 50, requests=50, single=True)
    fill(scheduler, "calm", 5, single=True)
    decoded = [names(scheduler.next_single(0.0, 1000))[0] for _ in range(10)]
    assert sum(name.startswith("calm") for name in decoded) == 5


@pytest.mark.attack("files that take long to decode")
def test_seconds_of_decoding_count_against_their_holder():
    scheduler = measured()
    fill(scheduler, "slow", 50, single=True)
    fill(scheduler, "fast", 200, single=True)
    seconds = {"slow": 0.0, "fast": 0.0}
    for _ in range(120):
        (task,) = scheduler.next_single(0.0, 1000)
        took = 20.0 if task.holder == "slow" else 2.0
        seconds[task.holder] += took
        scheduler.decoded([task], took)
        scheduler.prepared(task, 0.0)
    assert seconds["slow"] == pytest.approx(seconds["fast"], abs=25)


# Request identifiers


def test_request_identifiers_are_per_holder():
    scheduler = make()
    want(scheduler, "other", "rival", client="victim", patches=2 * PATCHES)
    for number in range(50):
        want(scheduler, f"greedy{number}", "chat-1", client="greedy")
    want(scheduler, "mine", "chat-1", client="victim")
    assert scheduler.snapshot().requests == 3
    order = encode_order(scheduler)
    assert order.index("mine") < order.index("other")
    assert order.index("mine") <= 1


# Queue seconds


def test_a_holder_cannot_fill_the_seconds_of_the_queue():
    scheduler = measured(seconds=48.0)
    with pytest.raises(OverloadedError, match=r"share of the queue is full \(48 s\)"):
        fill(scheduler, "greedy", 48, requests=48)
    assert scheduler.queued.patches == 36 * PATCHES
    assert fill(scheduler, "other", 9, requests=9)


def test_a_request_longer_than_the_queue_leaves_other_holders_their_seconds():
    scheduler = measured(seconds=48.0)
    fill(scheduler, "slow", 200)  # of one request, to an empty queue
    with pytest.raises(OverloadedError, match="48 s"):
        want(scheduler, "next", "another", client="slow")
    assert fill(scheduler, "other", 9, requests=9)


def test_a_holder_with_nothing_queued_gets_the_remaining_seconds():
    scheduler = measured(seconds=10.0)
    want(scheduler, "large", client="greedy", patches=4 * PATCHES)
    with pytest.raises(OverloadedError, match="share of the queue"):
        want(scheduler, "larger", "another", client="greedy", patches=4 * PATCHES)
    assert want(scheduler, "same", client="other", patches=4 * PATCHES).task


# The number of holders


def test_holders_that_have_nothing_queued_are_forgotten():
    queue = FairQueue()
    line = Line(LlmRequest("r", "always", 0), lane=0)
    queue.place(line, (0, 0.0, 0.0, 0, line))
    for number in range(3 * MAX_ABSENT):
        queue.charge(f"host-{number}", 100 + number)
    assert len(queue) <= MAX_ABSENT + 1
    assert queue.tag(f"host-{number}") == 100 + number, "those that owe the most are remembered"
    queue.charge("always", 10**6)
    queue.serve(["always"])
    assert len(queue) == 1
