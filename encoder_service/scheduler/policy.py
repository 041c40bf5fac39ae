"""Tasks, the claims on them and their requests; and the policy, which decides whose turn is next.

A task is an address to compute once. The server's policy is `LEAST_WORK_LEFT`. `Order` keeps the claims of one stage
sorted by the policy: the first task is the next one.
"""

from __future__ import annotations

import math
from bisect import bisect_left, insort
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from enum import StrEnum
from itertools import islice
from typing import Any

MIN_PRIORITY, MAX_PRIORITY = -8, 8


class State(StrEnum):
    """The state of a task. It moves down this list, with these exceptions.

    - a task that the batch decoder does not accept begins as SINGLE or LARGE;
    - a task on which the batch decoder failed goes back from PREPARING to SINGLE or LARGE;
    - a task in SPLIT goes back to ENCODING;
    - an interrupted task goes back to the state in which it waited to be decoded, or to SINGLE or LARGE if its decoding
      was interrupted.
    """

    WAITING = "waiting"  # to be decoded in a batch
    SINGLE = "single"  # to be decoded by itself
    LARGE = "large"  # to be decoded by itself: has more pixels than are decoded at a time, or is frames of a video
    PREPARING = "preparing"  # being decoded and preprocessed in a batch
    PREPARING_SINGLE = "preparing_single"  # being decoded and preprocessed by itself
    PREPARED = "prepared"  # its patches are ready for a batch
    ENCODING = "encoding"  # in a batch that has started
    SPLIT = "split"  # its batch failed or was too large for the store; it waits for a smaller batch
    GONE = "gone"  # encoded, failed or dropped: no longer in the scheduler


@dataclass(eq=False, slots=True)
class Task:
    """One address, computed once for any number of callers. Compared by identity."""

    address: bytes
    patches: int
    source_bytes: int
    holder: str = ""  # of the claim that admitted it, in whose share of the queue it counts
    source_pixels: int = 0  # of the image file: the cost of decoding it
    as_large: bool = False  # counts as large when it is decoded by itself
    state: State = State.WAITING
    claims: dict[Claim, None] = field(default_factory=dict, repr=False)  # an ordered set
    demands: int = 0
    # The holders charged when it was last taken out of an order: those of demanded claims (True) and speculative ones.
    payers: dict[bool, dict[str, None]] = field(default_factory=dict, repr=False)  # ordered sets
    decoded_from: State = State.WAITING  # the state in which it waited to be decoded
    device: int = 0  # the number of the device that decodes or decoded it
    interruptions: int = 0  # how often a device process ended while decoding or encoding it

    @property
    def demanded(self) -> bool:
        """Whether a Fetch wants the task; otherwise it is speculative."""
        return self.demands > 0

    @property
    def holders(self) -> set[str]:
        """The holders charged when it was last taken out of an order."""
        return {holder for holders in self.payers.values() for holder in holders}


@dataclass(eq=False, slots=True)
class Claim:
    """One call's interest in one task. It is attached once, and ends with `withdraw` or with the task.

    A claim counts against the shares of its holder. Another replica's claim comes with an empty holder, and gets the
    holder that admitted the task. `priority` orders the claims of one holder.
    `needed_at` is in seconds on the scheduler's clock; None means that a chunk is waiting already.
    A claim that is not `demanded` is speculative: `needed_at` is then ignored.
    A claim that `reserves` gets its place in the queue before the bytes of its image arrive.
    """

    request_id: str
    holder: str
    priority: int = 0
    chunk: int = 0
    needed_at: float | None = None
    demanded: bool = False
    reserves: bool = False
    task: Task | None = field(default=None, init=False)
    place: Task | None = field(default=None, init=False, repr=False)  # see `Scheduler.reserve`
    request: LlmRequest | None = field(default=None, init=False, repr=False)
    number: int = field(default=0, init=False)  # order of attachment, unique: the last tie-breaker
    # Its lane in its order; None if it is in no order.
    lane: int | None = field(default=None, init=False, repr=False)

    def __post_init__(self) -> None:
        assert MIN_PRIORITY <= self.priority <= MAX_PRIORITY, self.priority


@dataclass(eq=False, slots=True)
class LlmRequest:
    """One request of a holder's language model, while any of its images is outstanding.

    `mark` is the holder's work clock (patches handed to the device for it so far) at the time when the request last
    named a new image: naming a new image restarts ageing, so that a reused identifier does not stay the oldest one
    forever. `scale` is the policy's scale of a large request at that time, in patches; 0 before any request has ended.
    """

    request_id: str
    holder: str
    number: int  # order of arrival, unique
    mark: int = 0
    scale: float = 0.0
    left_patches: int = 0
    named_patches: int = 0  # of all images it ever named here
    # Outstanding task -> number of claims on it.
    tasks: dict[Task, int] = field(default_factory=dict, repr=False)


