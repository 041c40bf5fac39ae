"""Admission: limits on the queue, in total and by holder; the retry hint follows the measured rate."""

import math
from dataclasses import dataclass, fields

from encoder_contract.errors import ImageLimitError, OverloadedError
from encoder_service.scheduler.policy import Amount, Task

# A refused caller should retry when this share of the queue has drained, so that callers do not return one
# by one for a single place each.
DRAINED_BEFORE_RETRY = 0.25
MIN_RETRY_MS, MAX_RETRY_MS = 20, 60_000
UNMEASURED_RETRY_MS = 1_000  # before the first batch no rate is known
# Seconds of device time after which an old measurement weighs 1/e.
RATE_MEMORY_S = 10.0


# What one holder may take while no other holds any.
SHARE = 0.75


def most_held(free: float, share: float = SHARE) -> int:
    """Return how much a holder may have in all, when so much stays free beside it.

    Greedy holders converge to equal shares, and some space stays free for newcomers.
    """
    return math.floor(free * share / (1 - share))


@dataclass(frozen=True, slots=True)
class Limits:
    """What may be queued at a time, from admission to outcome. Each must hold the largest single image."""

    images: int
    patches: int
    source_bytes: int
    # Claims cost memory but no device time, so joining a queued image is free up to this number.
    claims: int
    client_share: float = SHARE  # of each limit, what a single holder may fill: see `most_held`
    # How long the queue may take to drain at the measured rate: bounds waiting on any hardware. It is shared as the
    # other limits are. An empty queue accepts any image.
    seconds: float = math.inf

    def __post_init__(self) -> None:
        if min(self.images, self.patches, self.source_bytes, self.claims) < 1 or self.seconds <= 0:
            raise ValueError(f"every limit must be positive: {self}")
        if not 0 < self.client_share < 1:
            raise ValueError(f"client_share must lie between 0 and 1, and is {self.client_share}")


class Rate:
    """The rate of the device: an exponentially weighted mean of patches per second of encoding."""

    def __init__(self) -> None:
        self._patches = 0.0
        self._seconds = 0.0

    def add(self, patches: int, seconds: float) -> None:
        """Count a batch: its patches and the seconds the device was busy with it."""
        fade = math.exp(-seconds / RATE_MEMORY_S)
        self._patches = self._patches * fade + patches
        self._seconds = self._seconds * fade + seconds

    @property
    def patches_per_s(self) -> float:
        """Patches per second of device time; 0 before anything was measured."""
        return self._patches / self._seconds if self._seconds else 0.0


class Admission:
    """Counts what is queued, in total and by holder, and refuses what would exceed a limit or a share."""

    def __init__(self, limits: Limits) -> None:
        self.limits = limits
        self.held = Amount()
        self.rate = Rate()
        self._holders: dict[str, Amount] = {}

    @property
    def holders(self) -> int:
        """Number of holders with queued tasks."""
        return len(self._holders)

    def admit(self, task: Task) -> None:
        """Count a new task. Raises `OverloadedError`, and `ImageLimitError` for one that can never fit."""
        asked = Amount()
        asked.add(task)
        self.check(task.holder, asked)
        self.held.add(task)
        self._holders.setdefault(task.holder, Amount()).add(task)

    def check(self, holder: str, asked: Amount) -> None:
        """Raise what `admit` would raise for `asked` more work of a holder, without counting it."""
        mine = self._holders.get(holder, Amount())
        for name in (field.name for field in fields(Amount)):
            limit, want = getattr(self.limits, name), getattr(asked, name)
            free = limit - getattr(self.held, name)
            if want > limit:
                raise ImageLimitError(
                    f"the image has {want} {name}, more than the whole queue holds ({limit})"
                )
            if want > free:
                raise self.refusal(f"the queue is full: {limit} {name}")
            if mine.images and getattr(mine, name) + want > self._most_held(free - want):
                raise self.refusal(f"this client's share of the queue is full ({name})")
        seconds = self.limits.seconds
        free_patches = seconds * self.rate.patches_per_s - self.held.patches - asked.patches
        if not self.held.images or not self.rate.patches_per_s or seconds == math.inf:
            return
        if free_patches < 0:
            raise self.refusal(f"the queue would take longer than {seconds:g} s")
        if mine.images and mine.patches + asked.patches > self._most_held(free_patches):
            raise self.refusal(f"this client's share of the queue is full ({seconds:g} s)")

    def check_claim(self, mine: int, held: int) -> None:
        """Raise `OverloadedError` unless a holder with `mine` of the `held` claims may have one more."""
        free = self.limits.claims - held
        if free < 1:
            raise self.refusal(f"too many callers are waiting for images ({self.limits.claims})")
        if mine and mine + 1 > self._most_held(free - 1):
            raise self.refusal("this client is waiting for too many images")

    def release(self, task: Task) -> None:
        """Undo `admit`."""
        self.held.add(task, -1)
        mine = self._holders[task.holder]
        mine.add(task, -1)
        if not mine.images:
            del self._holders[task.holder]

    def refusal(self, message: str) -> OverloadedError:
        """Return the error for a refused caller; its retry hint is the time in which enough of the queue drains."""
        hint = float(UNMEASURED_RETRY_MS)
        if rate := self.rate.patches_per_s:
            hint = 1000 * DRAINED_BEFORE_RETRY * self.held.patches / rate
        return OverloadedError(message, retry_after_ms=round(min(max(hint, MIN_RETRY_MS), MAX_RETRY_MS)))

    def _most_held(self, free: float) -> int:
        return most_held(free, self.limits.client_share)
