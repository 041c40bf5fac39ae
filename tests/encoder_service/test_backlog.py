"""The backlog in seconds, which autoscalers follow: patches that wait, divided by the measured rate."""

import pytest

from encoder_service.collectors import queue_readings
from encoder_service.scheduler import Claim, QueueLimits, Scheduler, Task


def queue() -> Scheduler:
    """Return a queue of 3000 demanded and 500 speculative patches."""
    limits = QueueLimits(images=100, patches=10**6, source_bytes=10**9, claims=1000)
    scheduler = Scheduler(limits, max_ahead_patches=10_000, max_ahead_images=64)
    for number in range(3):
        claim = Claim(f"request {number}", "holder", demanded=True, needed_at=0.0)
        scheduler.admit(claim, Task(bytes([number]) * 32, 1000, 100), 0.0)
    scheduler.admit(Claim("ahead", "holder"), Task(b"a" * 32, 500, 100), 0.0)
    return scheduler


def read(scheduler: Scheduler) -> dict[str, dict[str, float]]:
    """Return the values of each metric by class; of a metric without classes under an empty one."""
    readings = queue_readings(
        scheduler.snapshot(), QueueLimits(images=1, patches=1, source_bytes=1, claims=1)
    )
    return {
        each.name: {sample.labels.get("class", ""): sample.value for sample in each.samples}
        for each in readings
    }


def test_the_backlog_is_zero_until_a_batch_was_measured() -> None:
    found = read(queue())
    assert found["encsvc_patches_per_second"] == {"": 0.0}
    assert found["encsvc_backlog_seconds"] == {"demanded": 0.0, "speculative": 0.0}


def test_the_backlog_is_the_time_that_the_queue_takes() -> None:
    scheduler = queue()
    for task in scheduler.next_to_prepare(0.0, 1):
        scheduler.prepared(task, 0.0)
    batch = scheduler.next_batch(0.0, 1000)
    assert sum(task.patches for task in batch) == 1000
    scheduler.done(batch, 0.5)
    found = read(scheduler)
    assert found["encsvc_patches_per_second"] == {"": pytest.approx(2000)}
    assert found["encsvc_backlog_seconds"] == {
        "demanded": pytest.approx(1.0),
        "speculative": pytest.approx(0.25),
    }
