"""The request table: tasks, the claims on them and their requests, with the order of each stage."""

from encoder_service.scheduler.order import Order
from encoder_service.scheduler.policy import LAST_LANE, Policy
from encoder_service.scheduler.task import Amount, Claim, Holder, Request, State, Task

# The scale of a request is twice the mean over about this many recently ended requests: enough that one large
# request among small ones does not move it.
MEAN_OVER_REQUESTS = 256


class RequestTable:
    """Keeps the relations between tasks, claims and requests, and the counts over them, consistent.

    Each holder has a work clock: patches handed to the device for it so far. Its requests age by that, so ageing needs
    no measured rate, stops while nothing of the holder is encoded, and is not hurried by the work of others.
    """

    def __init__(self, policy: Policy) -> None:
        self._policy = policy
        ordered = (State.WAITING, State.APART, State.LARGE, State.PREPARED)
        self.orders = {state: Order(policy) for state in ordered}
        self.tasks: dict[bytes, Task] = {}
        self.requests: dict[tuple[str, str], Request] = {}  # by holder and identifier
        self.holders: dict[str, Holder] = {}
        self.claims = 0
        self._clock_patches = 0  # of the whole device: where the clock of a new holder starts
        self.amounts = {(state, demanded): Amount() for state in State for demanded in (False, True)}
        self.mean_request_patches = 0.0
        self._ended = 0
        self._numbers = 0

    def open(self, task: Task) -> None:
        """Add a new task; the caller attaches a claim at once."""
        assert task.address not in self.tasks, task
        self.tasks[task.address] = task
        self.amounts[task.state, task.demanded].add(task)

    def close(self, task: Task) -> None:
        """Remove a task and end the claims on it."""
        for claim in list(task.claims):
            self.detach(claim)
        self.amounts[task.state, task.demanded].add(task, -1)
        self._change(task, State.GONE)
        del self.tasks[task.address]

    def attach(self, claim: Claim, task: Task, now: float) -> None:
        """Attach a claim to a task."""
        assert claim.task is None, "a claim is attached once"
        self._numbers += 1
        claim.number, claim.task = self._numbers, task
        holder = self.holders.get(claim.holder)
        if holder is None:
            holder = self.holders[claim.holder] = Holder(clock_patches=self._clock_patches)
        name = claim.holder, claim.request_id
        request = self.requests.get(name)
        if request is None:
            request = self.requests[name] = Request(claim.request_id, claim.holder, claim.number)
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
        if task.state in self.orders:
            self.orders[task.state].add(claim, now)

    def detach(self, claim: Claim) -> None:
        """End a claim; its request is removed with its last claim."""
        task, request = claim.task, claim.request
        assert task is not None
        assert request is not None
        if claim.lane is not None:
            self.orders[task.state].remove(claim)
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
        """Move a task to another state, out of the order of its state and into that of the other, if they have one."""
        for claim in task.claims:
            if claim.lane is not None:
                self.orders[task.state].remove(claim)
        self.amounts[task.state, task.demanded].add(task, -1)
        self._change(task, state)
        self.amounts[task.state, task.demanded].add(task)
        order = self.orders.get(state)
        if order is not None:
            for claim in task.claims:
                order.add(claim, now)

    def take(self, task: Task) -> None:
        """Remove a task from the order of its state, because it is worked on next: its holders are charged."""
        if task.state is not State.PREPARED:
            task.decoded_from = task.state
        self.orders[task.state].take(task)

    def encoding(self, task: Task) -> None:
        """Advance the work clocks: a task is handed to the device."""
        self._clock_patches += task.patches
        for name in dict.fromkeys(claim.holder for claim in task.claims):
            self.holders[name].clock_patches += task.patches

    def comes_before(self, task: Task, claim: Claim, now: float) -> bool:
        """Whether the holder of `claim` itself ranks `task` in a better lane."""
        own = (self._policy.lane(other, now) for other in task.claims if other.holder == claim.holder)
        return min(own, default=LAST_LANE) < self._policy.lane(claim, now)

    def ahead(self, *, demanded: bool) -> Amount:
        """Return the amount decoded or being decoded that is not in a batch yet."""
        preparing, ready = self.amounts[State.PREPARING, demanded], self.amounts[State.PREPARED, demanded]
        return Amount(preparing.images + ready.images, preparing.patches + ready.patches)

    def _change(self, task: Task, state: State) -> None:
        """Set the state, and end the work for which the task was taken out of an order unless it goes on."""
        before = self._worked_on(task)
        task.state = state
        if before is not None and self._worked_on(task) is not before:
            before.ended()

    def _worked_on(self, task: Task) -> Order | None:
        """Return the order out of which a task was taken to be worked on, if it is worked on."""
        if task.state in (State.ENCODING, State.SPLIT):
            return self.orders[State.PREPARED]
        if task.state in (State.PREPARING, State.PREPARING_APART):
            return self.orders[task.decoded_from]
        return None

    def _end(self, request: Request) -> None:
        del self.requests[request.holder, request.request_id]
        self._ended = min(self._ended + 1, MEAN_OVER_REQUESTS)
        self.mean_request_patches += (request.named_patches - self.mean_request_patches) / self._ended

    def _count_demand(self, task: Task, claim: Claim, sign: int) -> None:
        self.amounts[task.state, task.demanded].add(task, -1)
        task.demands += sign * claim.demanded
        self.amounts[task.state, task.demanded].add(task)

    def _rekey(self, request: Request) -> None:
        for order in self.orders.values():
            order.rekey(request)
