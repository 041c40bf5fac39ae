"""Admission: limits, shares, retry hints, and that every reservation is released."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from encoder_contract.errors import ImageLimitError, OverloadedError
from encoder_service.scheduler import Claim, QueueLimits, Scheduler, Task
from encoder_service.scheduler.admission import MAX_RETRY_MS, MIN_RETRY_MS
from tests.scheduling import encode_one, measured


def limits(**changes) -> QueueLimits:
    return QueueLimits(**{"images": 100, "patches": 10_000, "source_bytes": 10**6, "claims": 1000, **changes})


def make(**changes) -> Scheduler:
    return Scheduler(limits(**changes), max_ahead_patches=1000, max_ahead_images=16)


def admit(scheduler, number, *, client="c", patches=10, source_bytes=100) -> Claim:
    claim = Claim(f"r{number}", client, demanded=True)
    scheduler.admit(claim, Task(f"{number}".encode(), patches, source_bytes), 0.0)
    return claim


def fill(scheduler, count, *, client="c", **kind) -> list[Claim]:
    return [admit(scheduler, f"{client}.{number}", client=client, **kind) for number in range(count)]


@pytest.mark.parametrize(("name", "limit"), [("images", 4), ("patches", 40), ("source_bytes", 400)])
def test_each_limit_refuses_and_names_itself(name, limit):
    scheduler = make(**{name: limit})
    for number in range(4):
        admit(scheduler, number, client=f"c{number}")
    with pytest.raises(OverloadedError, match=f"full: {limit} {name}"):
        admit(scheduler, 4, client="c4")


def test_refusals_hold_nothing_and_released_places_are_free():
    scheduler = make(images=1)
    (claim,) = fill(scheduler, 1)
    refused = Claim("other", "other")
    with pytest.raises(OverloadedError):
        scheduler.admit(refused, Task(b"other", 10, 100), 0.0)
    assert refused.task is None
    assert scheduler.snapshot().requests == 1
    scheduler.withdraw(claim)
    assert scheduler.admit(refused, Task(b"other", 10, 100), 0.0)


def test_a_queue_refuses_by_seconds_unless_it_is_empty():
    scheduler = measured(seconds=2.0)
    admit(scheduler, 1, client="a", patches=150)
    with pytest.raises(OverloadedError, match="longer than 2 s") as refused:
        admit(scheduler, 2, client="b", patches=60)
    assert refused.value.retry_after_ms > 0
    admit(scheduler, 3, client="b", patches=40)
    admit(measured(seconds=2.0), 1, patches=900)


def test_an_image_that_can_never_fit_is_refused_without_a_retry_hint():
    with pytest.raises(ImageLimitError, match="10001 patches"):
        admit(make(), 0, patches=10_001)


def test_joining_takes_no_queue_space_up_to_the_claim_limit():
    scheduler = make(images=1, claims=5)
    for number in range(5):
        claim = Claim(f"r{number}", f"c{number}")
        assert scheduler.admit(claim, Task(b"same", 10, 100), 0.0) == (number == 0)
    with pytest.raises(OverloadedError, match="callers"):
        scheduler.claim(Claim("r5", "c5"), b"same", 0.0)


def test_one_client_cannot_take_all_claims_with_calls_for_one_image():
    scheduler = make(claims=100)
    assert scheduler.admit(Claim("r", "greedy"), Task(b"same", 10, 100), 0.0)

    def join_for_ever():
        while True:
            scheduler.claim(Claim("r", "greedy"), b"same", 0.0)

    with pytest.raises(OverloadedError, match="this client") as refused:
        join_for_ever()
    assert refused.value.retry_after_ms > 0
    assert scheduler.snapshot().claims == 75
    assert scheduler.claim(Claim("other", "other"), b"same", 0.0)
    assert scheduler.admit(Claim("new", "new"), Task(b"another", 10, 100), 0.0)


@pytest.mark.parametrize(("short", "large"), [("images", "patches"), ("patches", "images")])
@pytest.mark.parametrize("share", [0.5, 0.75, 0.9])
def test_one_client_alone_fills_its_share_and_no_more(share, short, large):
    scheduler = make(client_share=share, **{large: 10**6})
    with pytest.raises(OverloadedError, match=rf"share.*\({short}\)"):
        fill(scheduler, 100, patches=100)
    assert abs(scheduler.queued.images - 100 * share) <= 1


def test_greedy_clients_converge_to_equal_shares_and_leave_room():
    scheduler = make(images=130, patches=10**6)
    held = {"early": 0, "late": 0, "last": 0}
    number = 0
    for turn in range(1000):
        for client in list(held)[: 1 + turn // 250]:
            try:
                while True:
                    number += 1
                    admit(scheduler, number, client=client)
                    held[client] += 1
            except OverloadedError:
                pass
        held[encode_one(scheduler).holder] -= 1
    assert held == {client: pytest.approx(3 / 10 * 130, abs=2) for client in held}
    assert admit(scheduler, "newcomer", client="newcomer").task


@pytest.mark.parametrize(
    ("seconds", "hint_ms"), [(1e-6, MIN_RETRY_MS), (0.5, 1000 * 0.25 * 4100 / 200), (1e6, MAX_RETRY_MS)]
)
def test_the_retry_hint_is_the_time_in_which_a_quarter_of_the_queue_drains(seconds, hint_ms):
    scheduler = make(images=41)
    for number in range(41):
        admit(scheduler, number, client=f"c{number}", patches=100)
    encode_one(scheduler, seconds)  # of 100 patches
    admit(scheduler, 50, client="c50", patches=100)
    with pytest.raises(OverloadedError) as refused:
        admit(scheduler, 51, client="c51")
    assert refused.value.retry_after_ms == hint_ms


def test_old_measurements_of_the_rate_fade():
    scheduler = make()
    for number, seconds in enumerate([1.0] * 30 + [0.1] * 600):
        admit(scheduler, number, patches=100)
        encode_one(scheduler, seconds)
    assert scheduler.snapshot().patches_per_s == pytest.approx(1000, rel=0.05)


@settings(max_examples=200, deadline=None)
@given(st.lists(st.tuples(st.integers(0, 4), st.integers(1, 3000), st.integers(1, 300_000)), max_size=60))
def test_limits_hold_and_everything_is_released_for_any_mix_of_images(images):
    scheduler = make(images=20)
    claims = []
    for number, (client, patches, source_bytes) in enumerate(images):
        try:
            kind = {"patches": patches, "source_bytes": source_bytes}
            claims.append(admit(scheduler, number, client=f"c{client}", **kind))
        except OverloadedError:
            continue
        held = scheduler.queued
        assert held.images <= 20
        assert held.patches <= 10_000
        assert held.source_bytes <= 10**6
    for claim in claims:
        scheduler.withdraw(claim)
    assert (scheduler.queued.images, scheduler.queued.patches, scheduler.queued.source_bytes) == (0, 0, 0)
    assert scheduler.snapshot().clients == 0


@pytest.mark.parametrize(
    "changes", [{"images": 0}, {"patches": -1}, {"client_share": 1.0}, {"client_share": 0.0}]
)
def test_invalid_limits_are_refused(changes):
    with pytest.raises(ValueError, match=r"limit|client_share"):
        limits(**changes)


def test_a_reserved_place_counts_and_admits_its_image_whatever_came_in_between():
    scheduler = make(images=8)
    reserving = [Claim(f"r{number}", "c", reserves=True) for number in range(4)]
    for number, claim in enumerate(reserving):
        scheduler.reserve(claim, f"reserved {number}".encode(), 10, 100)
    assert (scheduler.queued.images, scheduler.snapshot().claims) == (4, 0)
    others = [admit(scheduler, f"other {number}", client=f"other {number}") for number in range(4)]
    with pytest.raises(OverloadedError, match="full: 8 images"):
        admit(scheduler, "one more", client="one more")
    for number, claim in enumerate(reserving[:2]):
        assert scheduler.admit(claim, Task(f"reserved {number}".encode(), 10, 90), 0.0)
    with pytest.raises(OverloadedError):  # larger than its place
        scheduler.admit(reserving[2], Task(b"reserved 2", 5000, 100), 0.0)
    scheduler.withdraw(reserving[3])
    assert scheduler.queued.images == 6
    assert scheduler.claim(Claim("joins", "c"), b"reserved 0", 0.0), "the places have become tasks"
    for claim in (*reserving, *others):
        scheduler.withdraw(claim)
    assert (scheduler.queued.images, scheduler.queued.patches, scheduler.queued.source_bytes) == (1, 10, 90)


def test_a_request_longer_than_the_queue_is_served_if_nothing_else_is_queued():
    scheduler = measured(seconds=2.0)
    together = [Claim("r", "c", reserves=True) for _ in range(16)]
    for number, claim in enumerate(together):
        scheduler.check_room(claim, 50)
        if number % 2:  # its file is needed
            scheduler.reserve(claim, f"{number}".encode(), 50, 100)
        else:
            scheduler.admit(claim, Task(f"{number}".encode(), 50, 100), 0.0)
    assert scheduler.queued.patches == 16 * 50
    with pytest.raises(OverloadedError, match="2 s"):
        scheduler.reserve(Claim("another", "c", reserves=True), b"another", 50, 100)
    admit(scheduler, "other holder", client="d", patches=40)  # is not kept out for eight seconds
    with pytest.raises(OverloadedError, match="2 s"):
        admit(scheduler, "its next", client="d", patches=50)
    with pytest.raises(OverloadedError):
        scheduler.reserve(Claim("r", "c", reserves=True), b"more", 50, 100)
    for claim in together:
        scheduler.withdraw(claim)
    assert not scheduler._places


def test_a_claim_that_joins_an_image_leaves_its_place():
    scheduler = make()
    reserving = Claim("r", "c", reserves=True)
    scheduler.reserve(reserving, b"a", 10, 100)
    other = Claim("s", "d")
    scheduler.admit(other, Task(b"a", 10, 100), 0.0)
    assert scheduler.queued.images == 2
    assert scheduler.claim(reserving, b"a", 0.0)
    assert scheduler.queued.images == 1
