"""Decides, for a scheduler whose engine encodes itself, whether a request may prefill now.

It waits until it is decided of every image of its next step who makes its rows, and until those are here that somebody
else makes. Nothing of this ends a request: an image that the store does not answer for is encoded by the engine.
"""

import logging
from collections.abc import Container
from dataclasses import dataclass
from time import monotonic

from encoder_contract.errors import EncoderError, InvalidRequestError
from encoder_contract.geometry import Grid
from prefill_client.vllm.counts import Counts
from prefill_client.vllm.prompt_images import Feature, PromptImages, Request, Span, TowerInput
from prefill_client.vllm.settings import Gating
from prefill_client.vllm.shared_table import SharedTable
from prefill_client.vllm.store_session import Asked

_log = logging.getLogger("vllm.encoder_service")
# How long a request that waits for another engine's images keeps others from making those that it has the lease of. Two
# engines may wait for each other: each has the image that the other needs first.
LEASE_PATIENCE_S = 1.0


@dataclass(frozen=True, slots=True)
class _Span(Span):
    """The tokens of an image that can be shared."""

    feature: Feature
    grid: Grid


@dataclass(slots=True, kw_only=True)
class _Prompt(PromptImages[_Span]):
    """A request with such images."""

    cache_salt: str
    others: list[Feature]  # what cannot be shared


class SharingGate:
    """For the scheduler's thread."""

    def __init__(
        self, table: SharedTable, counts: Counts, *, tower: TowerInput, window_tokens: int, gating: Gating
    ) -> None:  # fmt: skip
        """`window_tokens` is what one step prefills at most."""
        self._table = table
        self._counts = counts
        self._tower = tower
        self._window_tokens = window_tokens
        self._gating = gating
        self._prompts: dict[str, _Prompt] = {}
        self._failed: dict[str, EncoderError] = {}
        self.encoder_cache: Container[str] = ()
        """The images whose rows vLLM's own encoder cache holds: no step loads or encodes them."""

    def may_prefill(self, request: Request, computed: int) -> bool:
        """Whether `request`, whose first `computed` tokens are done, may be scheduled in this step."""
        prompt = self._prompts.get(request.request_id)
        if prompt is None or prompt.features != len(request.mm_features):
            prompt = self._read(request)
        if computed >= prompt.end:
            self._release(request.request_id, prompt)
            return request.request_id not in self._failed
        self._table.take_in()
        self._check(request.request_id, prompt)
        if request.request_id in self._failed:
            return False
        self._hold(request.request_id, prompt, computed)
        windows = None if self._gating == "request" else 1
        needed = self._next(prompt, computed, windows)
        ready = all(self._table.is_decided(span.identifier) for span in needed)
        prompt.note_wait(self._counts, ready=ready)
        if not ready and monotonic() - prompt.parked_s > LEASE_PATIENCE_S:
            for span in prompt.held.values():
                self._table.give_back(span.identifier)
        return ready

    def passed(self, request_id: str, index: int) -> None:
        """The request is done with its image number `index`."""
        prompt = self._prompts.get(request_id)
        if prompt is not None:
            self._drop(request_id, prompt, index)

    def finished(self, request_id: str) -> None:
        """The request has ended, in whatever way."""
        self._failed.pop(request_id, None)
        prompt = self._prompts.pop(request_id, None)
        if prompt is not None:
            self._release(request_id, prompt)

    def failed(self) -> set[str]:
        """Return the requests that would end the engine, until `finished` is told of them."""
        self._table.take_in()
        return set(self._failed)

    def _read(self, request: Request) -> _Prompt:
        """Find the images that can be shared; a part that the tower cannot encode ends its request."""
        prompt = _Prompt(
            spans=[], features=len(request.mm_features), cache_salt=request.cache_salt or "", others=[]
        )
        self.finished(request.request_id)  # a session that goes on with more images
        self._prompts[request.request_id] = prompt
        for index, feature in enumerate(request.mm_features):
            try:
                grid = self._tower.check(index, feature)
            except InvalidRequestError as error:
                # This role makes vLLM accept parts without pixels: with a wrong grid, one would end the engine.
                self._fail(request.request_id, error.message)
                continue
            if (span := self._span(index, feature, grid)) is not None:
                prompt.spans.append(span)
            else:
                prompt.others.append(feature)
        return prompt

    def _fail(self, request_id: str, why: str) -> None:
        if request_id not in self._failed:
            _log.warning("request %s ends with an error: %s", request_id, why)
            self._failed[request_id] = InvalidRequestError(why)

    def _span(self, index: int, feature: Feature, grid: Grid | None) -> _Span | None:
        """Return where an image is; None for what is no image with a grid."""
        if grid is None or feature.modality != "image":
            return None
        position = feature.mm_position
        begin, end = position.offset, position.offset + position.length
        return _Span(begin, end, index, feature.identifier, position.get_num_embeds(), feature, grid)

    def _next(self, prompt: _Prompt, computed: int, windows: int | None) -> list[_Span]:
        """Return the images that the next steps touch, as many as prefill so many windows; None: all."""
        end = prompt.end if windows is None else computed + windows * self._window_tokens
        return [span for span in prompt.spans if span.end > computed and span.begin < end]

    def _check(self, request_id: str, prompt: _Prompt) -> None:
        """End a request that names an image as another: rows of the wrong number would end the engine."""
        counted = [(span.identifier, span.rows) for span in prompt.spans]
        counted += [(other.identifier, other.mm_position.get_num_embeds()) for other in prompt.others]
        for identifier, rows in counted:
            if self._table.clashes(identifier, rows):
                self._fail(request_id, f"the uuid {identifier} stands for two images")

    def _hold(self, request_id: str, prompt: _Prompt, computed: int) -> None:
        """Let go of images that are done; hold those of the next step, and of the one behind it.

        Those in vLLM's encoder cache are not held: the store would wait for rows that no tower makes.
        """
        for span in prompt.spans:
            if span.end <= computed:
                self._drop(request_id, prompt, span.index)
        for span in self._next(prompt, computed, None if self._gating == "request" else 2):
            if span.index not in prompt.held and span.identifier not in self.encoder_cache:
                prompt.held[span.index] = span
                assert span.feature.data is not None
                asked = Asked(span.feature.data, prompt.cache_salt, span.grid, span.rows)
                self._table.hold(span.identifier, (request_id, span.index), asked)

    def _drop(self, request_id: str, prompt: _Prompt, index: int) -> None:
        if span := prompt.held.pop(index, None):
            self._table.drop(span.identifier, (request_id, index))

    def _release(self, request_id: str, prompt: _Prompt) -> None:
        for index in list(prompt.held):
            self._drop(request_id, prompt, index)
