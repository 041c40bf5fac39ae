"""The policy: which of the images that could be worked on next comes first. The server uses `LEAST_WORK_LEFT`."""

import math
from collections.abc import Callable
from dataclasses import dataclass

from encoder_service.scheduler.task import MAX_PRIORITY, Claim, Request

# The larger it is, the more later arrivals may overtake a request: faster on average, slower for big requests.
# Chosen by simulation, as is the shape of the curve: docs/scheduling.md.
STRETCH = 15

SPECULATIVE_LANE = 64  # lanes below are demanded: two (blocking, ahead of need) for each of 17 priorities
LAST_LANE = 2 * SPECULATIVE_LANE


@dataclass(frozen=True, slots=True)
class Policy:
    """An order over the claims of one holder: by lane, then by request, then by claim; the smallest first.

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

    @staticmethod
    def is_demanded(lane: int) -> bool:
        """Whether claims in this lane are demanded; otherwise they are speculative."""
        return lane < SPECULATIVE_LANE

    def is_ahead(self, claim: Claim, now: float) -> bool:
        """Whether this policy ranks the claim behind blocking ones, because no chunk needs it yet."""
        return (
            self.blocking_first and claim.demanded and claim.needed_at is not None and claim.needed_at > now
        )


def _chunk(claim: Claim) -> float:
    return claim.chunk


def allowance(left_patches: int, scale_patches: float, stretch: float = STRETCH) -> float:
    """Return how many patches may be encoded before a request with so much work left is due.

    `stretch` times its work for a small request, growing only logarithmically for one much larger than
    `scale_patches`, so that the largest requests do not bear the whole cost. At most `stretch * left_patches`.
    """
    if not scale_patches:
        return stretch * left_patches
    return stretch * scale_patches * math.log1p(left_patches / scale_patches)


def least_work_left(stretch: float = STRETCH) -> Policy:
    """Order requests by when they are due on the work clock: `mark + allowance(work left)`."""
    return Policy(
        name="least-work-left",
        request_key=lambda request: request.mark + allowance(request.left_patches, request.scale, stretch),
        claim_key=_chunk,
        blocking_first=True,
    )


LEAST_WORK_LEFT = least_work_left()
