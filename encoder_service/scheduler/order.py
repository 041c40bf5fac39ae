"""The claims of one stage, sorted by the policy and shared between holders: the best task is always the first."""

from bisect import bisect_left, insort
from collections.abc import Sequence
from typing import Any

from encoder_service.scheduler.policy import Policy
from encoder_service.scheduler.task import Claim, Request, Task

Rank = tuple[int, float, float, int]  # lane, request key, claim key, request number
Top = tuple[int, float, float, int, "Line"]  # a rank, and whose it is
Head = tuple[float, int, float, float, int, "Flow"]  # a tag and a rank, and whose they are
Entry = tuple[float, int, Claim]  # claim key (or `needed_at`), claim number

# Holders with nothing queued whose tags are kept. Beyond that the smallest tags are forgotten: they owe the least.
MAX_ABSENT = 4096


class Line:
    """The queued claims of one request in one lane, in claim order; never empty while it is in the order."""

    __slots__ = ("entries", "lane", "request", "top")

    def __init__(self, request: Request, lane: int) -> None:
        self.request = request
        self.lane = lane
        self.entries: list[Entry] = []
        self.top: Top | None = None


class Flow:
    """The lines of one holder in one class, sorted, and its tag; never empty while it is in the queue."""

    __slots__ = ("head", "holder", "tag", "tops")

    def __init__(self, holder: str, tag: float) -> None:
        self.holder = holder
        self.tag = tag
        self.tops: list[Top] = []
        self.head: Head | None = None


class FairQueue:
    """The flows of one class (demanded or speculative) in one stage: start-time fair queueing.

    The flow with the smallest tag is served first, and its tag grows by the patches that it is charged: flows that are
    never empty get equal patches. A holder that queues something after a pause starts at the tag of the flow that was
    served last, or at its own if that is larger, so that a pause earns nothing and repays nothing.
    """

    def __init__(self) -> None:
        self._served_tag = 0.0
        self._flows: dict[str, Flow] = {}
        self._heads: list[Head] = []
        self._absent: dict[str, float] = {}  # tags above `_served_tag` of holders without lines
        self._absent_by_tag: list[tuple[float, str]] = []

    def __len__(self) -> int:
        """Holders whose tag is kept."""
        return len(self._flows) + len(self._absent)

    def first(self) -> Head | None:
        """Return the head of the flow to serve next."""
        return self._heads[0] if self._heads else None

    def tag(self, holder: str) -> float:
        """Return the tag of a holder, or the one with which it would start now."""
        flow = self._flows.get(holder)
        return flow.tag if flow is not None else max(self._served_tag, self._absent.get(holder, 0.0))

    def place(self, line: Line, top: Top | None) -> None:
        """Insert a line, move it to another rank, or remove it (None)."""
        holder = line.request.holder
        flow = self._flows.get(holder)
        if flow is None:
            flow = self._flows[holder] = Flow(holder, self.tag(holder))
            self._forget(holder)
        if line.top is not None:
            _delete(flow.tops, line.top)
        line.top = top
        if top is not None:
            insort(flow.tops, top)
        self._reposition(flow)

    def serve(self, holders: Sequence[str]) -> None:
        """Note that work of these holders is begun; the clock of the queue is the smallest of their tags."""
        self._served_tag = max(self._served_tag, min(map(self.tag, holders)))
        while self._absent_by_tag and self._absent_by_tag[0][0] <= self._served_tag:
            self._forget(self._absent_by_tag[0][1])

    def charge(self, holder: str, patches: float) -> None:
        """Count `patches` against a holder."""
        flow = self._flows.get(holder)
        if flow is not None:
            flow.tag += patches
            self._reposition(flow)
        else:
            self._remember(holder, self.tag(holder) + patches)

    def _reposition(self, flow: Flow) -> None:
        if flow.head is not None:
            _delete(self._heads, flow.head)
        if flow.tops:
            flow.head = (flow.tag, *flow.tops[0][:4], flow)
            insort(self._heads, flow.head)
            return
        del self._flows[flow.holder]
        self._remember(flow.holder, flow.tag)

    def forgive(self) -> None:
        """Forget all tags if all flows are empty; for when nothing that was taken is worked on any more."""
        if not self._flows:
            self._served_tag = 0.0
            self._absent.clear()
            self._absent_by_tag.clear()

    def _remember(self, holder: str, tag: float) -> None:
        self._forget(holder)
        if tag > self._served_tag:
            self._absent[holder] = tag
            insort(self._absent_by_tag, (tag, holder))
        if len(self._absent) > MAX_ABSENT:
            self._forget(self._absent_by_tag[0][1])

    def _forget(self, holder: str) -> None:
        tag = self._absent.pop(holder, None)
        if tag is not None:
            _delete(self._absent_by_tag, (tag, holder))