@dataclass(eq=False, slots=True)
class Holder:
    """The counters of a holder while it has claims: the claims, and its work clock in patches."""

    claims: int = 0
    clock_patches: int = 0


@dataclass(slots=True)
class Amount:
    """An amount of work: how many images, and their patches and source bytes."""

    images: int = 0
    patches: int = 0
    source_bytes: int = 0

    def add(self, task: Task, sign: int = 1) -> None:
        """Add a task, or subtract it with `sign` -1."""
        self.images += sign
        self.patches += sign * task.patches
        self.source_bytes += sign * task.source_bytes


# The larger this is, the more later arrivals may overtake a request: faster on average, slower for big requests. Its
# value and the shape of the curve were chosen by simulation: docs/scheduling.md.
STRETCH = 15

SPECULATIVE_LANE = 64  # lanes below are demanded: two (blocking, ahead of need) for each of 17 priorities
LAST_LANE = 2 * SPECULATIVE_LANE


@dataclass(frozen=True, slots=True)
class Policy:
    """An order over the claims of one holder: by lane, then by request, then by claim; the smallest key first.

    The keys must not depend on the current time. A request's key is read again whenever its `left_patches` or `mark`
    changes. `blocking_first` puts claims whose `needed_at` has passed before claims that are ahead of need.
    """

    name: str
    request_key: Callable[[LlmRequest], float]
    claim_key: Callable[[Claim], float]
    blocking_first: bool = False

    def lane(self, claim: Claim, now: float) -> int:
        """Return the lane of a claim: demanded before speculative, then priority, then blocking before ahead."""
        lane = 2 * (MAX_PRIORITY - claim.priority)
        if not claim.demanded:
            return SPECULATIVE_LANE + lane
        return lane + self.is_ahead(claim, now)

    @staticmethod
    def is_demanded(lane: int) -> bool:
        """Whether the claims of a lane are demanded; otherwise they are speculative."""
        return lane < SPECULATIVE_LANE

    def is_ahead(self, claim: Claim, now: float) -> bool:
        """Whether this policy ranks the claim behind blocking claims, because no chunk needs it yet."""
        return (
            self.blocking_first and claim.demanded and claim.needed_at is not None and claim.needed_at > now
        )


def _chunk(claim: Claim) -> float:
    return claim.chunk


def allowance(left_patches: int, scale_patches: float, stretch: float = STRETCH) -> float:
    """Return how many patches may be encoded before a request with `left_patches` of work left is due.

    For a small request, that is `stretch` times its work. For requests much larger than `scale_patches` it grows only
    logarithmically, so that the largest requests do not bear the whole cost. At most `stretch * left_patches`.
    """
    if not scale_patches:
        return stretch * left_patches
    return stretch * scale_patches * math.log1p(left_patches / scale_patches)


def least_work_left(stretch: float = STRETCH) -> Policy:
    """Return the policy that orders requests by when they are due on the work clock: `mark + allowance(work left)`."""
    return Policy(
        name="least-work-left",
        request_key=lambda request: request.mark + allowance(request.left_patches, request.scale, stretch),
        claim_key=_chunk,
        blocking_first=True,
    )


LEAST_WORK_LEFT = least_work_left()


Top = tuple[int, float, float, int, "Line"]  # lane, request key, claim key, request number, and the line
Head = tuple[float, int, float, float, int, "Flow"]  # the tag and the best rank of a flow, and the flow
Entry = tuple[float, int, Claim]  # claim key (or `needed_at`), claim number

# Tags kept of holders that have nothing queued. Beyond this the smallest tags are forgotten: those holders owe least.
MAX_ABSENT = 4096


class Line:
    """The queued claims of one request in one lane, in claim order; never empty while it is in the order."""

    __slots__ = ("entries", "lane", "request", "top")

    def __init__(self, request: LlmRequest, lane: int) -> None:
        self.request = request
        self.lane = lane
        self.entries: list[Entry] = []
        self.top: Top | None = None


class Flow:
    """The sorted lines of one holder in one class, and the holder's tag; never empty while it is in the queue."""

    __slots__ = ("head", "holder", "tag", "tops")

    def __init__(self, holder: str, tag: float) -> None:
        self.holder = holder
        self.tag = tag
        self.tops: list[Top] = []
        self.head: Head | None = None


