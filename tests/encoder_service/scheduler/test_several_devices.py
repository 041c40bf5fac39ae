"""Several devices that share the queue, and a device that loses its images."""

import random
from dataclasses import dataclass, field

import pytest

from encoder_service.scheduler import MOST_INTERRUPTIONS, State, Task
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
    prepare(scheduler, 1, 4)
    assert names(scheduler.next_batch(0.0, 2 * PATCHES, 1)) == ["a", "b"]
    left = scheduler.next_batch(0.0, PATCHES, 1)
    scheduler.put_back(left)
    assert names(scheduler.next_to_prepare(0.0, 1, device=1)) == ["e"]
    assert not scheduler.interrupted(1, 0.0)
    images = scheduler.snapshot().images
    assert images[State.WAITING, True] == 4
    assert images[State.SINGLE, True] == 1, "what was decoded in a batch is decoded by itself"
    encoded = []
    while scheduler.queued.images:
        tasks = scheduler.next_to_prepare(0.0, 9) or scheduler.next_single(0.0, 10**9)
        for task in tasks:
            assert scheduler.prepared(task, 0.0)
        assert scheduler.next_batch(0.0, 10 * PATCHES, 0) == tasks
        scheduler.done(tasks, 0.1)
        encoded.append(names(tasks))
    assert encoded == [["a"], ["b"], ["e"], ["c", "d"]], "what was decoded or encoded goes alone"
    assert is_empty(scheduler)


def test_an_image_whose_callers_left_ends_with_its_device():
    scheduler = make()
    claim = want(scheduler, "a")
    prepare(scheduler, 0, 1)
    [task] = scheduler.next_batch(0.0, PATCHES)
    assert scheduler.withdraw(claim) is None
    assert scheduler.interrupted(0, 0.0) == [task]
    assert is_empty(scheduler)


@dataclass
class Device:
    """What a device has: images being decoded, and batches."""

    decoding: list[Task] = field(default_factory=list)
    batches: list[list[Task]] = field(default_factory=list)


@pytest.mark.parametrize("devices", [1, 2])
@pytest.mark.parametrize("stage", ["decode", "decode single", "encode"])
@pytest.mark.parametrize("seed", range(20))
def test_only_images_that_end_their_device_every_time_fail(devices: int, stage: str, seed: int):
    """Whatever is decoded or encoded beside them: nobody else is beside them twice."""
    pick = random.Random(seed)
    scheduler, floor = make(devices=devices), [Device() for _ in range(devices)]
    for n in range(12):
        single = stage == "decode single" or pick.random() < 0.3
        kind = {"client": pick.choice("ab"), "single": single, "priority": pick.choice((0, -1))}
        want(scheduler, f"{'bad' if n in (4, 7) else 'good'}{n}", f"{n}", pixels=100, **kind)
    deaths, failed, encoded = 0, [], []

    def bad(tasks: list[Task]) -> bool:
        return any(task.address.startswith(b"bad") for task in tasks)

    while scheduler.queued.images:
        number = pick.randrange(devices)
        device = floor[number]
        step = pick.choice(("batch", "single", "prepared", "encode", "done"))
        if step == "batch":
            device.decoding += scheduler.next_to_prepare(0.0, pick.randrange(1, 4), device=number)
        elif step == "single":
            device.decoding += scheduler.next_single(0.0, 10**9, device=number)
        elif step == "encode":
            device.batches += filter(None, [scheduler.next_batch(0.0, 3 * PATCHES, number)])
        dies = bad(device.decoding) if stage != "encode" else any(map(bad, device.batches))
        if dies and pick.random() < 0.5:
            deaths += 1
            failed += scheduler.interrupted(number, 0.0)
            device.decoding.clear()
            device.batches.clear()
        elif step == "prepared" and device.decoding and not (dies and stage != "encode"):
            assert scheduler.prepared(device.decoding.pop(pick.randrange(len(device.decoding))), 0.0)
        elif step == "done" and device.batches and not (dies and stage == "encode"):
            batch = device.batches.pop(pick.randrange(len(device.batches)))
            scheduler.done(batch, 0.1)
            encoded += names(batch)
    assert sorted(names(failed)) == ["bad4", "bad7"]
    assert len(encoded) == 10
    assert MOST_INTERRUPTIONS < deaths <= 2 * MOST_INTERRUPTIONS
    assert is_empty(scheduler)


def test_other_images_wait_while_a_device_has_one_that_was_interrupted():
    scheduler = make(devices=2)
    want(scheduler, "suspect", priority=0)
    assert names(scheduler.next_to_prepare(0.0, 1)) == ["suspect"]
    assert not scheduler.interrupted(0, 0.0)
    want(scheduler, "other", "s")
    want(scheduler, "single", "s", single=True)
    [task] = scheduler.next_single(0.0, 10**9)
    assert task is scheduler.suspect(0)
    assert not scheduler.next_to_prepare(0.0, 9)
    assert not scheduler.next_single(0.0, 10**9)
    assert prepare(scheduler, 1, 9) == ["other"], "another device works on"
    scheduler.prepared(task, 0.0)
    assert not scheduler.next_single(0.0, 10**9)
    scheduler.done(scheduler.next_batch(0.0, PATCHES), 0.1)
    assert names(scheduler.next_single(0.0, 10**9)) == ["single"]
