"""Scheduling and admission: pure and synchronous; callers pass the time in."""

from encoder_service.scheduler.admission import QueueLimits
from encoder_service.scheduler.policy import LEAST_WORK_LEFT, Claim, Policy, State, Task, least_work_left
from encoder_service.scheduler.scheduler import MOST_INTERRUPTIONS, Scheduler, Snapshot

__all__ = [
    "LEAST_WORK_LEFT",
    "MOST_INTERRUPTIONS",
    "Claim",
    "Policy",
    "QueueLimits",
    "Scheduler",
    "Snapshot",
    "State",
    "Task",
    "least_work_left",
]