class FairQueue:
    """The flows of one class (demanded or speculative) in one stage: start-time fair queueing.

    The flow with the smallest tag is served first, and its tag grows by the patches that it is charged. So flows that
    are never empty get equal patches. A holder that queues work after a pause starts at the tag of the flow that was
    served last, or at its own tag if that is larger: a pause earns no credit and cancels no debt.
    """

    def __init__(self) -> None:
        self._served_tag = 0.0
        self._flows: dict[str, Flow] = {}
        self.heads: list[Head] = []
        """The heads of all flows, in the order in which they would be served."""
        self._absent: dict[str, float] = {}  # tags above `_served_tag` of holders without lines
        self._absent_by_tag: list[tuple[float, str]] = []

    def __len__(self) -> int:
        """Return the number of holders whose tag is kept."""
        return len(self._flows) + len(self._absent)

    def has(self, holder: str) -> bool:
        """Whether the holder has a flow."""
        return holder in self._flows

    def tag(self, holder: str) -> float:
        """Return the tag of a holder, or the tag with which it would start now."""
        flow = self._flows.get(holder)
        return flow.tag if flow is not None else max(self._served_tag, self._absent.get(holder, 0.0))

    def place(self, line: Line, top: Top | None) -> None:
        """Insert a line, move it to another rank, or remove it (None)."""
        holder = line.request.holder
        flow = self._flows.get(holder)
        if flow is None:
            flow = self._flows[holder] = Flow(holder, self.tag(holder))
            if holder in self._absent:
                self._forget(holder)
        if line.top is not None:
            _delete(flow.tops, line.top)
        line.top = top
        if top is not None:
            insort(flow.tops, top)
        self._reposition(flow)

    def serve(self, holders: Iterable[str]) -> None:
        """Record that work of these holders starts; it advances the served tag to the smallest of their tags.

        But not beyond the tag of a flow that they have passed: a new holder must not start behind these.
        """
        first = self.heads[0][0] if self.heads else math.inf
        self._served_tag = max(self._served_tag, min(first, *map(self.tag, holders)))
        while self._absent_by_tag and self._absent_by_tag[0][0] <= self._served_tag:
            self._forget(self._absent_by_tag[0][1])

    def charge(self, holder: str, patches: float) -> None:
        """Count `patches` against a holder, or for it if they are negative."""
        flow = self._flows.get(holder)
        if flow is not None:
            flow.tag = max(self._served_tag, flow.tag + patches)
            self._reposition(flow)
        else:
            self._remember(holder, self.tag(holder) + patches)

    def _reposition(self, flow: Flow) -> None:
        if flow.head is not None:
            _delete(self.heads, flow.head)
        if flow.tops:
            flow.head = (flow.tag, *flow.tops[0][:4], flow)
            insort(self.heads, flow.head)
            return
        del self._flows[flow.holder]
        self._remember(flow.holder, flow.tag)

    def forgive(self) -> None:
        """Forget all tags if all flows are empty. Call it only when no taken work is in progress."""
        if not self._flows:
            self._served_tag = 0.0
            self._absent.clear()
            self._absent_by_tag.clear()

    def _remember(self, holder: str, tag: float) -> None:
        if holder in self._absent:
            self._forget(holder)
        if tag > self._served_tag:
            self._absent[holder] = tag
            insort(self._absent_by_tag, (tag, holder))
        if len(self._absent) > MAX_ABSENT:
            self._forget(self._absent_by_tag[0][1])

    def _forget(self, holder: str) -> None:
        _delete(self._absent_by_tag, (self._absent.pop(holder), holder))


