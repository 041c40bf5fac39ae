"""The credit of a device's tower: what it has, and whether it may have more.

The tower has `CREDIT_S` of work ahead, so that it need not ask for any. A demanded image may overtake this work, in an
urgent batch. The head is the first usual batch: the tower encodes it, unless an urgent one interrupts it.
"""

import math
from collections import Counter
from dataclasses import dataclass, field
from time import monotonic

from encoder_service.devices.job_queue import Job
from encoder_service.devices.messages import Group
from encoder_service.store.tier import Entry

CREDIT_S = 0.025
"""Seconds of work that the tower has ahead, so that it does not wait for a pass of the event loop."""
LONG_S = 0.1
"""A tower that can be interrupted gets nothing ahead of a batch that takes longer: what it has cannot overtake."""
LEAST_TURN_S = 0.005
"""Least time that a batch gets between two images of a holder that overtake it."""
MOST_BATCHES = 8
"""Most batches of the tower that a device has at a time, however short they are."""
MOST_GPU_BATCHES = 3
"""The same for a tower that cannot be interrupted, a GPU's: one is encoded and two wait, so that the tower never does.

Images that come meanwhile join the next batch. A small image by itself takes a GPU as long as several in a batch.
"""
OVERTAKEN_S = 0.025
"""Least time of a waiting batch that images overtake on such a tower: each of them has a forward of its own."""


@dataclass(eq=False, slots=True)
class SentBatch:
    """A batch that a device has, and the pages that its rows go to."""

    number: int
    jobs: list[Job]
    entries: list[Entry]
    seconds: float
    """The time that it should take; 0 if that is unknown."""
    patches: int
    room: int
    """Patches that may still overtake it: together no more than its own, so that it takes at most twice as long."""
    urgent: bool = False
    ticks_left: float = 0.0

    @property
    def holders(self) -> set[str]:
        """The holders that are charged for its images."""
        return {holder for job in self.jobs for holder in job.holders}


@dataclass(eq=False, slots=True)
class GroupShare:
    """A device's share of another device's image."""

    group: Group
    job: Job
    patches: int
    room: int

    @property
    def jobs(self) -> list[Job]:
        """The job of that image."""
        return [self.job]


@dataclass(eq=False, slots=True)
class _Head:
    """When the tower began with the first usual batch, and the time of urgent batches since, in all and by holder."""

    began: float = 0.0
    overtaken_s: float = 0.0
    had_s: Counter[str] = field(default_factory=Counter)

    @property
    def spent_s(self) -> float:
        """The time that the tower has spent on it, and on urgent batches that have not ended."""
        return monotonic() - self.began - self.overtaken_s


class TowerCredit:
    """The batches that a tower has, in the order in which they were sent, and its work in a group."""

    def __init__(self) -> None:
        self.batches: dict[int, SentBatch] = {}
        self.share: GroupShare | None = None
        self.forming: int | None = None
        """The number of the group that the device is forming."""
        self._head = _Head()

    @property
    def is_idle(self) -> bool:
        """Whether the tower has nothing to do."""
        return not self.batches and self.share is None and self.forming is None

    def wait_s(self, *, overtakes: bool) -> float:
        """Return the seconds until the tower has less than `CREDIT_S` of work; infinite if a batch must end first.

        `overtakes` is whether the tower can be interrupted.
        """
        usual = [batch for batch in self.batches.values() if not batch.urgent]
        if not usual:
            return 0.0
        most = MOST_BATCHES if overtakes else MOST_GPU_BATCHES
        if len(usual) >= most or not all(batch.seconds for batch in usual):
            return math.inf
        if overtakes and max(usual[0].seconds, self._head.spent_s) > LONG_S:
            return math.inf
        head_s = max(0.0, usual[0].seconds - self._head.spent_s)
        return max(0.0, head_s + sum(batch.seconds for batch in usual[1:]) - CREDIT_S)

    def add(self, batch: SentBatch) -> None:
        """Note that a batch was sent."""
        if not batch.urgent and all(each.urgent for each in self.batches.values()):
            self._head = _Head(monotonic())
        self.batches[batch.number] = batch

    def end(self, number: int, seconds: float = 0.0) -> SentBatch:
        """Give back the credit of a batch that took so long, and return the batch."""
        batch = self.batches.pop(number)
        if batch.urgent:
            self._head.overtaken_s += seconds
            self._head.had_s.update(dict.fromkeys(batch.holders, seconds))
        else:
            self._head = _Head(monotonic())
        return batch

    def overtaken(self, *, overtakes: bool) -> list[SentBatch | GroupShare]:
        """Return what images may overtake: all usual batches and a share in a group, if the tower can be interrupted.

        Otherwise only the batches that wait, if one of them takes `OVERTAKEN_S`.
        """
        usual = [batch for batch in self.batches.values() if not batch.urgent]
        share = [self.share] if self.share is not None else []
        if overtakes:
            return [*share, *usual]
        waiting = usual if share else usual[1:]
        return [*waiting] if any(batch.seconds >= OVERTAKEN_S for batch in waiting) else []

    def turn_in_s(self, holder: str) -> float:
        """Return when a holder's next image may overtake: 0 for now.

        It may if the holder has had no more time than the head since that began. So it waits as long as its last image
        took, and not for the rest of a large batch.
        """
        urgent = [batch for batch in self.batches.values() if batch.urgent]
        own_s = self._head.spent_s - sum(batch.seconds for batch in urgent)
        had_s = self._head.had_s[holder] + sum(batch.seconds for batch in urgent if holder in batch.holders)
        return 0.0 if had_s <= max(0.0, own_s) else max(LEAST_TURN_S, had_s - own_s)
