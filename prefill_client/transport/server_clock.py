"""How a server's steady clock relates to ours: one estimate from one question, with the bound of its error."""

from dataclasses import dataclass
from typing import Self


@dataclass(frozen=True, slots=True)
class ServerClock:
    """`offset_s` is theirs minus ours; wrong by at most `error_s`, however unequal the two ways are."""

    offset_s: float
    error_s: float
    estimated_at_s: float

    @classmethod
    def estimate(cls, asked_s: float, their_s: float, heard_s: float) -> Self:
        """Return the estimate of one question, asked and heard on our clock: they answered somewhere between."""
        return cls(their_s - (asked_s + heard_s) / 2, (heard_s - asked_s) / 2, heard_s)

    def ours(self, their_s: float) -> float:
        """Return a moment of their clock on ours, `time.monotonic`."""
        return their_s - self.offset_s