class Order:
    """Claims sorted by class, holder, lane, request and claim; a task with several claims ranks by its best one.

    There are three levels, so that a change of a holder's tag or a request's key moves a few lines, not all images.
    Sorted lists rather than heaps: there are no stale entries, and moving 80 kB of pointers (10 000 lines) takes 3 µs.
    """

    def __init__(self, policy: Policy) -> None:
        self._policy = policy
        self.lines: dict[LlmRequest, dict[int, Line]] = {}
        """By request and lane; empty if no task waits in this stage."""
        self._queues = {True: FairQueue(), False: FairQueue()}  # the demanded claims come first
        self._working = 0  # tasks taken out and in progress
        self._ahead: list[Entry] = []  # claims ahead of need, by `needed_at`: the first becomes blocking next

    def add(self, claim: Claim, now: float) -> None:
        """Insert a claim whose task has entered this stage."""
        assert claim.request is not None
        assert claim.lane is None
        claim.lane = lane = self._policy.lane(claim, now)
        lines = self.lines.setdefault(claim.request, {})
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
        """Remove the claims of a task that is worked on next, and charge each of its holders; call `ended` later.

        Each holder is charged all patches. If they were split, a client could double its share with two names, one
        that submits and one that fetches.
        """
        payers = task.payers = {}
        for claim in task.claims:
            payers.setdefault(claim.demanded, {})[claim.holder] = None
        self._working += 1
        self._queues[task.demanded].serve(payers[task.demanded])
        for claim in task.claims:
            self._remove(claim)
        self.charge(task, task.patches)

    def ended(self) -> None:
        """Record that the work on a taken task has ended."""
        self._working -= 1
        self._forgive()

    def charge(self, task: Task, patches: float) -> None:
        """Count `patches` more, or fewer, against each holder that had a claim on the task when it was taken.

        Does nothing if what holders owe was forgotten meanwhile.
        """
        for demanded, holders in task.payers.items():
            queue = self._queues[demanded]
            for holder in holders if self._working or queue.heads else ():
                queue.charge(holder, patches)

    def rekey(self, request: LlmRequest) -> None:
        """Reposition a request whose key has changed."""
        for line in self.lines.get(request, {}).values():
            self._place(line)

    def first(self, now: float) -> Claim | None:
        """Return the best claim on the first task at `now`, without removing it."""
        head = self._first(now)
        return None if head is None else _claim(head)

    def firsts(self, now: float, may: Callable[[Claim], bool] = lambda _: True) -> Iterator[Claim]:
        """Yield the best demanded claim of each holder, in order. Do not change the order meanwhile.

        For a request whose best claim in a lane `may` not, the next request of that holder counts.
        """
        self._first(now)
        for head in self._queues[True].heads:
            yield from islice(filter(may, (top[4].entries[0][2] for top in head[5].tops)), 1)

    def has_demanded(self, holder: str) -> bool:
        """Whether the holder has a demanded claim here."""
        return self._queues[True].has(holder)

    def comes_before(self, other: Order, now: float) -> bool:
        """Whether the first task here would be the first in `other`. Neither order may be empty."""
        head, other_head = self._first(now), other._first(now)
        assert head is not None
        assert other_head is not None
        is_demanded, other_is_demanded = bool(self._queues[True].heads), bool(other._queues[True].heads)
        if is_demanded is not other_is_demanded:
            return is_demanded
        tag = other._queues[is_demanded].tag(head[5].holder)
        return (tag, *head[1:5]) < other_head[:5]

    def _first(self, now: float) -> Head | None:
        while self._ahead and self._ahead[0][0] <= now:
            claim = self._ahead[0][2]
            self._remove(claim)
            self.add(claim, now)
        return next((queue.heads[0] for queue in self._queues.values() if queue.heads), None)

    def _forgive(self) -> None:
        """Forget what holders owe once nothing is queued or in progress."""
        if not self._working:
            for queue in self._queues.values():
                queue.forgive()

    def _remove(self, claim: Claim) -> None:
        assert claim.request is not None
        assert claim.lane is not None
        line = self.lines[claim.request][claim.lane]
        _delete(line.entries, self._entry(claim))
        claim.lane = None
        self._place(line)
        if self._ahead and claim.needed_at is not None:
            due = _due(claim)
            at = bisect_left(self._ahead, due)
            if at < len(self._ahead) and self._ahead[at] == due:
                del self._ahead[at]

    def _place(self, line: Line) -> None:
        """Reposition a line by its request's key and its first claim; remove it if it is empty."""
        request, lane = line.request, line.lane
        queue = self._queues[self._policy.is_demanded(lane)]
        if line.entries:
            rank = (lane, self._policy.request_key(request), line.entries[0][0], request.number, line)
            queue.place(line, rank)
            return
        queue.place(line, None)
        del self.lines[request][lane]
        if not self.lines[request]:
            del self.lines[request]

    def _entry(self, claim: Claim) -> Entry:
        return (self._policy.claim_key(claim), claim.number, claim)


def _claim(head: Head) -> Claim:
    return head[5].tops[0][4].entries[0][2]


def _due(claim: Claim) -> Entry:
    assert claim.needed_at is not None
    return (claim.needed_at, claim.number, claim)


def _delete(entries: list[Any], entry: Any) -> None:
    at = bisect_left(entries, entry)
    assert entries[at] is entry or entries[at] == entry
    del entries[at]
