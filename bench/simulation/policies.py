"""The policies that the simulator compares: ours, and three that the server does not use."""

from encoder_service.scheduler import LEAST_WORK_LEFT, Claim, Policy


def _chunk(claim: Claim) -> float:
    return claim.chunk


FIRST_COME = Policy("first-come", request_key=lambda request: request.number, claim_key=_chunk)
EARLIEST_NEED = Policy(
    "earliest-need",
    request_key=lambda _: 0,
    claim_key=lambda claim: claim.needed_at if claim.needed_at is not None else float("-inf"),
)
CHUNK_FIRST = Policy("chunk-first", request_key=lambda _: 0, claim_key=_chunk)

POLICIES = (FIRST_COME, EARLIEST_NEED, CHUNK_FIRST, LEAST_WORK_LEFT)
