"""A scheduler with ample limits, and shorthands for its calls."""

from dataclasses import replace

from encoder_service.scheduler import LEAST_WORK_LEFT, Claim, QueueLimits, Scheduler, Task

PATCHES = 100
ROOMY = QueueLimits(images=10**6, patches=10**9, source_bytes=10**12, claims=10**6)


def make(
    limits=ROOMY, ahead_patches=10**6, ahead_images=10**6, policy=LEAST_WORK_LEFT, devices=1
) -> Scheduler:
    ahead = {"max_ahead_patches": ahead_patches, "max_ahead_images": ahead_images}
    return Scheduler(limits, **ahead, policy=policy, devices=devices)


def want(
    scheduler, address, request="r", *, patches=PATCHES, now=0.0, single=False, pixels=0, **claim
) -> Claim:
    wanted = Claim(request, claim.pop("client", "c"), **{"demanded": True, **claim})
    scheduler.admit(wanted, Task(address.encode(), patches, 1000, source_pixels=pixels), now, single=single)
    return wanted


def prepare_all(scheduler, now=0.0) -> None:
    while tasks := scheduler.next_to_prepare(now, 10**6):
        for task in tasks:
            assert scheduler.prepared(task, now)


def encode_one(scheduler, seconds=0.1) -> Task:
    """Decode all images that have room, and encode the first in `seconds`; return it."""
    prepare_all(scheduler)
    [task] = batch = scheduler.next_batch(0.0, 1)
    scheduler.done(batch, seconds)
    return task


def measured(**limits) -> Scheduler:
    """Return an empty queue whose device encodes a hundred patches a second."""
    scheduler = make(replace(ROOMY, **limits))
    want(scheduler, "measured", client="warm")
    encode_one(scheduler, 1.0)
    return scheduler


def names(tasks) -> list[str]:
    return [task.address.decode() for task in tasks]


def seconds_of(batch) -> float:
    """Return the time of a batch at a constant rate."""
    return sum(task.patches for task in batch) / 1000


def encode_order(scheduler, now=0.0) -> list[str]:
    """Return the addresses in the order of encoding, one image per batch."""
    out = []
    while True:
        prepare_all(scheduler, now)
        batch = scheduler.next_batch(now, 1)
        if not batch:
            return out
        out += names(batch)
        scheduler.done(batch, seconds_of(batch))


def is_empty(scheduler) -> bool:
    now = scheduler.snapshot()
    return not (sum(now.images.values()) or sum(now.patches.values()) or now.source_bytes or now.requests
                or now.claims or now.clients)  # fmt: skip
