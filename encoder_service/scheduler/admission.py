"""Admission: how much may be queued, by whom, and when a refused caller should retry."""

import math
from dataclasses import dataclass, fields

from encoder_contract.errors import ImageLimitError, OverloadedError
from encoder_service.scheduler.task import Amount, Task

# A refused caller should retry when this share of the queue has drained, so that callers do not return one
# by one for a single place each.
DRAINED_BEFORE_RETRY = 0.25
MIN_RETRY_MS, MAX_RETRY_MS = 20, 60_000
UNMEASURED_RETRY_MS = 1_000  # before the first batch no rate is known


@dataclass(frozen=True, slots=True)
class Limits:
    """What may be queued at a time, from admission to outcome. Each must hold the largest single image."""

    images: int
    patches: int
    source_bytes: int
    # Claims cost memory but no device time, so joining is free until here.
    claims: int
    # What a single client may fill of each of these; with several clients, each may hold share / (1 - share)
    # times what is still free: greedy clients converge to equal shares, and a part stays free.
    client_share: float = 0.75
    # How long the queue may take to drain at the measured rate: bounds waiting on any hardware. An empty queue
    # accepts any image.
    seconds: float = math.inf

    def __post_init__(self) -> None:
        if min(self.images, self.patches, self.source_bytes, self.claims) < 1 or self.seconds <= 0:
            raise ValueError(f"every limit must be positive: {self}")
        if not 0 < self.client_share < 1:
            raise ValueError(f"client_share must lie between 0 and 1, and is {self.client_share}")


class Admission:
    """Counts what is queued, in total and by client, and refuses what would exceed a limit or a share."""

    def __init__(self, limits: Limits) -> None:
        self.limits = limits
        self.held = Amount()
        self._clients: dict[str, Amount] = {}

    @property
    def clients(self) -> int:
        """Number of clients with queued tasks."""
        return len(self._clients)

    def admit(self, task: Task, patches_per_s: float) -> None:
        """Count a new task. Raises `OverloadedError`, and `ImageLimitError` for one that can never fit."""
        asked = Amount()
        asked.add(task)
        self.check(task.client_id, asked, patches_per_s)
        self.held.add(task)
        self._clients.setdefault(task.client_id, Amount()).add(task)

    def check(self, client_id: str, asked: Amount, patches_per_s: float) -> None:
        """Raise what `admit` would for `asked` more work of a client; count nothing."""
        mine = self._clients.get(client_id, Amount())
        for name in (field.name for field in fields(Amount)):
            limit, want = getattr(self.limits, name), getattr(asked, name)
            free = limit - getattr(self.held, name)
            if want > limit:
                raise ImageLimitError(f"the image has {want} {name}, and the whole queue holds {limit}")
            if want > free:
                raise self.refusal(f"the queue is full: {limit} {name}", patches_per_s)
            if mine.images and getattr(mine, name) + want > self._share(free - want):
                raise self.refusal(f"this client's share of the queue is full ({name})", patches_per_s)
        patches = self.held.patches + asked.patches
        if self.held.images and patches_per_s and patches / patches_per_s > self.limits.seconds:
            raise self.refusal(f"the queue would take longer than {self.limits.seconds:g} s", patches_per_s)

    def check_claim(self, mine: int, held: int, patches_per_s: float) -> None:
        """Raise `OverloadedError` unless a client with `mine` of the `held` claims may have one more."""
        free = self.limits.claims - held
        if free < 1:
            raise self.refusal("too many callers are waiting", patches_per_s)
        if mine and mine + 1 > self._share(free - 1):
            raise self.refusal("this client waits for too many images", patches_per_s)

    def release(self, task: Task) -> None:
        """Undo `admit`."""
        self.held.add(task, -1)
        mine = self._clients[task.client_id]
        mine.add(task, -1)
        if not mine.images:
            del self._clients[task.client_id]

    def refusal(self, message: str, patches_per_s: float) -> OverloadedError:
        """Return the error for a refused caller; its retry hint is the time in which enough of the queue drains."""
        hint = float(UNMEASURED_RETRY_MS)
        if patches_per_s:
            hint = 1000 * DRAINED_BEFORE_RETRY * self.held.patches / patches_per_s
        return OverloadedError(message, retry_after_ms=round(min(max(hint, MIN_RETRY_MS), MAX_RETRY_MS)))

    def _share(self, free: int) -> int:
        share = self.limits.client_share
        return math.floor(free * share / (1 - share))
