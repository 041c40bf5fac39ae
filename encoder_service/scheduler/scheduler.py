"""The scheduler: which images are decoded next, which form the next batch, and which are refused.

`RequestTable` has the tasks, the claims on them and their requests, with the order of each stage. A `Snapshot` counts
what is queued at one moment.
"""

import math
from collections import Counter, deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from itertools import islice
from typing import Generic, TypeVar, cast

from encoder_service.scheduler.admission import RECENT_S, Admission, QueueLimits
from encoder_service.scheduler.policy import (
    LAST_LANE,
    LEAST_WORK_LEFT,
    Amount,
    Claim,
    Holder,
    LlmRequest,
    Order,
    Policy,
    State,
    Task,
)

# The scale of a request is twice the mean of about this many recently ended requests: enough that a single large
# request does not move it.
MEAN_OVER_REQUESTS = 256
SINGLES = (State.SINGLE, State.LARGE)
DECODING = (State.PREPARING, State.PREPARING_SINGLE)
IN_WORK = (*DECODING, State.ENCODING)
ON_DEVICE = (*IN_WORK, State.PREPARED, State.SPLIT)


AnyTask = TypeVar("AnyTask", bound=Task)


class RequestTable(Generic[AnyTask]):
    """Keeps tasks, claims and requests consistent with each other, and counts them.

    Each holder has a work clock: the patches handed to the device for it so far. Its requests age by this clock, so
    ageing needs no measured rate, stops while nothing of the holder is encoded, and is not sped up by others' work.
    """

    def __init__(self, policy: Policy, devices: int) -> None:
        self._policy = policy
        self.orders = {state: Order(policy) for state in (State.WAITING, *SINGLES)}
        self.prepared = [Order(policy) for _ in range(devices)]  # one for each device: it has the patches
        self.tasks: dict[bytes, AnyTask] = {}
        self.requests: dict[tuple[str, str], LlmRequest] = {}  # by holder and identifier
        self.holders: dict[str, Holder] = {}
        self.claims = 0
        self._clock_patches = 0  # of all holders together: the start of a new holder's clock
        self.amounts: dict[tuple[State, bool, int], Amount] = {
            (state, demanded, device): Amount()
            for state in State
            if state is not State.GONE
            for demanded in (False, True)
            for device in range(devices)
        }
        self.mean_request_patches = 0.0
        self._ended = 0
        self._numbers = 0

    def open(self, task: AnyTask) -> None:
        """Add a new task. The caller must attach a claim at once."""
        assert task.address not in self.tasks, task
        self.tasks[task.address] = task
        self._count(task, 1)

    def close(self, task: Task) -> None:
        """Remove a task and end the claims on it."""
        for claim in list(task.claims):
            self.detach(claim)
        self._change(task, State.GONE)
        del self.tasks[task.address]

    def attach(self, claim: Claim, task: Task, now: float) -> None:
        assert claim.task is None, "a claim is attached once"
        self._numbers += 1
        claim.number, claim.task = self._numbers, task
        holder = self.holders.get(claim.holder)
        if holder is None:
            holder = self.holders[claim.holder] = Holder(clock_patches=self._clock_patches)
        name = claim.holder, claim.request_id
        request = self.requests.get(name)
        if request is None:
            request = self.requests[name] = LlmRequest(claim.request_id, claim.holder, claim.number)
        claim.request = request
        if task not in request.tasks:
            request.tasks[task] = 0
            request.left_patches += task.patches
            request.named_patches += task.patches
            request.mark, request.scale = holder.clock_patches, 2 * self.mean_request_patches
            self._rekey(request)
        request.tasks[task] += 1
        holder.claims += 1
        self.claims += 1
        task.claims[claim] = None
        self._count_demand(task, claim, 1)
        if (order := self.order(task)) is not None:
            order.add(claim, now)

    def detach(self, claim: Claim) -> None:
        """End a claim. Its request is removed with its last claim."""
        task, request = claim.task, claim.request
        assert task is not None
        assert request is not None
        if claim.lane is not None:
            self._order(task).remove(claim)
        del task.claims[claim]
        self._count_demand(task, claim, -1)
        self.claims -= 1
        holder = self.holders[claim.holder]
        holder.claims -= 1
        if not holder.claims:
            del self.holders[claim.holder]
        claim.task = claim.request = None
        request.tasks[task] -= 1
        if request.tasks[task]:
            return
        del request.tasks[task]
        request.left_patches -= task.patches
        if request.tasks:
            self._rekey(request)
        else:
            self._end(request)

    def move(self, task: Task, state: State, now: float) -> None:
        """Move a task to another state, and from the order of its state to that of the new one, if they have one."""
        for claim in task.claims:
            if claim.lane is not None:
                self._order(task).remove(claim)
        self._change(task, state)
        order = self.order(task)
        if order is not None:
            for claim in task.claims:
                order.add(claim, now)

    def take(self, task: Task, device: int, state: State) -> None:
        """Move a task from the order of its state into the hands of a device, and charge its holders."""
        self._order(task).take(task)
        if task.state is not State.PREPARED:
            task.decoded_from = task.state
        self._change(task, state, device)

    def order(self, task: Task) -> Order | None:
        """Return the order that a task is in; None if its state has none."""
        return self.prepared[task.device] if task.state is State.PREPARED else self.orders.get(task.state)

    def comes_before(self, task: Task, claim: Claim, now: float) -> bool:
        """Whether the holder of `claim` has a claim on `task` in a better lane."""
        lanes = (self._policy.lane(other, now) for other in task.claims if other.holder == claim.holder)
        return min(lanes, default=LAST_LANE) < self._policy.lane(claim, now)

    def ahead(self, device: int, *, demanded: bool) -> Amount:
        """Return the amount that a device has decoded, or decodes in batches, and that is not in a batch yet."""
        preparing, ready = (
            self.amounts[state, demanded, device] for state in (State.PREPARING, State.PREPARED)
        )
        return Amount(preparing.images + ready.images, preparing.patches + ready.patches)

    def _order(self, task: Task) -> Order:
        order = self.order(task)
        assert order is not None, task
        return order

    def _count(self, task: Task, sign: int) -> None:
        self.amounts[task.state, task.demands > 0, task.device].add(task, sign)

    def _change(self, task: Task, state: State, device: int | None = None) -> None:
        """Set the state, and the device if it is given. Advance the work clocks for a task that begins to be encoded.

        If that ends the work for which the task was taken out of an order, tell the order.
        """
        before = self._taken_from(task)
        self._count(task, -1)
        task.state, task.device = state, task.device if device is None else device
        if state is not State.GONE:
            self._count(task, 1)
        if state is State.ENCODING:
            self._clock_patches += task.patches
            for name in dict.fromkeys(claim.holder for claim in task.claims):
                self.holders[name].clock_patches += task.patches
        if before is not None and self._taken_from(task) is not before:
            before.ended()

    def _taken_from(self, task: Task) -> Order | None:
        """Return the order that a task was taken out of, while it is being worked on."""
        if task.state in (State.ENCODING, State.SPLIT):
            return self.prepared[task.device]
        if task.state in (State.PREPARING, State.PREPARING_SINGLE):
            return self.orders[task.decoded_from]
        return None

    def _end(self, request: LlmRequest) -> None:
        del self.requests[request.holder, request.request_id]
        self._ended = min(self._ended + 1, MEAN_OVER_REQUESTS)
        self.mean_request_patches += (request.named_patches - self.mean_request_patches) / self._ended

    def _count_demand(self, task: Task, claim: Claim, sign: int) -> None:
        if claim.demanded:
            self._count(task, -1)
            task.demands += sign
            self._count(task, 1)

    def _rekey(self, request: LlmRequest) -> None:
        for order in (*self.orders.values(), *self.prepared):
            if request in order.lines:
                order.rekey(request)


