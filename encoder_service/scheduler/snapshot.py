"""The snapshot: what is queued at one moment."""

from dataclasses import dataclass

from encoder_service.scheduler.task import State


@dataclass(frozen=True, slots=True)
class Snapshot:
    """The queue at one moment, for metrics: images and patches by state and class, and the totals."""

    images: dict[tuple[State, bool], int]  # (state, demanded) -> images
    patches: dict[tuple[State, bool], int]
    source_bytes: int
    requests: int
    claims: int
    clients: int
    patches_per_s: float
