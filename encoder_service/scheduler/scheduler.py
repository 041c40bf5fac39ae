"""The scheduler: which images are decoded next, which make the next batch, and who is turned away."""

import math
from collections import deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from encoder_service.scheduler.admission import Admission, Limits
from encoder_service.scheduler.policy import LEAST_WORK_LEFT, Policy
from encoder_service.scheduler.rate import Rate
from encoder_service.scheduler.request_table import RequestTable
from encoder_service.scheduler.task import Amount, Claim, State, Task

# A speculative batch takes at most this part of the budget: it bounds how long a demand finds the device busy
# with guesses.
SPECULATIVE_BUDGET_SHARE = 0.25

Batch = Sequence[Task]


@dataclass(frozen=True, slots=True)
class Snapshot:
    """The queue at one moment, for metrics: images and patches by state and class, and the totals."""

    images: dict[tuple[State, bool], int]  # (state, demanded) -> images
    patches: dict[tuple[State, bool], int]
    source_bytes: int
    requests: int
    claims: int
    clients: int
    patches_per_s: float


class Scheduler:
    """Pure and synchronous: no clock, no thread, no device of its own. The caller serialises the calls.

    `now` is in seconds on any clock that never goes back. An image goes through `admit`, `next_to_prepare` or
    `next_apart`, `prepared`, `next_batch`, and `done` or `failed`; it may leave before its batch starts, when its
    last claim is withdrawn. A call costs microseconds, whatever is queued, for each claim that it touches.
    """

    def __init__(
        self,
        limits: Limits,
        *,
        max_ahead_patches: int,
        max_ahead_images: int,
        policy: Policy = LEAST_WORK_LEFT,
    ) -> None:
        """Set the bounds; `max_ahead_*` is what may be decoded or being decoded ahead of its batch.

        Speculative work may fill it once, demanded work once more, so that a demand never waits for a guess
        to be encoded: prepared patches stay below twice `max_ahead_patches`. It should hold two batches: one
        that waits while the other is filled.
        """
        self._admission = Admission(limits)
        self._max_ahead = Amount(max_ahead_images, max_ahead_patches)
        self._rate = Rate()
        self._table = RequestTable(policy)
        self._split: deque[list[Task]] = deque()

    # Callers come and go

    def admit(
        self,
        claim: Claim,
        address: bytes,
        patches: int,
        source_bytes: int,
        now: float,
        *,
        source_pixels: int = 0,
        apart: bool = False,
    ) -> bool:
        """Attach a claim to the work of an address; return whether the work is new.

        Work that is `apart` waits for `next_apart`. One of few patches may have many pixels: variants bound the former.
        Joining work that exists takes no room in the queue. Raises `OverloadedError` with `retry_after_ms`, and
        `ImageLimitError` for an image that could never fit; nothing is kept then.
        """
        if self.claim(claim, address, now):
            return False
        state = State.APART if apart else State.WAITING
        work = Task(address, patches, source_bytes, claim.client_id, source_pixels, state)
        self._admission.admit(work, self._rate.patches_per_s)
        self._table.open(work)
        self._table.attach(claim, work, now)
        return True

    def check_room(self, client_id: str, patches: int) -> None:
        """Raise what `admit` would for a new image of so many patches, before its bytes are asked for."""
        self._admission.check(client_id, Amount(1, patches), self._rate.patches_per_s)

    def claim(self, claim: Claim, address: bytes, now: float) -> bool:
        """Attach a claim to existing work; return False if there is none. Raises `OverloadedError`."""
        mine = self._table.claims_by[claim.client_id]
        self._admission.check_claim(mine, self._table.claims, self._rate.patches_per_s)
        work = self._table.works.get(address)
        if work is None:
            return False
        self._table.attach(claim, work, now)
        return True

    def withdraw(self, claim: Claim) -> Task | None:
        """End a claim; return the work if that was its last one and it is dropped.

        Work that is being encoded goes on. Withdrawing a claim whose work is gone does nothing.
        """
        work = claim.work
        if work is None:
            return None
        self._table.detach(claim)
        if work.claims or work.state is State.ENCODING:
            return None
        self._forget(work)
        return work

    # Stages take and return works

    def next_to_prepare(
        self, now: float, max_patches: int, max_images: int, max_pixels: float = math.inf
    ) -> list[Task]:
        """Take the works to decode together next, in order, as far as the bounds on what lies ahead allow.

        Of more than `max_patches`, or `max_pixels` to decode, one goes alone.
        """
        taken: list[Task] = []
        patches = pixels = 0
        while len(taken) < max_images:
            work = self._table.orders[State.WAITING].first(now)
            if work is None or not self._has_room_ahead(work):
                break
            patches, pixels = patches + work.patches, pixels + work.source_pixels
            if taken and (patches > max_patches or pixels > max_pixels):
                break
            self._table.move(work, State.PREPARING, now)
            taken.append(work)
        return taken

    def next_apart(self, now: float, max_pixels: float) -> list[Task]:
        """Take the work to decode by itself next, if the bounds on what lies ahead allow and it has no more pixels."""
        work = self._table.orders[State.APART].first(now)
        if work is None or work.source_pixels > max_pixels or not self._has_room_ahead(work):
            return []
        self._table.move(work, State.PREPARING, now)
        return [work]

    def put_apart(self, work: Task, now: float) -> None:
        """Say that the batch decoder failed on a work: it is to be decoded by itself."""
        if work.state is not State.GONE:
            assert work.state is State.PREPARING, work
            self._table.move(work, State.APART, now)

    def prepared(self, work: Task, now: float) -> bool:
        """Say that a work's patches are ready; return False if everyone has left: throw them away."""
        if work.state is State.GONE:
            return False
        assert work.state is State.PREPARING, work
        self._table.move(work, State.PREPARED, now)
        return True

    def next_batch(self, now: float, budget_patches: int) -> list[Task]:
        """Take the next batch of prepared works: as many, in order, as fit the budget; one larger goes alone.

        Halves of a failed batch, and what was put back, come first. Speculative works never join demanded
        ones, which they would only delay.
        """
        while self._split:
            half = [work for work in self._split.popleft() if work.state is not State.GONE]
            if half:
                return self._start(half, now)
        return self._start(self._choose(now, budget_patches), now)

    def done(self, batch: Batch, seconds: float) -> None:
        """Say that a batch is encoded, and how long the device was busy with it."""
        self._rate.add(sum(work.patches for work in batch), seconds)
        for work in batch:
            assert work.state is State.ENCODING, work
            self._forget(work)

    def failed(self, batch: Batch) -> list[Task]:
        """Say that a batch failed; return the works that end with it: forgotten, and without rows.

        A work that fails alone is to blame. A larger batch is split in two, to be tried again by the next
        calls of `next_batch`: at most 2n - 1 runs for n images, and no neighbour of a culprit fails. Works
        that nobody wants any more are not tried again; those are returned, without claims.
        """
        wanted = [work for work in batch if work.claims and len(batch) > 1]
        middle = (len(wanted) + 1) // 2
        self._again(wanted[:middle])
        self._again(wanted[middle:])
        return self._end(work for work in batch if work not in wanted)

    def put_back(self, works: Batch) -> list[Task]:
        """Say that works of a batch have to wait: they come first in `next_batch`.

        Those that nobody wants any more are forgotten; they are returned.
        """
        wanted = [work for work in works if work.claims]
        self._again(wanted)
        return self._end(work for work in works if work not in wanted)

    def drop(self, work: Task) -> None:
        """Forget a work that needs no encoding any more: it could not be decoded, or came from elsewhere."""
        if work.state is not State.GONE:
            self._forget(work)

    @property
    def queued(self) -> Amount:
        """What is held in all, from admission to outcome."""
        return self._admission.held

    @property
    def patches_per_s(self) -> float:
        """The measured rate of the device; 0 before the first batch."""
        return self._rate.patches_per_s

    @property
    def waiting_images(self) -> int:
        """Images that the device has yet to begin."""
        begun = (State.ENCODING, State.GONE)
        return sum(amount.images for key, amount in self._table.amounts.items() if key[0] not in begun)

    def snapshot(self) -> Snapshot:
        """Return the counts of this moment."""
        held = {key: amount for key, amount in self._table.amounts.items() if key[0] is not State.GONE}
        return Snapshot(
            images={key: amount.images for key, amount in held.items()},
            patches={key: amount.patches for key, amount in held.items()},
            source_bytes=self._admission.held.source_bytes,
            requests=len(self._table.requests),
            claims=self._table.claims,
            clients=self._admission.clients,
            patches_per_s=self._rate.patches_per_s,
        )

    # Inside

    def _choose(self, now: float, budget_patches: int) -> list[Task]:
        order = self._table.orders[State.PREPARED]
        first = order.first(now)
        if first is None:
            return []
        room = budget_patches if first.demanded else int(budget_patches * SPECULATIVE_BUDGET_SHARE)
        batch: list[Task] = []
        work: Task | None = first
        while work is not None and work.demanded == first.demanded and (not batch or work.patches <= room):
            batch.append(work)
            room -= work.patches
            self._table.leave_order(work)
            work = order.first(now)
        return batch

    def _start(self, batch: list[Task], now: float) -> list[Task]:
        for work in batch:
            self._table.move(work, State.ENCODING, now)
            self._table.clock_patches += work.patches
        return batch

    def _again(self, batch: list[Task]) -> None:
        for work in batch:
            self._table.move(work, State.SPLIT, 0.0)
        if batch:
            self._split.append(batch)

    def _end(self, batch: Iterable[Task]) -> list[Task]:
        ended = list(batch)
        for work in ended:
            assert work.state is State.ENCODING, work
            self._forget(work)
        return ended

    def _has_room_ahead(self, work: Task) -> bool:
        """Whether decoding `work` now keeps what lies ahead of the device within bounds."""
        demanded, guessed = self._table.ahead(demanded=True), self._table.ahead(demanded=False)
        images, patches = demanded.images + guessed.images, demanded.patches + guessed.patches
        if images == 0:
            return True
        if not work.demanded:
            return self._fits(images, patches, work, 1)
        return self._fits(demanded.images, demanded.patches, work, 1) and self._fits(images, patches, work, 2)

    def _fits(self, images: int, patches: int, work: Task, times: int) -> bool:
        most = self._max_ahead
        return images + 1 <= times * most.images and patches + work.patches <= times * most.patches

    def _forget(self, work: Task) -> None:
        self._table.close(work)
        self._admission.release(work)
