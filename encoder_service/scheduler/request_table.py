"""The request table: tasks, the claims on them and their requests, with the order of each stage."""

from collections import Counter

from encoder_service.scheduler.order import Order
from encoder_service.scheduler.policy import LAST_LANE, Policy
from encoder_service.scheduler.task import Amount, Claim, Request, State, Task

# The scale of a request is twice the mean over about this many recently ended requests: enough that one large
# request among small ones does not move it.
MEAN_OVER_REQUESTS = 256


class RequestTable:
    """Keeps the relations between tasks, claims and requests, and the counts over them, consistent.

    `clock_patches` is the work clock: patches handed to the device so far. Requests age by it, so ageing
    needs no measured rate and stops while nothing is encoded.
    """

    def __init__(self, policy: Policy) -> None:
        self._policy = policy
        ordered = (State.WAITING, State.APART, State.LARGE, State.PREPARED)
        self.orders = {state: Order(policy) for state in ordered}
        self.tasks: dict[bytes, Task] = {}
        self.requests: dict[str, Request] = {}
        self.claims = 0
        self.claims_by: Counter[str] = Counter()  # client -> its claims
        self.clock_patches = 0
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
        task.state = State.GONE
        del self.tasks[task.address]

    def attach(self, claim: Claim, task: Task, now: float) -> None:
        """Attach a claim to a task."""
        assert claim.task is None, "a claim is attached once"
        self._numbers += 1
        claim.number, claim.task = self._numbers, task
        request = self.requests.get(claim.request_id)
        if request is None:
            request = self.requests[claim.request_id] = Request(claim.request_id, claim.number)
        claim.request = request
        if task not in request.tasks:
            request.tasks[task] = 0
            request.left_patches += task.patches
            request.named_patches += task.patches
            request.mark, request.scale = self.clock_patches, 2 * self.mean_request_patches
            self._rekey(request)
        request.tasks[task] += 1
        self._count_claim(claim, 1)
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
        self._count_claim(claim, -1)
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
        """Move a task to another state, and into the order of that state if it has one."""
        self.leave_order(task)
        self.amounts[task.state, task.demanded].add(task, -1)
        task.state = state
        self.amounts[task.state, task.demanded].add(task)
        order = self.orders.get(state)
        if order is not None:
            for claim in task.claims:
                order.add(claim, now)

    def leave_order(self, task: Task) -> None:
        """Remove a task from the order of its state."""
        for claim in task.claims:
            if claim.lane is not None:
                self.orders[task.state].remove(claim)

    def lane(self, task: Task, now: float) -> int:
        """Return the class of a task: that of its best claim; without claims, the last."""
        return min((self._policy.lane(claim, now) for claim in task.claims), default=LAST_LANE)

    def ahead(self, *, demanded: bool) -> Amount:
        """Return the amount decoded or being decoded that is not in a batch yet."""
        preparing, ready = self.amounts[State.PREPARING, demanded], self.amounts[State.PREPARED, demanded]
        return Amount(preparing.images + ready.images, preparing.patches + ready.patches)

    def _end(self, request: Request) -> None:
        del self.requests[request.request_id]
        self._ended = min(self._ended + 1, MEAN_OVER_REQUESTS)
        self.mean_request_patches += (request.named_patches - self.mean_request_patches) / self._ended

    def _count_claim(self, claim: Claim, sign: int) -> None:
        self.claims += sign
        self.claims_by[claim.client_id] += sign
        if not self.claims_by[claim.client_id]:
            del self.claims_by[claim.client_id]

    def _count_demand(self, task: Task, claim: Claim, sign: int) -> None:
        self.amounts[task.state, task.demanded].add(task, -1)
        task.demands += sign * claim.demanded
        self.amounts[task.state, task.demanded].add(task)

    def _rekey(self, request: Request) -> None:
        for order in self.orders.values():
            order.rekey(request)
