"""The book of works, claims and requests: who wants what, where it stands, and in which order it comes."""

from collections import Counter

from encoder_service.scheduler.order import Order
from encoder_service.scheduler.policy import Policy
from encoder_service.scheduler.task import Amount, Claim, Request, State, Task

# The scale of a request is twice the mean over about this many requests that ended lately: enough that one
# album among snapshots does not move it.
MEAN_OVER_REQUESTS = 256


class RequestTable:
    """Keeps every relation between works, claims and requests, and the counts over them, consistent.

    `clock_patches` is the work clock: patches handed to the device so far. Requests age by it, so ageing
    needs no rate, and stands still when nothing is encoded.
    """

    def __init__(self, policy: Policy) -> None:
        self.orders = {state: Order(policy) for state in (State.WAITING, State.APART, State.PREPARED)}
        self.works: dict[bytes, Task] = {}
        self.requests: dict[str, Request] = {}
        self.claims = 0
        self.claims_by: Counter[str] = Counter()  # client -> its claims
        self.clock_patches = 0
        self.amounts = {(state, demanded): Amount() for state in State for demanded in (False, True)}
        self.mean_request_patches = 0.0
        self._ended = 0
        self._numbers = 0

    def open(self, work: Task) -> None:
        """Enter a new work; it needs a claim at once."""
        assert work.address not in self.works, work
        self.works[work.address] = work
        self.amounts[work.state, work.demanded].add(work)

    def close(self, work: Task) -> None:
        """Forget a work and end the claims on it."""
        for claim in list(work.claims):
            self.detach(claim)
        self.amounts[work.state, work.demanded].add(work, -1)
        work.state = State.GONE
        del self.works[work.address]

    def attach(self, claim: Claim, work: Task, now: float) -> None:
        """Enter a claim on a work."""
        assert claim.work is None, "a claim is attached once"
        self._numbers += 1
        claim.number, claim.work = self._numbers, work
        request = self.requests.get(claim.request_id)
        if request is None:
            request = self.requests[claim.request_id] = Request(claim.request_id, claim.number)
        claim.request = request
        if work not in request.works:
            request.works[work] = 0
            request.left_patches += work.patches
            request.named_patches += work.patches
            request.mark, request.scale = self.clock_patches, 2 * self.mean_request_patches
            self._rekey(request)
        request.works[work] += 1
        self._count_claim(claim, 1)
        work.claims[claim] = None
        self._count_demand(work, claim, 1)
        if work.state in self.orders:
            self.orders[work.state].add(claim, now)

    def detach(self, claim: Claim) -> None:
        """End a claim; its request is forgotten with its last one."""
        work, request = claim.work, claim.request
        assert work is not None
        assert request is not None
        if claim.lane is not None:
            self.orders[work.state].remove(claim)
        del work.claims[claim]
        self._count_demand(work, claim, -1)
        self._count_claim(claim, -1)
        claim.work = claim.request = None
        request.works[work] -= 1
        if request.works[work]:
            return
        del request.works[work]
        request.left_patches -= work.patches
        if request.works:
            self._rekey(request)
        else:
            self._end(request)

    def move(self, work: Task, state: State, now: float) -> None:
        """Bring a work into another state, and into the order of that state if it has one."""
        self.leave_order(work)
        self.amounts[work.state, work.demanded].add(work, -1)
        work.state = state
        self.amounts[work.state, work.demanded].add(work)
        order = self.orders.get(state)
        if order is not None:
            for claim in work.claims:
                order.add(claim, now)

    def leave_order(self, work: Task) -> None:
        """Take a work out of the order of its state."""
        for claim in work.claims:
            if claim.lane is not None:
                self.orders[work.state].remove(claim)

    def ahead(self, *, demanded: bool) -> Amount:
        """Return what is decoded or being decoded and not in a batch yet."""
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

    def _count_demand(self, work: Task, claim: Claim, sign: int) -> None:
        self.amounts[work.state, work.demanded].add(work, -1)
        work.demands += sign * claim.demanded
        self.amounts[work.state, work.demanded].add(work)

    def _rekey(self, request: Request) -> None:
        for order in self.orders.values():
            order.rekey(request)
