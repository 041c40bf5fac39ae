"""What is encoded next, and what is turned away: pure, synchronous, with the time passed in."""

from encoder_service.scheduler.admission import Limits
from encoder_service.scheduler.policy import LEAST_WORK_LEFT, POLICIES, Policy, least_work_left
from encoder_service.scheduler.scheduler import Scheduler, Snapshot
from encoder_service.scheduler.work import Claim, State, Work

__all__ = [
    "LEAST_WORK_LEFT",
    "POLICIES",
    "Claim",
    "Limits",
    "Policy",
    "Scheduler",
    "Snapshot",
    "State",
    "Work",
    "least_work_left",
]
