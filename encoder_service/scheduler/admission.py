"""Admission: limits on the queue, in total and per holder. Retry hints follow from the measured rate."""

import math
from dataclasses import dataclass, fields

from encoder_contract.errors import ImageLimitError, OverloadedError
from encoder_contract.turns import SHARE, fair_share
from encoder_service.scheduler.policy import Amount, Task

# A refused caller should retry when this share of the queue has drained, so that callers do not come back for every
# single free place.
DRAINED_BEFORE_RETRY = 0.25
MIN_RETRY_MS, MAX_RETRY_MS = 20, 60_000
UNMEASURED_RETRY_MS = 1_000  # before the first batch, while no rate is known
# Seconds of device time after which an old measurement weighs 1/e: for hints and metrics, and for callers, who send a
# server less within two seconds when its rate halves.
RATE_MEMORY_S = 10.0
RECENT_S = 0.8


@dataclass(frozen=True, slots=True)
class QueueLimits:
    """How much may be queued at a time, from admission to outcome. Each limit must fit the largest single image."""

    images: int
    patches: int
    source_bytes: int
    # Claims cost memory but no device time, so joining a queued image is free up to this number.
    claims: int
    client_share: float = SHARE  # the share of each limit that one holder may fill: see `fair_share`
    # How long the queue may take to drain at the measured rate: bounds the wait on any hardware. Holders share it like
    # the other limits. A queue with images of one request accepts all of that request: a slow device would never
    # encode it otherwise.
    seconds: float = math.inf

    def __post_init__(self) -> None:
        if min(self.images, self.patches, self.source_bytes, self.claims) < 1 or self.seconds <= 0:
            raise ValueError(f"every limit must be positive: {self}")
        if not 0 < self.client_share < 1:
            raise ValueError(f"client_share must lie between 0 and 1, and is {self.client_share}")


class Rate:
    """The rate of the device: an exponentially weighted mean of patches per second of encoding."""

    def __init__(self, memory_s: float) -> None:
        """An old measurement weighs 1/e after `memory_s` seconds of device time."""
        self._memory_s = memory_s
        self._patches = 0.0
        self._seconds = 0.0
        self.measured_s = 0.0
        """Seconds of device time measured so far."""

    def add(self, patches: int, seconds: float) -> None:
        """Add a batch: its patches, and the seconds that the device was busy with it."""
        fade = math.exp(-seconds / self._memory_s)
        self._patches = self._patches * fade + patches
        self._seconds = self._seconds * fade + seconds
        self.measured_s += seconds

    @property
    def patches_per_s(self) -> float:
        """Patches per second of device time; 0 before anything was measured."""
        return self._patches / self._seconds if self._seconds else 0.0


class Admission:
    """Counts queued work, in total and per holder, and refuses work that would exceed a limit or a share."""

    def __init__(self, limits: QueueLimits) -> None:
        self.limits = limits
        self.held = Amount()
        self.rate = Rate(RATE_MEMORY_S)
        self.recent_rate = Rate(RECENT_S)
        self._holders: dict[str, Amount] = {}

    @property
    def holders(self) -> int:
        """The number of holders with queued tasks."""
        return len(self._holders)

    def admit(self, task: Task, *, alone: bool = False) -> None:
        """Count a new task. Raises `OverloadedError`, or `ImageLimitError` for a task that can never fit."""
        amount = Amount()
        amount.add(task)
        self.check(task.holder, amount, alone=alone)
        self.count(task)

    def count(self, task: Task) -> None:
        """Count a task that has been checked."""
        self.held.add(task)
        self._holders.setdefault(task.holder, Amount()).add(task)

    def check(self, holder: str, amount: Amount, *, alone: bool = False) -> None:
        """Raise the error that `admit` would raise for this additional amount of a holder, without counting it.

        `alone`: only images of the same request are queued, so that nobody waits for it.
        """
        held = self._holders.get(holder, Amount())
        for name in (field.name for field in fields(Amount)):
            limit, more = getattr(self.limits, name), getattr(amount, name)
            free = limit - getattr(self.held, name)
            if more > limit:
                raise ImageLimitError(
                    f"the image has {more} {name}, more than the whole queue holds ({limit})"
                )
            if more > free:
                raise self.refusal(f"the queue is full: {limit} {name}")
            if held.images and not self._may_have(getattr(held, name), more, free - more):
                raise self.refusal(f"this client's share of the queue is full ({name})")
        seconds = self.limits.seconds
        if not self.held.images or alone or not self.rate.patches_per_s or seconds == math.inf:
            return
        limit = seconds * self.rate.patches_per_s
        free_patches = limit - self._waited_for(holder, self.limits.client_share * limit) - amount.patches
        if free_patches < 0:
            raise self.refusal(f"the queue would take longer than {seconds:g} s")
        if held.images and not self._may_have(held.patches, amount.patches, free_patches):
            raise self.refusal(f"this client's share of the queue is full ({seconds:g} s)")

    def _waited_for(self, holder: str, most: float) -> float:
        """Return the queued patches that a new image of a holder may wait for. Each other holder counts up to `most`.

        One of them may have more, that came to an empty queue. They take turns with this holder.
        """
        if self.held.patches <= most:
            return self.held.patches
        return sum(
            held.patches if name == holder else min(held.patches, most)
            for name, held in self._holders.items()
        )

    def check_claim(self, held: int, claims: int) -> None:
        """Raise `OverloadedError` if a holder that has `held` of all `claims` may not have another."""
        free = self.limits.claims - claims
        if free < 1:
            raise self.refusal(f"too many callers are waiting for images ({self.limits.claims})")
        if held and not self._may_have(held, 1, free - 1):
            raise self.refusal("this client is waiting for too many images")

    def release(self, task: Task) -> None:
        """Undo `admit` or `count`."""
        self.held.add(task, -1)
        held = self._holders[task.holder]
        held.add(task, -1)
        if not held.images:
            del self._holders[task.holder]

    def refusal(self, message: str) -> OverloadedError:
        """Return the error for a refused caller. Its retry hint is the time in which enough of the queue drains."""
        hint = float(UNMEASURED_RETRY_MS)
        if rate := self.rate.patches_per_s:
            hint = 1000 * DRAINED_BEFORE_RETRY * self.held.patches / rate
        return OverloadedError(message, retry_after_ms=round(min(max(hint, MIN_RETRY_MS), MAX_RETRY_MS)))

    def _may_have(self, held: float, more: float, free: float) -> bool:
        return fair_share(held, more, free, self.limits.client_share)
