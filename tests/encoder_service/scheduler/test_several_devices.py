"""Several devices that share the queue, and a device that loses its images."""

from encoder_service.scheduler import MOST_INTERRUPTIONS, State
from tests.scheduling import PATCHES, is_empty, make, names, want


def prepare(scheduler, device, images):
    """Decode at most `images` images on a device; return them."""
    tasks = scheduler.next_to_prepare(0.0, images, device=device)
    for task in tasks:
        assert scheduler.prepared(task, 0.0)
    return names(tasks)


def test_a_device_encodes_what_it_decoded():
    scheduler = make(devices=2)
    for name in "abcd":
        want(scheduler, name)
    assert prepare(scheduler, 0, 1) == ["a"]
    assert prepare(scheduler, 1, 2) == ["b", "c"]
    assert names(scheduler.next_batch(0.0, 10 * PATCHES, 1)) == ["b", "c"]
    assert names(scheduler.next_batch(0.0, 10 * PATCHES, 0)) == ["a"]
    assert not scheduler.next_batch(0.0, 10 * PATCHES, 0)
    assert prepare(scheduler, 0, 2) == ["d"]


def test_each_device_decodes_ahead_of_its_own_batches():
    scheduler = make(ahead_images=2, devices=2)
    for name in "abcdef":
        want(scheduler, name, demanded=False)
    assert prepare(scheduler, 0, 9) == ["a", "b"]
    assert not prepare(scheduler, 0, 9)
    assert prepare(scheduler, 1, 9) == ["c", "d"]


def test_halves_of_a_failed_batch_stay_with_their_device():
    scheduler = make(devices=2)
    for name in "ab":
        want(scheduler, name)
    prepare(scheduler, 1, 2)
    assert not scheduler.failed(scheduler.next_batch(0.0, 10 * PATCHES, 1))
    assert not scheduler.next_batch(0.0, 10 * PATCHES, 0)
    assert names(scheduler.next_batch(0.0, 10 * PATCHES, 1)) == ["a"]


def test_images_of_a_lost_device_are_decoded_again_by_any_device():
    scheduler = make(devices=2)
    for name in "abcde":
        want(scheduler, name)
    prepare(scheduler, 1, 3)
    batch = scheduler.next_batch(0.0, 2 * PATCHES, 1)
    left = scheduler.next_batch(0.0, PATCHES, 1)
    scheduler.put_back(left)
    scheduler.next_to_prepare(0.0, 1, device=1)
    assert not scheduler.interrupted(1, 0.0)
    assert scheduler.snapshot().images[State.WAITING, True] == 5
    assert prepare(scheduler, 0, 9) == ["a", "b", "c", "d", "e"]
    assert names(batch) == ["a", "b"]
    encoded = []
    while tasks := scheduler.next_batch(0.0, 10 * PATCHES, 0):
        encoded.append(names(tasks))
        scheduler.done(tasks, 0.1)
    assert encoded == [["a"], ["b"], ["c", "d", "e"]], "what was being encoded goes alone"
    assert is_empty(scheduler)


def test_an_image_whose_callers_left_ends_with_its_device():
    scheduler = make()
    claim = want(scheduler, "a")
    prepare(scheduler, 0, 1)
    [task] = scheduler.next_batch(0.0, PATCHES)
    assert scheduler.withdraw(claim) is None
    assert scheduler.interrupted(0, 0.0) == [task]
    assert is_empty(scheduler)


def test_an_image_that_interrupts_its_device_every_time_ends():
    scheduler = make()
    want(scheduler, "bad")
    for n in range(MOST_INTERRUPTIONS):
        prepare(scheduler, 0, 1)
        [task] = scheduler.next_batch(0.0, PATCHES)
        ended = scheduler.interrupted(0, 0.0)
        assert ended == ([task] if n == MOST_INTERRUPTIONS - 1 else [])
    assert is_empty(scheduler)
