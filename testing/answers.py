"""What an LLM engine was asked and what it answered, so that two answers can be compared."""

import base64
from dataclasses import dataclass

Part = str | bytes
"""Text, or an image file."""


@dataclass(frozen=True)
class Answer:
    """What a request ended with."""

    tokens: tuple[int, ...]
    top: tuple[dict[int, float], ...]
    reason: str

    def distance(self, other: "Answer") -> float:
        """The largest difference of a log-probability that both have among their five; infinite for other tokens."""
        if self.tokens != other.tokens:
            return float("inf")
        steps = zip(self.top, other.top, strict=True)
        return max(
            abs(ours[token] - theirs[token]) for ours, theirs in steps for token in ours.keys() & theirs
        )


def data_url(data: bytes) -> str:
    """An image file in a URL."""
    return "data:image/png;base64," + base64.b64encode(data).decode()