class Order:
    """Claims sorted by class, holder, lane, request and claim; a task with several claims ranks by its best one.

    Three levels, so that a change of a holder's tag or a request's key moves a few lines and not all of its images.
    Sorted lists rather than heaps: no stale entries, and moving 80 kB of pointers (10 000 lines) takes 3 µs.
    """

    def __init__(self, policy: Policy) -> None:
        self._policy = policy
        self._lines: dict[Request, dict[int, Line]] = {}  # by request and lane
        self._demanded, self._speculative = FairQueue(), FairQueue()
        self._working = 0  # tasks that were taken and are worked on
        self._ahead: list[Entry] = []  # by `needed_at`: which claims become blocking next

    def add(self, claim: Claim, now: float) -> None:
        """Insert a claim whose task has entered this stage."""
        assert claim.request is not None
        assert claim.lane is None
        claim.lane = lane = self._policy.lane(claim, now)
        lines = self._lines.setdefault(claim.request, {})
        if lane not in lines:
            lines[lane] = Line(claim.request, lane)
        insort(lines[lane].entries, self._entry(claim))
        self._place(lines[lane])
        if self._policy.is_ahead(claim, now):
            insort(self._ahead, _due(claim))

    def remove(self, claim: Claim) -> None:
        """Remove a claim."""
        self._remove(claim)
        self._forgive()

    def take(self, task: Task) -> None:
        """Remove the claims of a task that is worked on next; `ended` follows. Each holder that wants it is charged.

        Splitting the patches between them would let a name that submits and another that fetches get twice a share.
        """
        payers = {
            demanded: list(dict.fromkeys(c.holder for c in task.claims if c.demanded is demanded))
            for demanded in (True, False)
        }
        self._working += 1
        self._queue(demanded=task.demanded).serve(payers[task.demanded])
        for claim in task.claims:
            self.remove(claim)
        task.payers = payers
        self.charge(task, task.patches)

    def ended(self) -> None:
        """Note that a task that was taken is not worked on any more."""
        self._working -= 1
        self._forgive()

    def charge(self, task: Task, patches: float) -> None:
        """Count `patches` against each holder that wanted a task when it was taken."""
        for demanded, holders in task.payers.items():
            for holder in holders:
                self._queue(demanded=demanded).charge(holder, patches)

    def rekey(self, request: Request) -> None:
        """Reposition a request whose key has changed."""
        for line in self._lines.get(request, {}).values():
            self._place(line)

    def first(self, now: float) -> Claim | None:
        """Return the best claim on the first task at `now` without removing it."""
        head = self._first(now)
        return None if head is None else head[5].tops[0][4].entries[0][2]

    def comes_before(self, other: "Order", now: float) -> bool:
        """Whether the first task here would rank before the first of `other`, in that; neither is empty."""
        mine, theirs = self._first(now), other._first(now)
        assert mine is not None
        assert theirs is not None
        is_demanded = self._demanded.first() is mine
        if is_demanded is not (other._demanded.first() is theirs):
            return is_demanded
        tag = other._queue(demanded=is_demanded).tag(mine[5].holder)
        return (tag, *mine[1:5]) < theirs[:5]

    def _first(self, now: float) -> Head | None:
        while self._ahead and self._ahead[0][0] <= now:
            claim = self._ahead[0][2]
            self._remove(claim)
            self.add(claim, now)
        return self._demanded.first() or self._speculative.first()

    def _forgive(self) -> None:
        """Once nothing waits and nothing is worked on, nobody owes anything."""
        if not self._working:
            self._demanded.forgive()
            self._speculative.forgive()

    def _remove(self, claim: Claim) -> None:
        assert claim.request is not None
        assert claim.lane is not None
        line = self._lines[claim.request][claim.lane]
        _delete(line.entries, self._entry(claim))
        claim.lane = None
        self._place(line)
        if self._ahead and claim.needed_at is not None:
            due = _due(claim)
            at = bisect_left(self._ahead, due)
            if at < len(self._ahead) and self._ahead[at] == due:
                del self._ahead[at]

    def _queue(self, *, demanded: bool) -> FairQueue:
        return self._demanded if demanded else self._speculative

    def _place(self, line: Line) -> None:
        """Reposition a line by its request's key and its first claim; remove it when empty."""
        request, lane = line.request, line.lane
        queue = self._queue(demanded=self._policy.is_demanded(lane))
        if line.entries:
            rank = (lane, self._policy.request_key(request), line.entries[0][0], request.number, line)
            queue.place(line, rank)
            return
        queue.place(line, None)
        del self._lines[request][lane]
        if not self._lines[request]:
            del self._lines[request]

    def _entry(self, claim: Claim) -> Entry:
        return (self._policy.claim_key(claim), claim.number, claim)


def _due(claim: Claim) -> Entry:
    assert claim.needed_at is not None
    return (claim.needed_at, claim.number, claim)


def _delete(entries: list[Any], entry: Any) -> None:
    at = bisect_left(entries, entry)
    assert entries[at] is entry or entries[at] == entry
    del entries[at]
