"""What the scheduler moves: tasks (addresses to compute once), the claims on them, and their requests."""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import StrEnum

MIN_PRIORITY, MAX_PRIORITY = -8, 8


class State(StrEnum):
    """The state of a task. It moves down this list, except from SPLIT to ENCODING, and from PREPARING to APART.

    A task that the batch decoder does not accept begins as APART or LARGE, not WAITING; one that fails there becomes
    either as well.
    """

    WAITING = "waiting"  # its bytes are held, but not decoded
    APART = "apart"  # likewise, to be decoded by itself
    LARGE = "large"  # likewise, with more source pixels than are decoded at a time
    PREPARING = "preparing"  # taken to be decoded and preprocessed
    PREPARING_APART = "preparing_apart"  # likewise, by itself
    PREPARED = "prepared"  # its patches are ready for a batch
    ENCODING = "encoding"  # in a batch that has started
    SPLIT = "split"  # its batch failed or was too large for the store; it waits for a smaller one
    GONE = "gone"  # encoded, failed or dropped: no longer in the scheduler


@dataclass(eq=False, slots=True)
class Task:
    """One address, computed once for any number of callers. Compared by identity."""

    address: bytes
    patches: int
    source_bytes: int
    holder: str  # the holder that admitted it, whose share of the queue it counts towards
    source_pixels: int = 0  # of the image file: the cost of decoding
    state: State = State.WAITING
    claims: dict[Claim, None] = field(default_factory=dict, repr=False)  # an ordered set
    demands: int = 0
    # Who wanted it when it was last taken out of an order: the holders of demanded claims, and of speculative ones.
    payers: dict[bool, list[str]] = field(default_factory=dict, repr=False)
    decoded_from: State = State.WAITING  # where it waited to be decoded

    @property
    def demanded(self) -> bool:
        """Whether a Fetch wants it; otherwise it is speculative."""
        return self.demands > 0


@dataclass(eq=False, slots=True)
class Claim:
    """One call's interest in one task: attached once, ended by `withdraw` or by the task's outcome.

    The holder is whom it counts against: the unit of every share. An empty one, which is another replica's, becomes
    the holder that admitted the task. `priority` orders the claims of one holder.
    `needed_at` is in seconds on the caller's clock; None means that a chunk is waiting for it already.
    A claim that is not `demanded` is speculative: `needed_at` is then ignored.
    """

    request_id: str
    holder: str
    priority: int = 0
    chunk: int = 0
    needed_at: float | None = None
    demanded: bool = False
    task: Task | None = field(default=None, init=False)
    request: Request | None = field(default=None, init=False, repr=False)
    number: int = field(default=0, init=False)  # order of attachment, unique: the last tie-breaker
    # Its lane in its order; None: it is in no order.
    lane: int | None = field(default=None, init=False, repr=False)

    def __post_init__(self) -> None:
        assert MIN_PRIORITY <= self.priority <= MAX_PRIORITY, self.priority


@dataclass(eq=False, slots=True)
class Request:
    """One request of a holder's language model, while any of its images is outstanding.

    `mark` is the reading of the holder's work clock (patches handed to the device for it so far) when the request last
    named an image it had not named before: naming a new image restarts ageing, so that an identifier that is reused
    does not stay the oldest one for ever. `scale` is the policy's scale of a large request at that time, in
    patches; 0 before any request has ended.
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
    """What is counted for a holder while it has claims: those, and its work clock in patches."""

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
