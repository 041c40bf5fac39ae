"""What the scheduler moves: works (addresses to compute once), the claims on them, and their requests."""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import StrEnum

MIN_PRIORITY, MAX_PRIORITY = -8, 8


class State(StrEnum):
    """Where a work stands. It only moves down this list, but for SPLIT, from where it is encoded again.

    What the batch decoder does not take is APART instead of WAITING, or later, when it has failed there.
    """

    WAITING = "waiting"  # its bytes are held, nothing is decoded
    APART = "apart"  # the same, to be decoded by itself
    PREPARING = "preparing"  # taken to be decoded and preprocessed
    PREPARED = "prepared"  # its patches are ready for a batch
    ENCODING = "encoding"  # in a batch that has started
    SPLIT = "split"  # its batch failed or was too large for the store, and it waits for a smaller one
    GONE = "gone"  # encoded, failed or dropped: the scheduler has forgotten it


@dataclass(eq=False, slots=True)
class Task:
    """One address that is computed once, whoever and however many want it. Compared by identity."""

    address: bytes
    patches: int
    source_bytes: int
    client_id: str  # who admitted it: its place in the queue counts towards this client's share
    source_pixels: int = 0  # as stored: what decoding it costs
    state: State = State.WAITING
    claims: dict[Claim, None] = field(default_factory=dict, repr=False)  # an ordered set
    demands: int = 0

    @property
    def demanded(self) -> bool:
        """Whether a prefill wants it; else it is speculative."""
        return self.demands > 0


@dataclass(eq=False, slots=True)
class Claim:
    """One call's interest in one work: attached once, ended by `withdraw` or by the work's outcome.

    `needed_at` is in seconds on the caller's clock; None means that a chunk is waiting for it already.
    A claim that is not `demanded` is speculative: `needed_at` means nothing then.
    """

    request_id: str
    client_id: str
    priority: int = 0
    chunk: int = 0
    needed_at: float | None = None
    demanded: bool = False
    work: Task | None = field(default=None, init=False)
    request: Request | None = field(default=None, init=False, repr=False)
    number: int = field(default=0, init=False)  # order of attachment, unique: the last tie-break
    lane: int | None = field(default=None, init=False, repr=False)  # where its order keeps it; None: in none

    def __post_init__(self) -> None:
        assert MIN_PRIORITY <= self.priority <= MAX_PRIORITY, self.priority


@dataclass(eq=False, slots=True)
class Request:
    """What is known of one request of a language model while any of its images is outstanding.

    `mark` is the reading of the work clock (patches handed to the device so far) when the request last named
    an image it had not named before: a request that grows starts to age anew, so that an identifier used for
    ever cannot stay the oldest one for ever. `scale` is what the policy held a large request to be at that
    moment, in patches; 0 before any request has ended.
    """

    request_id: str
    number: int  # order of arrival, unique
    mark: int = 0
    scale: float = 0.0
    left_patches: int = 0
    named_patches: int = 0  # all the work it ever named here
    works: dict[Task, int] = field(default_factory=dict, repr=False)  # outstanding work -> claims on it


@dataclass(slots=True)
class Amount:
    """An amount of work: how many images, and their patches and source bytes."""

    images: int = 0
    patches: int = 0
    source_bytes: int = 0

    def add(self, work: Task, sign: int = 1) -> None:
        """Add a work, or take it out with `sign` -1."""
        self.images += sign
        self.patches += sign * work.patches
        self.source_bytes += sign * work.source_bytes
