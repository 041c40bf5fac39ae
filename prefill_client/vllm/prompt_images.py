"""The images of a request that a gate watches: where their tokens lie, which are held for it, since when it waits."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from time import monotonic
from typing import Any, Generic, Protocol, TypeVar

from prefill_client.vllm.counts import Counts


class Position(Protocol):
    """Where an image's tokens lie: vLLM's `PlaceholderRange`."""

    offset: int
    length: int

    def get_num_embeds(self) -> int:
        """How many of them are rows."""


class Feature(Protocol):
    """An image of a request: vLLM's `MultiModalFeatureSpec`."""

    data: Any
    modality: str
    identifier: str
    mm_position: Position


class Request(Protocol):
    """What we read of vLLM's `Request`."""

    request_id: str
    mm_features: Sequence[Feature]
    ec_transfer_params: dict[str, Any] | None
    cache_salt: str | None


@dataclass(frozen=True, slots=True)
class Span:
    """Tokens `[begin, end)` of a prompt, filled by the rows of an image."""

    begin: int
    end: int
    index: int  # among the request's multimodal features
    identifier: str
    rows: int


AnySpan = TypeVar("AnySpan", bound=Span)


@dataclass(slots=True, kw_only=True)
class PromptImages(Generic[AnySpan]):
    """The images of a request that are a gate's concern, in the order of the prompt."""

    spans: list[AnySpan]
    features: int  # how many the request had when it was read
    held: dict[int, AnySpan] = field(default_factory=dict)  # what the table keeps for it, by index
    parked_s: float = 0.0  # since when, on the steady clock; 0: it is not

    @property
    def end(self) -> int:
        """The token behind its last image."""
        return self.spans[-1].end if self.spans else 0

    def note_wait(self, counts: Counts, *, ready: bool) -> None:
        """Park the request, or count how long it was parked."""
        if not ready:
            self.parked_s = self.parked_s or monotonic()
        elif self.parked_s:
            counts.waited(monotonic() - self.parked_s)
            self.parked_s = 0.0
