"""Decides, for the scheduler, whether a request may prefill now: the images of its next step are here, or they are not.

`NamedGate` is for an engine whose images the service encodes. A request is parked only for the images of its next step,
and with the cache manager only for one that its very next token belongs to, or for a moment for those that the service
has encoded already: it would need one more step without them. Images behind the next step are fetched meanwhile.

`SharingGate` is for an engine that encodes itself and shares rows. A request waits until it is decided of every image
of its next step who makes its rows, and until those are here that another engine makes. None of this ends a request: an
image that the store does not answer for is encoded by the engine.
"""

import logging
from abc import ABC, abstractmethod
from bisect import bisect_right
from collections.abc import Callable, Container
from dataclasses import dataclass, field
from itertools import accumulate, takewhile
from time import monotonic
from typing import Any, Generic, TypeVar

from encoder_contract.errors import EncoderError, InvalidRequestError
from encoder_contract.geometry import Grid
from prefill_client.transport.connection import Description
from prefill_client.vllm.counts import Counts
from prefill_client.vllm.image_name import ImageName, NameSigner, is_ours, producer_of, salt_of
from prefill_client.vllm.prompt_images import (
    AnySpan,
    Feature,
    PromptImages,
    Request,
    Span,
    TowerInput,
    grid_of,
)
from prefill_client.vllm.request_images import caller_of, stored_of, submitted_to_of
from prefill_client.vllm.row_fetcher import Caller, Wanted
from prefill_client.vllm.row_table import FetchTable, RowTable, SharedTable
from prefill_client.vllm.settings import Gating
from prefill_client.vllm.shared_store import Asked

_log = logging.getLogger("vllm.encoder_service")
# For "how soon are the rows needed" of images behind the next step: a guess that only orders the service's work.
_PREFILL_TOKENS_PER_S = 8000
# How long a request waits, at most, for images that the service has encoded, though it could prefill the few tokens
# before them: about a step. Over a slow network it then goes on with what is here.
SOON_S = 0.02
# How long a request that waits for another engine's images keeps others from making those that it has the lease of. Two
# engines may wait for each other: each has the image that the other needs first.
LEASE_PATIENCE_S = 1.0


@dataclass(frozen=True, slots=True)
class NamedSpan(Span):
    """The tokens of an image that the service encodes."""

    name: ImageName


@dataclass(frozen=True, slots=True)
class SharedSpan(Span):
    """The tokens of an image that can be shared."""

    feature: Feature
    grid: Grid


@dataclass(slots=True, kw_only=True)
class Prompt(PromptImages[NamedSpan]):
    """A request with images that the service encodes."""

    caller: Caller
    stored: set[int] = field(default_factory=set)  # images that the service has encoded, by index
    submitted_to: list[str] = field(default_factory=list)  # the server of each image
    needs_rows: int = 0  # in host memory at once, at most
    reserved_rows: int = 0  # what is set apart for it; 0: not admitted


@dataclass(slots=True, kw_only=True)
class SharedPrompt(PromptImages[SharedSpan]):
    """A request with images that can be shared."""

    cache_salt: str
    others: list[Feature]  # what cannot be shared


AnyPrompt = TypeVar("AnyPrompt", bound=PromptImages[Any])


