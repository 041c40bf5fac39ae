"""Prompts for an LLM engine, and its answers, which can be compared."""

import base64
from collections.abc import Iterable
from dataclasses import dataclass

Part = str | bytes
"""Text, or an image file."""


@dataclass(frozen=True)
class Answer:
    """The tokens of an answer, the top log-probabilities of each step, and why it ended."""

    tokens: tuple[int, ...]
    top: tuple[dict[int, float], ...]
    reason: str

    def distance(self, other: "Answer") -> float:
        """Return the largest difference between log-probabilities that both have; infinite for other tokens."""
        if self.tokens != other.tokens:
            return float("inf")
        steps = zip(self.top, other.top, strict=True)
        return max(
            abs(ours[token] - theirs[token]) for ours, theirs in steps for token in ours.keys() & theirs
        )


def images_in(parts: Iterable[Part]) -> set[bytes]:
    """Return the different images of a prompt."""
    return {part for part in parts if isinstance(part, bytes)}


def data_url(data: bytes) -> str:
    """Return an image as a data URL."""
    return "data:image/png;base64," + base64.b64encode(data).decode()
