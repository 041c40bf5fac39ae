"""Scheduling and admission: pure and synchronous, with the time passed in."""

from encoder_service.scheduler.admission import Limits
from encoder_service.scheduler.policy import LEAST_WORK_LEFT, Policy, least_work_left
from encoder_service.scheduler.scheduler import Scheduler
from encoder_service.scheduler.snapshot import Snapshot
from encoder_service.scheduler.task import Claim, State, Task

__all__ = [
    "LEAST_WORK_LEFT",
    "Claim",
    "Limits",
    "Policy",
    "Scheduler",
    "Snapshot",
    "State",
    "Task",
    "least_work_left",
]