class Gate(ABC, Generic[AnyPrompt]):
    """The requests whose images a table holds. For the scheduler's thread."""

    def __init__(
        self, table: RowTable[Any], counts: Counts, *, tower: TowerInput, window_tokens: int, gating: Gating
    ) -> None:  # fmt: skip
        """`tower` is what the engine's own takes, `window_tokens` what one step prefills at most."""
        self._table = table
        self._counts = counts
        self._tower = tower
        self._window_tokens = window_tokens
        self._gating = gating
        self._prompts: dict[str, AnyPrompt] = {}
        self._failed: dict[str, EncoderError] = {}

    def may_prefill(self, request: Request, computed: int) -> bool:
        """Whether `request`, whose first `computed` tokens are done, may be scheduled in this step."""
        request_id = request.request_id
        prompt = self._prompts.get(request_id)
        if prompt is None or prompt.features != len(request.mm_features):
            self.finished(request_id)  # a session that goes on with more images
            prompt = self._prompts[request_id] = self._read(request)
        if computed >= prompt.end:
            self._release(request_id, prompt)
            return request_id not in self._failed
        self._take_in()
        ready = request_id not in self._failed and self._is_ready(request_id, prompt, computed)
        prompt.note_wait(self._counts, ready=ready)
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
        """Return the requests that cannot go on, until `finished` is told of them."""
        self._take_in()
        return set(self._failed)

    @abstractmethod
    def _read(self, request: Request) -> AnyPrompt:
        """Find the images of a request that are this gate's concern; end a request that cannot be served."""

    @abstractmethod
    def _is_ready(self, request_id: str, prompt: AnyPrompt, computed: int) -> bool:
        """Hold what the next steps need; return whether the next step has all that it needs."""

    def _drop(self, request_id: str, prompt: AnyPrompt, index: int) -> None:
        if span := prompt.held.pop(index, None):
            self._table.drop(span.identifier, (request_id, index))

    def _release(self, request_id: str, prompt: AnyPrompt) -> None:
        for index in list(prompt.held):
            self._drop(request_id, prompt, index)

    def _take_in(self) -> None:
        for (request_id, index), error in self._table.collect():
            self._fail(request_id, type(error)(f"image {index}: {error.message}"))

    def _fail(self, request_id: str, error: EncoderError) -> None:
        if request_id not in self._failed:
            _log.warning("request %s ends with an error: %s", request_id, error.message)
            self._failed[request_id] = error

    def _window(self, prompt: PromptImages[AnySpan], computed: int, steps: int = 1) -> list[AnySpan]:
        """Return the images that so many steps, the first of which begins at token `computed`, may touch."""
        end = computed + steps * self._window_tokens
        return list(takewhile(lambda span: span.begin < end, _left(prompt, computed)))