@dataclass(frozen=True, slots=True)
class Snapshot:
    """The queue at one moment, for metrics: images and patches by state and class, and totals."""

    images: dict[tuple[State, bool], int]  # by state and whether demanded
    patches: dict[tuple[State, bool], int]
    source_bytes: int
    requests: int
    claims: int
    clients: int
    patches_per_s: float


# A speculative batch takes at most this share of the budget, which bounds how long a demanded image waits for it.
SPECULATIVE_BUDGET_SHARE = 0.25
# A task fails when this many device processes have ended while decoding or encoding it. After the first time a device
# has it alone.
MOST_INTERRUPTIONS = 3

# A patch of a batch is charged as at most this many.
MOST_COST = 8.0
# The first tasks of this many holders are looked at if there is no room to decode the first of them.
MOST_PASSED = 16


class Scheduler(Generic[AnyTask]):
    """Pure and synchronous: it has no clock, thread or device. The caller serialises the calls.

    `now` is in seconds on any monotonic clock. An image goes through `admit`, `next_to_prepare` or `next_single`,
    `prepared`, `next_batch`, and `done` or `failed`. If its last claim is withdrawn before its batch starts, it is
    dropped. A call takes microseconds for each claim that it touches, regardless of the length of the queue. All
    devices take from the images that wait to be decoded; the device that decodes an image also encodes it.
    """

    def __init__(
        self,
        limits: QueueLimits,
        *,
        max_ahead_patches: int,
        max_ahead_images: int,
        policy: Policy = LEAST_WORK_LEFT,
        large_pixels: float = math.inf,
        devices: int = 1,
    ) -> None:
        """Set the bounds. `max_ahead_*` bounds what each device has decoded, or is decoding, ahead of its batch.

        A task of more than `large_pixels` source pixels that is decoded by itself is large: see `next_single`.

        Speculative tasks may fill the bounds once, and demanded tasks once more, so that a demanded image never waits
        for a speculative one. Patches stay below twice `max_ahead_patches`, except for a larger image and for images
        decoded by themselves. The bounds should fit two batches.
        """
        self._admission = Admission(limits)
        self._places: Counter[tuple[str, str]] = Counter()  # reserved, by holder and request
        self._max_ahead = Amount(max_ahead_images, max_ahead_patches)
        self._large_pixels = large_pixels
        self._table: RequestTable[AnyTask] = RequestTable(policy, devices)
        self._split: tuple[deque[list[AnyTask]], ...] = tuple(deque() for _ in range(devices))
        self._suspects: set[AnyTask] = set()  # those that were interrupted: they may be why

    # Claims

    def admit(self, claim: Claim, task: AnyTask, now: float, *, single: bool = False) -> bool:
        """Attach a claim to the task of an address: the one that is queued, or `task`; return whether that is new.

        A `single` task is decoded by itself, and so is one that was interrupted. Joining an existing task takes no
        space in the queue. Raises `OverloadedError` with `retry_after_ms`, or `ImageLimitError` for an image that can
        never fit; the claim is then not attached. Cannot raise for an image that fits into the place that its claim
        reserved.
        """
        place = self._leave_place(claim)
        fits = place is not None and task.patches <= place.patches and task.source_bytes <= place.source_bytes
        if self._join(claim, task.address, now, checked=fits):
            return False
        task.holder = claim.holder
        if single or task.interruptions:
            task.state = self._single_state(task)
        if fits:
            self._admission.count(task)
        else:
            self._admission.admit(task, alone=self._is_alone(claim))
        if task.interruptions:
            self._suspects.add(task)
        self._table.open(task)
        self._table.attach(claim, task, now)
        return True

    def check_room(self, claim: Claim, patches: int) -> None:
        """Raise the error that `admit` would raise for a new image of `patches`. Call it before asking for bytes."""
        self._admission.check(claim.holder, Amount(1, patches), alone=self._is_alone(claim))

    def reserve(self, claim: Claim, address: bytes, patches: int, source_bytes: int) -> None:
        """Reserve the place of a new image in the queue, until `admit` or `withdraw`. Raises what `admit` would."""
        self._leave_place(claim)
        self._check_claim(claim)
        place = Task(address, patches, source_bytes, claim.holder)
        self._admission.admit(place, alone=self._is_alone(claim))
        claim.place = place
        self._places[claim.holder, claim.request_id] += 1

    def claim(self, claim: Claim, address: bytes, now: float) -> bool:
        """Attach a claim to the task of an address; return False if there is none. Raises `OverloadedError`."""
        return self._join(claim, address, now)

    def _join(self, claim: Claim, address: bytes, now: float, *, checked: bool = False) -> bool:
        task = self._table.tasks.get(address)
        if task is not None:
            claim.holder = claim.holder or task.holder
        if not checked:
            self._check_claim(claim)
        if task is None:
            return False
        self._leave_place(claim)
        self._table.attach(claim, task, now)
        return True

    def withdraw(self, claim: Claim) -> AnyTask | None:
        """End a claim. Return its task if that was the last claim and the task is dropped.

        A task that is being encoded continues. Does nothing if the task has ended.
        """
        self._leave_place(claim)
        if claim.task is None:
            return None
        task = self._task(claim)
        self._table.detach(claim)
        if task.claims or task.state is State.ENCODING:
            return None
        self._forget(task)
        return task

    # Stages

    def next_to_prepare(
        self, now: float, max_images: int, max_pixels: float = math.inf, device: int = 0
    ) -> list[AnyTask]:
        """Take the tasks that a device decodes in its next batch, in order, within the bounds on decoding ahead.

        A task of more than `max_pixels` is decoded alone.
        """
        taken: list[AnyTask] = []
        pixels = 0
        while len(taken) < max_images:
            if (task := self._first_with_room(State.WAITING, device, now)) is None:
                break
            pixels += task.source_pixels
            if taken and pixels > max_pixels:
                break
            self._table.take(task, device, State.PREPARING)
            taken.append(task)
        return taken

    def next_single(
        self, now: float, max_pixels: float, *, beside: Sequence[Task] = (), device: int = 0
    ) -> list[AnyTask]:
        """Take the next task that a device decodes by itself, within the bounds on decoding ahead.

        It and those that the device decodes `beside` it have at most `max_pixels` together, plus one large task. A
        large task that may not be taken does not hold up others.
        """
        pixels = [task.source_pixels for task in beside if not self._is_large(task)]
        room = max_pixels - sum(pixels) if pixels else math.inf
        may_be_large = len(pixels) == len(beside)
        for state in self._single_states(now):
            if (task := self._first_with_room(state, device, now)) is None:
                continue
            if may_be_large if state is State.LARGE else task.source_pixels <= room:
                self._table.take(task, device, State.PREPARING_SINGLE)
                return [task]
        return []

    def decoded(self, tasks: Sequence[AnyTask], seconds: float) -> None:
        """Report how many seconds a thread spent on decoding these tasks together, including tasks that failed.

        The holders were charged the patches when the tasks were taken, so that they get equal shares of the device. If
        decoding took longer than encoding does, the difference is charged now, in patches encoded in that time.
        """
        pixels = sum(task.source_pixels for task in tasks)
        for task in tasks:
            share = task.source_pixels / pixels if pixels else 1 / len(tasks)
            excess = seconds * share * self.patches_per_s - task.patches
            for order in self._decode_orders(task) if excess > 0 else ():
                order.charge(task, excess)

    def retry_single(self, task: Task, now: float) -> None:
        """Report that the batch decoder failed on a task: it is decoded by itself next."""
        if task.state is not State.GONE:
            assert task.state in DECODING, task
            self._table.move(task, self._single_state(task), now)

    def prepared(self, task: Task, now: float) -> bool:
        """Report that a task's patches are ready. Return False if the task was dropped: discard the patches."""
        if task.state is State.GONE:
            return False
        assert task.state in DECODING, task
        self._table.move(task, State.PREPARED, now)
        return True

    def next_batch(self, now: float, budget_patches: int, device: int = 0) -> list[AnyTask]:
        """Take a device's next batch of prepared tasks: as many, in order, as fit the budget.

        A task above the budget is encoded alone. Halves of a failed batch, and tasks that were put back, come first.
        Speculative tasks never join demanded ones: they would only delay them.
        """
        split = self._split[device]
        while split:
            half = [task for task in split.popleft() if task.state is not State.GONE]
            if half:
                for task in half:
                    self._table.move(task, State.ENCODING, now)
                return half
        return self._choose(now, budget_patches, device)

    def next_overtaking(
        self,
        batch: Sequence[AnyTask],
        now: float,
        most_patches: int,
        device: int = 0,
        *,
        most_of: Callable[[str], int] = lambda _holder: 0,
    ) -> list[AnyTask]:
        """Take a task of a device that may be encoded in the middle of `batch`; return it, or nothing.

        The task must be demanded, the first of its holder, and its lane must be as good as those of all tasks that its
        holder has in the batch. `most_of(holder)` is the limit of its patches. For a holder that has tasks in the batch
        the limit is `most_patches`, and the task must be the first of all. Tasks of a request that needs the batch
        earlier are left out: the request would have its last image no sooner, and the one of the batch later.
        """
        order = self._table.prepared[device]
        in_batch = {holder for task in batch for holder in task.holders}
        needed: dict[LlmRequest | None, int] = {}  # in which chunk each request first needs the batch
        for claim in (claim for task in batch for claim in task.claims if claim.demanded):
            needed[claim.request] = min(claim.chunk, needed.get(claim.request, claim.chunk))

        def helps(claim: Claim) -> bool:
            return claim.chunk < needed.get(claim.request, math.inf)

        first = order.first(now)
        for claim in islice(order.firsts(now, helps), MOST_PASSED):
            task, holder = self._task(claim), claim.holder
            if any(self._table.comes_before(other, claim, now) for other in batch):
                continue
            is_first = first is not None and holder == first.holder
            if task.patches <= (most_of(holder) if holder not in in_batch else most_patches * is_first):
                self._table.take(task, device, State.ENCODING)
                return [task]
        return []

    def done(self, batch: Sequence[AnyTask], seconds: float) -> None:
        """Report that a batch is encoded, and the seconds that the device was busy with it.

        The holders were charged the patches when the tasks were taken. The difference to the patches that are encoded
        in that time on average is charged now: so holders get equal times, although a patch of a large image costs
        more. A stall of the machine is not charged.
        """
        patches = sum(task.patches for task in batch)
        for rate in (self._admission.rate, self._admission.recent_rate):
            rate.add(patches, seconds)
        cost = seconds * self.patches_per_s / patches
        for task in batch:
            assert task.state is State.ENCODING, task
            difference = (min(cost, MOST_COST) - 1) * task.patches
            for order in (self._table.prepared[task.device], *self._decode_orders(task)):
                order.charge(task, difference)
            self._forget(task)

    def failed(self, batch: Sequence[AnyTask]) -> list[AnyTask]:
        """Report that a batch failed. Return the tasks that end now, without rows.

        A task that fails alone is the cause, and ends. A larger batch is split into two halves, which the next calls
        of `next_batch` return: at most 2n - 1 runs for n images, and only the failing images end. Tasks without claims
        are not retried, and end too.
        """
        wanted = [task for task in batch if task.claims and len(batch) > 1]
        middle = (len(wanted) + 1) // 2
        self._requeue(wanted[:middle])
        self._requeue(wanted[middle:])
        return self._end(task for task in batch if task not in wanted)

    def put_back(self, tasks: Sequence[AnyTask]) -> list[AnyTask]:
        """Put tasks of a batch back: they come first in `next_batch`. Tasks without claims are dropped and returned."""
        wanted = [task for task in tasks if task.claims]
        self._requeue(wanted)
        return self._end(task for task in tasks if task not in wanted)

    def interrupted(self, device: int, now: float) -> list[AnyTask]:
        """Report that a device lost its decoded images and its batch: queue those tasks to be decoded again.

        Return the tasks that end: those without claims, and those that were decoded or encoded when a device was lost
        for the `MOST_INTERRUPTIONS`-th time. The last times they were alone, so they are the cause.
        """
        lost = [
            task for task in self._table.tasks.values() if task.device == device and task.state in ON_DEVICE
        ]
        self._split[device].clear()
        ended = []
        for task in lost:
            task.interruptions += task.state in IN_WORK
            if task.interruptions:
                self._suspects.add(task)
            if not task.claims or task.interruptions >= MOST_INTERRUPTIONS:
                self._forget(task)
                ended.append(task)
            else:
                # The batch decoder runs in the device's process, and the one of single images in its own.
                waits_in = self._single_state(task) if task.state in DECODING else task.decoded_from
                self._table.move(task, waits_in, now)
        return ended

    def suspect(self, device: int) -> AnyTask | None:
        """Return the task that a device has alone, because earlier processes ended while they worked on it."""
        return next((t for t in self._suspects if t.device == device and t.state in ON_DEVICE), None)

    def drop(self, task: AnyTask) -> None:
        """Drop a task that failed before it was encoded. Does nothing if it is gone already."""
        if task.state is not State.GONE:
            self._forget(task)

    @property
    def queued(self) -> Amount:
        """The total amount queued, from admission to outcome."""
        return self._admission.held

    @property
    def patches_per_s(self) -> float:
        """The measured rate of the device; 0 before the first batch."""
        return self._admission.rate.patches_per_s

    @property
    def recent_patches_per_s(self) -> float:
        """The rate of the last second of device time; 0 before a second was measured: first batches are slow."""
        rate = self._admission.recent_rate
        return rate.patches_per_s if rate.measured_s >= RECENT_S else 0.0

    def may_decode(self, *, single: bool) -> bool:
        """Whether a task waits to be decoded in a batch, or by itself if `single`."""
        return any(self._table.orders[state].lines for state in (SINGLES if single else (State.WAITING,)))

    def may_encode(self, device: int) -> bool:
        """Whether a device has decoded tasks, or tasks of batches that failed or were put back."""
        return bool(self._table.prepared[device].lines or self._split[device])

    @property
    def waiting_images(self) -> int:
        """The number of images whose encoding has not started."""
        return sum(
            amount.images
            for (state, *_), amount in self._table.amounts.items()
            if state is not State.ENCODING
        )

    def snapshot(self) -> Snapshot:
        images: Counter[tuple[State, bool]] = Counter()
        patches: Counter[tuple[State, bool]] = Counter()
        for (state, demanded, _), amount in self._table.amounts.items():
            images[state, demanded] += amount.images
            patches[state, demanded] += amount.patches
        return Snapshot(
            images=images,
            patches=patches,
            source_bytes=self._admission.held.source_bytes,
            requests=len(self._table.requests),
            claims=self._table.claims,
            clients=self._admission.holders,
            patches_per_s=self.patches_per_s,
        )

    # Internals

    def _decode_orders(self, task: Task) -> list[Order]:
        """Return the orders that charge for a task which was taken to be decoded."""
        states = SINGLES if task.decoded_from in SINGLES else (task.decoded_from,)
        return [self._table.orders[state] for state in states]

    def _is_large(self, task: Task) -> bool:
        """Whether a task has more source pixels than are decoded at a time, or counts as if it had."""
        return task.as_large or task.source_pixels > self._large_pixels

    def _single_state(self, task: Task) -> State:
        return State.LARGE if self._is_large(task) else State.SINGLE

    def _single_states(self, now: float) -> tuple[State, ...]:
        """Return the states of tasks that wait to be decoded by themselves; the state of the best task first."""
        usual, large = self._table.orders[State.SINGLE], self._table.orders[State.LARGE]
        if large.first(now) is not None and (usual.first(now) is None or large.comes_before(usual, now)):
            return State.LARGE, State.SINGLE
        return State.SINGLE, State.LARGE

    def _choose(self, now: float, budget_patches: int, device: int) -> list[AnyTask]:
        order = self._table.prepared[device]
        first = order.first(now)
        if first is None:
            return []
        room = budget_patches if first.demanded else int(budget_patches * SPECULATIVE_BUDGET_SHARE)
        batch: list[AnyTask] = []
        claim: Claim | None = first
        while claim is not None and claim.demanded == first.demanded:
            task = self._task(claim)
            if batch and task.patches > room:
                break
            batch.append(task)
            room -= task.patches
            self._table.take(task, device, State.ENCODING)
            claim = order.first(now)
        return batch

    def _requeue(self, batch: list[AnyTask]) -> None:
        for task in batch:
            self._table.move(task, State.SPLIT, 0.0)
        if batch:
            self._split[batch[0].device].append(batch)

    def _end(self, batch: Iterable[AnyTask]) -> list[AnyTask]:
        ended = list(batch)
        for task in ended:
            assert task.state is State.ENCODING, task
            self._forget(task)
        return ended

    def _first_with_room(self, state: State, device: int, now: float) -> AnyTask | None:
        """Return the first task that a device may decode ahead; None if there is none.

        That is the first of its stage. If there is no room for it, the first of another holder that has no decoded
        image there may pass it: nobody waits until the tower has made room for the large image of somebody else.
        A task that was interrupted waits until the device has nothing, and nothing passes it then.
        """
        order, prepared = self._table.orders[state], self._table.prepared[device]
        first = order.first(now)
        if self._suspects:
            if self.suspect(device) is not None:
                return None
            firsts = [self._task(claim) for each in self._table.orders.values() if (claim := each.first(now))]
            if any(task.interruptions for task in firsts):
                is_next = (
                    first is not None and self._task(first).interruptions and not self._has_tasks(device)
                )
                return self._task(first) if first is not None and is_next else None
        if first is None:
            return None
        if self._has_room_ahead(first, device, now):
            return self._task(first)
        for claim in islice(order.firsts(now), 1, MOST_PASSED):
            if prepared.has_demanded(claim.holder) or self._task(claim).interruptions:
                continue
            demanded, speculative = (self._table.ahead(device, demanded=wanted) for wanted in (True, False))
            images, patches = demanded.images + speculative.images, demanded.patches + speculative.patches
            if self._fits(images, patches, self._task(claim), 2):
                return self._task(claim)
        return None

    def _has_tasks(self, device: int) -> bool:
        amounts = self._table.amounts
        return any(
            amounts[state, demanded, device].images for state in ON_DEVICE for demanded in (False, True)
        )

    def _has_room_ahead(self, first: Claim, device: int, now: float) -> bool:
        """Whether a device may decode the first task of a stage now, within its bounds on decoding ahead.

        The bounds double for a demanded task beside speculative ones, and for a task that will be the next in the ViT.
        Tasks being decoded by themselves do not count: they may be slow, and must not keep others from being decoded.
        """
        task = self._task(first)
        demanded, speculative = (self._table.ahead(device, demanded=wanted) for wanted in (True, False))
        images, patches = demanded.images + speculative.images, demanded.patches + speculative.patches
        if images == 0:
            return True
        if not task.demanded:
            return self._fits(images, patches, task, 1)
        # Such a task fits beside no other, and the device may always have others.
        if task.patches > self._max_ahead.patches:
            return self._fits(images, patches - task.patches, task, 2) and self._is_next(first, device, now)
        if not self._fits(images, patches, task, 2):
            return False
        return self._fits(demanded.images, demanded.patches, task, 1) or self._is_next(first, device, now)

    def _is_next(self, first: Claim, device: int, now: float) -> bool:
        prepared, state = self._table.prepared[device], self._task(first).state
        if prepared.first(now) is None:
            # Only batches in decoding are ahead, and there may always be another.
            return state in SINGLES
        return self._table.orders[state].comes_before(prepared, now)

    def _fits(self, images: int, patches: int, task: Task, times: int) -> bool:
        most = self._max_ahead
        return images + 1 <= times * most.images and patches + task.patches <= times * most.patches

    def _check_claim(self, claim: Claim) -> None:
        holder = self._table.holders.get(claim.holder)
        self._admission.check_claim(holder.claims if holder else 0, self._table.claims)

    def _leave_place(self, claim: Claim) -> Task | None:
        place, claim.place = claim.place, None
        if place is not None:
            self._admission.release(place)
            name = place.holder, claim.request_id
            self._places[name] -= 1
            if not self._places[name]:
                del self._places[name]
        return place

    def _is_alone(self, claim: Claim) -> bool:
        """Whether all that is queued is of the claim's request."""
        name = claim.holder, claim.request_id
        request = self._table.requests.get(name)
        return self._admission.held.images == self._places[name] + (len(request.tasks) if request else 0)

    def _forget(self, task: AnyTask) -> None:
        self._suspects.discard(task)
        self._table.close(task)
        self._admission.release(task)

    @staticmethod
    def _task(claim: Claim) -> AnyTask:
        assert claim.task is not None
        return cast(AnyTask, claim.task)  # every task of its claims was passed to `admit`
