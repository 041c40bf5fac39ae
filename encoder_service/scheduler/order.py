"""The claims of one stage, sorted by the policy: the best task is always the first."""

from bisect import bisect_left, insort
from typing import Any

from encoder_service.scheduler.policy import Policy
from encoder_service.scheduler.task import Claim, Request, Task

Top = tuple[int, float, float, int, "Line"]  # lane, request key, claim key, request number
Entry = tuple[float, int, Claim]  # claim key (or `needed_at`), claim number


class Line:
    """The queued claims of one request in one lane, in claim order; never empty while it is in the order."""

    __slots__ = ("entries", "lane", "request", "top")

    def __init__(self, request: Request, lane: int) -> None:
        self.request = request
        self.lane = lane
        self.entries: list[Entry] = []
        self.top: Top | None = None


class Order:
    """Claims sorted by lane, request and claim; a task with several claims ranks by its best one.

    Two levels, so that a change of a request's key moves a few lines and not all of its images. Sorted
    lists rather than heaps: no stale entries, and moving 80 kB of pointers (10 000 lines) takes 3 µs.
    """

    def __init__(self, policy: Policy) -> None:
        self._policy = policy
        self._lines: dict[Request, dict[int, Line]] = {}  # by request and lane
        self._tops: list[Top] = []
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

    def rekey(self, request: Request) -> None:
        """Reposition a request whose key has changed."""
        for line in self._lines.get(request, {}).values():
            self._place(line)

    def first(self, now: float) -> Task | None:
        """Return the first task at `now` without removing it."""
        while self._ahead and self._ahead[0][0] <= now:
            claim = self._ahead[0][2]
            self.remove(claim)
            self.add(claim, now)
        if not self._tops:
            return None
        claim = self._tops[0][4].entries[0][2]
        return claim.task

    def comes_before(self, other: "Order", now: float) -> bool:
        """Whether the first task here ranks before the first of `other`; neither is empty."""
        self.first(now)
        other.first(now)
        return self._tops[0][:4] < other._tops[0][:4]

    def _place(self, line: Line) -> None:
        """Reposition a line by its request's key and its first claim; remove it when empty."""
        request, lane = line.request, line.lane
        if line.top is not None:
            _delete(self._tops, line.top)
        if line.entries:
            line.top = (lane, self._policy.request_key(request), line.entries[0][0], request.number, line)
            insort(self._tops, line.top)
            return
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