class NamedGate(Gate[Prompt]):
    """For an engine whose images the service encodes: each has a signed name, and an image that fails ends its request.

    Host memory is set apart for a request before its images are fetched, so that what it waits for has room to arrive.
    """

    def __init__(
        self, table: FetchTable, signer: NameSigner, counts: Counts, *, description: Callable[[], Description | None],
        tower: TowerInput, tenant_salt: str, window_tokens: int, capacity_rows: int, gating: Gating,
    ) -> None:  # fmt: skip
        """`description` is the service's, None before it is joined; `capacity_rows` is what fits into host memory."""
        super().__init__(table, counts, tower=tower, window_tokens=window_tokens, gating=gating)
        self._signer = signer
        self._description = description
        self._tenant_salt = tenant_salt
        self._merged_patches = tower.merge**2
        self._free_rows = self._capacity_rows = capacity_rows
        # Requests that wait for host memory, in the order in which they came.
        self._line: dict[str, None] = {}
        self.exact = False
        """Whether a cache manager of ours ends each step before the first image that is not here."""

    def may_prefill(self, request: Request, computed: int) -> bool:
        """Whether `request`, whose first `computed` tokens are done, may be scheduled in this step."""
        if self._description() is None and any(is_ours(each.identifier) for each in request.mm_features):
            return False  # the middleware has found the service before this process has
        return super().may_prefill(request, computed)

    def is_here(self, identifier: str) -> bool:
        """Whether an image of ours can be loaded."""
        return self._table.is_here(identifier)

    def passed(self, request_id: str, index: int) -> None:
        """The request is done with its image number `index`."""
        if prompt := self._prompts.get(request_id):
            prompt.stored.add(index)  # should a preemption have it asked for again
        super().passed(request_id, index)

    def finished(self, request_id: str) -> None:
        """The request has ended, in whatever way."""
        self._line.pop(request_id, None)
        super().finished(request_id)

    def _read(self, request: Request) -> Prompt:
        """Find our images in a request; one that is not what it claims to be ends it."""
        request_id, spans = request.request_id, []
        salt = salt_of(self._tenant_salt, request.cache_salt)
        description = self._description()
        producer = producer_of(description, salt) if description else None
        try:
            for index, feature in enumerate(request.mm_features):
                if is_ours(feature.identifier):
                    spans.append(self._span(index, feature, producer))
                else:
                    self._tower.check(index, feature)
            said = request.ec_transfer_params
            prompt = Prompt(
                spans=spans,
                features=len(request.mm_features),
                caller=caller_of(said, request_id=request_id, tenant_salt=salt),
                stored=stored_of(said),
                submitted_to=submitted_to_of(said),
            )
            prompt.needs_rows = self._most_rows(prompt)
        except InvalidRequestError as error:
            prompt = Prompt(spans=[], features=len(request.mm_features), caller=Caller())
            self._fail(request_id, error)
        return prompt

    def _is_ready(self, request_id: str, prompt: Prompt, computed: int) -> bool:
        if not self._admit(request_id, prompt):
            return False
        self._hold(request_id, prompt, computed)
        return all(self._table.is_here(span.identifier) for span in self._needed(prompt, computed))

    def _span(self, index: int, feature: Feature, producer: bytes | None) -> NamedSpan:
        """Check an image that has a name of ours against all that the engine would believe of it."""
        name, position = self._signer.name(feature.identifier), feature.mm_position
        if name is None or name.producer != producer:
            raise InvalidRequestError(f"image {index} has a name that this engine's middleware did not sign")
        if feature.data is None or set(feature.data) != {"image_grid_thw"}:
            raise InvalidRequestError(f"image {index} has both a signed name and data of its own")
        grid = grid_of(feature, "image_grid_thw")
        rows = name.grid.patches // self._merged_patches
        if grid != name.grid or position.get_num_embeds() != rows:
            raise InvalidRequestError(
                f"image {index} was submitted with grid {tuple(name.grid)} and {rows} rows, but the request claims "
                f"grid {grid and tuple(grid)} and {position.get_num_embeds()} rows"
            )
        begin, end = position.offset, position.offset + position.length
        return NamedSpan(begin, end, index, feature.identifier, rows, name)

    def _most_rows(self, prompt: Prompt) -> int:
        """Return how many rows one step can need at once, and as many again to fetch ahead, but not more than all."""
        rows = [span.rows for span in prompt.spans]
        most = sum(rows)
        if self._gating == "window":
            steps = (self._window(prompt, span.end - 1) for span in prompt.spans)
            most = max((sum(span.rows for span in step) for step in steps), default=0)
        if most > self._capacity_rows:
            raise InvalidRequestError(
                f"one prefill step needs {most} image rows, but host_gib holds only {self._capacity_rows}"
            )
        return min(2 * most, sum(rows), self._capacity_rows)

    def _needed(self, prompt: Prompt, computed: int) -> list[NamedSpan]:
        """Return the images without which nothing can be prefilled, and those for whose sake nothing should be yet."""
        if self._gating == "request":
            return _left(prompt, computed)
        window = self._window(prompt, computed)
        if not self.exact:
            return window
        soon = prompt.stored if not prompt.parked_s or monotonic() - prompt.parked_s < SOON_S else set()
        return [
            *takewhile(
                lambda span: (
                    span.begin <= computed or span.index in soon or self._table.is_here(span.identifier)
                ),
                window,
            )
        ]

    def _admit(self, request_id: str, prompt: Prompt) -> bool:
        """Set host memory apart for all that a step of the request can need. First come, first served.

        So whatever is being waited for has room to arrive, whatever others hold.
        """
        if prompt.reserved_rows:
            return True
        self._line.setdefault(request_id)
        if next(iter(self._line)) != request_id or prompt.needs_rows > self._free_rows:
            return False
        del self._line[request_id]
        prompt.reserved_rows = prompt.needs_rows
        self._free_rows -= prompt.reserved_rows
        return True

    def _hold(self, request_id: str, prompt: Prompt, computed: int) -> None:
        """Hold the images of the next step, and as many behind it as were set apart; let go of all others.

        Those are done, or were fetched ahead before a preemption: images before them are wanted again, in their place.
        """
        run = _in_reach(prompt, computed)
        for index in prompt.held.keys() - {span.index for span in run}:
            self._drop(request_id, prompt, index)
        for span in run:
            if span.index in prompt.held:
                continue
            ahead = max(0, span.begin - computed - self._window_tokens)
            wanted = Wanted(
                span.name,
                span.rows,
                prompt.caller,
                chunk=(max(0, span.begin - computed)) // self._window_tokens,
                needed_in_ms=1000 * ahead // _PREFILL_TOKENS_PER_S,
                submitted_to="".join(prompt.submitted_to[span.index : span.index + 1]),
            )
            prompt.held[span.index] = span
            self._table.hold(span.identifier, (request_id, span.index), wanted)

    def _release(self, request_id: str, prompt: Prompt) -> None:
        super()._release(request_id, prompt)
        self._free_rows += prompt.reserved_rows
        prompt.reserved_rows = 0


