"""The offset of a server's monotonic clock from ours: estimated from one call, with a bound on the error."""

from dataclasses import dataclass
from typing import Self


@dataclass(frozen=True, slots=True)
class ServerClock:
    """`offset_s` is theirs minus ours, within `error_s`, however unequal the times of request and answer were."""

    offset_s: float
    error_s: float
    estimated_at_s: float

    @classmethod
    def estimate(cls, asked_s: float, their_s: float, heard_s: float) -> Self:
        """Return the estimate from one call: its start and end on our clock, between which theirs was read."""
        return cls(their_s - (asked_s + heard_s) / 2, (heard_s - asked_s) / 2, heard_s)

    def ours(self, their_s: float) -> float:
        """Convert a time of their clock to ours, `time.monotonic`."""
        return their_s - self.offset_s
