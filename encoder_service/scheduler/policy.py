"""Policies: which of the images that could be worked on comes first. The server uses `LEAST_WORK_LEFT`."""

from collections.abc import Callable
from dataclasses import dataclass

from encoder_service.scheduler.work import MAX_PRIORITY, Claim, Request

# How many times its own work may be encoded for later arrivals before nothing that still arrives overtakes a
# request. Small is fair and slow on average, large the reverse. Chosen by simulation: docs/scheduling.md.
STRETCH = 7

SPECULATIVE_LANE = 64  # lanes below are demanded: two (blocking, ahead of need) for each of 17 priorities


@dataclass(frozen=True, slots=True)
class Policy:
    """An order over claims: by lane, then by request, then by claim; the smallest first.

    The keys must not depend on the time of asking; a request's key is read again whenever its `left_patches`
    or `mark` change. `blocking_first` puts claims whose `needed_at` has passed before those ahead of need.
    """

    name: str
    request_key: Callable[[Request], float]
    claim_key: Callable[[Claim], float]
    blocking_first: bool = False

    def lane(self, claim: Claim, now: float) -> int:
        """Return the class of a claim: demanded before speculative, then priority, then blocking or ahead."""
        lane = 2 * (MAX_PRIORITY - claim.priority)
        if not claim.demanded:
            return SPECULATIVE_LANE + lane
        return lane + self.is_ahead(claim, now)

    def is_ahead(self, claim: Claim, now: float) -> bool:
        """Whether this policy lets the claim wait for others, because no chunk needs it yet."""
        return (
            self.blocking_first and claim.demanded and claim.needed_at is not None and claim.needed_at > now
        )


def _chunk(claim: Claim) -> float:
    return claim.chunk


def least_work_left(stretch: int = STRETCH) -> Policy:
    """Order requests by when they are due on the work clock: `mark + stretch * left_patches`."""
    return Policy(
        name="least-work-left",
        request_key=lambda request: request.mark + stretch * request.left_patches,
        claim_key=_chunk,
        blocking_first=True,
    )


LEAST_WORK_LEFT = least_work_left()

# What others do or might do, for the simulator.
FIRST_COME = Policy("first-come", request_key=lambda request: request.number, claim_key=_chunk)
EARLIEST_NEED = Policy(
    "earliest-need",
    request_key=lambda _: 0,
    claim_key=lambda claim: claim.needed_at if claim.needed_at is not None else float("-inf"),
)
CHUNK_FIRST = Policy("chunk-first", request_key=lambda _: 0, claim_key=_chunk)

POLICIES = (FIRST_COME, EARLIEST_NEED, CHUNK_FIRST, LEAST_WORK_LEFT)