class SharingGate(Gate[SharedPrompt]):
    """For an engine that encodes itself and shares rows."""

    _table: SharedTable

    def __init__(
        self, table: SharedTable, counts: Counts, *, tower: TowerInput, window_tokens: int, gating: Gating
    ) -> None:  # fmt: skip
        super().__init__(table, counts, tower=tower, window_tokens=window_tokens, gating=gating)
        self.encoder_cache: Container[str] = ()
        """The images whose rows vLLM's own encoder cache holds: no step loads or encodes them."""

    def _read(self, request: Request) -> SharedPrompt:
        """Find the images that can be shared; a part that the tower cannot encode ends its request."""
        prompt = SharedPrompt(
            spans=[], features=len(request.mm_features), cache_salt=request.cache_salt or "", others=[]
        )
        for index, feature in enumerate(request.mm_features):
            try:
                grid = self._tower.check(index, feature)
            except InvalidRequestError as error:
                # This role makes vLLM accept parts without pixels: with a wrong grid, one would end the engine.
                self._fail(request.request_id, error)
                continue
            if grid is None or feature.modality != "image":
                prompt.others.append(feature)
                continue
            position = feature.mm_position
            begin, end = position.offset, position.offset + position.length
            rows = position.get_num_embeds()
            prompt.spans.append(SharedSpan(begin, end, index, feature.identifier, rows, feature, grid))
        return prompt

    def _is_ready(self, request_id: str, prompt: SharedPrompt, computed: int) -> bool:
        self._check(request_id, prompt)
        if request_id in self._failed:
            return False
        self._hold(request_id, prompt, computed)
        ready = all(self._table.is_decided(span.identifier) for span in self._next(prompt, computed, steps=1))
        if not ready and prompt.parked_s and monotonic() - prompt.parked_s > LEASE_PATIENCE_S:
            for span in prompt.held.values():
                self._table.give_back(span.identifier)
        return ready

    def _next(self, prompt: SharedPrompt, computed: int, *, steps: int) -> list[SharedSpan]:
        """Return the images of so many next steps; all that are left where a request waits for all."""
        if self._gating == "request":
            return _left(prompt, computed)
        return self._window(prompt, computed, steps)

    def _check(self, request_id: str, prompt: SharedPrompt) -> None:
        """End a request that names an image as another: rows of the wrong number would end the engine."""
        counted = [(span.identifier, span.rows) for span in prompt.spans]
        counted += [(other.identifier, other.mm_position.get_num_embeds()) for other in prompt.others]
        for identifier, rows in counted:
            if self._table.clashes(identifier, rows):
                self._fail(request_id, InvalidRequestError(f"the uuid {identifier} stands for two images"))

    def _hold(self, request_id: str, prompt: SharedPrompt, computed: int) -> None:
        """Let go of images that are done; hold those of the next step, and of the one behind it.

        Those in vLLM's encoder cache are not held: the store would wait for rows that no tower makes.
        """
        for span in prompt.spans:
            if span.end <= computed:
                self._drop(request_id, prompt, span.index)
        for span in self._next(prompt, computed, steps=2):
            if span.index not in prompt.held and span.identifier not in self.encoder_cache:
                prompt.held[span.index] = span
                assert span.feature.data is not None
                asked = Asked(span.feature.data, prompt.cache_salt, span.grid, span.rows)
                self._table.hold(span.identifier, (request_id, span.index), asked)


def _left(prompt: PromptImages[AnySpan], computed: int) -> list[AnySpan]:
    """Return the images that do not end within the first `computed` tokens."""
    return prompt.spans[bisect_right(prompt.spans, computed, key=lambda span: span.end) :]


def _in_reach(prompt: Prompt, computed: int) -> list[NamedSpan]:
    """Return the next images without a gap, as many as what was set apart has room for."""
    left = _left(prompt, computed)
    sums = accumulate(span.rows for span in left)
    return [span for span, rows in zip(left, sums, strict=True) if rows <= prompt.reserved_rows]
