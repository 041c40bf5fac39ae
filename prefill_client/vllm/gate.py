"""Tells the scheduler whether a request may prefill now: whether the images of its next step are ready.

A request waits only for the images of its next step. With the cache manager, it waits only for the image of its very
next token, and for a moment for images that the service has already encoded, since it would need one more step without
them. Images of later steps are fetched in the meantime.
"""

import logging
from bisect import bisect_right
from collections.abc import Callable
from dataclasses import dataclass, field
from itertools import accumulate, takewhile
from math import inf
from time import monotonic

from encoder_contract.errors import EncoderError, InvalidRequestError, ModelMismatchError
from encoder_contract.geometry import Grid, rows_of_grid
from encoder_contract.turns import Place, Room
from prefill_client.transport.connection import Description
from prefill_client.vllm.counts import Counts
from prefill_client.vllm.features import Feature, TowerInput, VllmRequest, grid_of
from prefill_client.vllm.image_name import (
    UNKNOWN_NAME,
    ImageName,
    NameSigner,
    RequestInfo,
    producer_of,
    salt_of,
)
from prefill_client.vllm.row_fetcher import NEW_WEIGHTS, FetchQuery, when_needed
from prefill_client.vllm.row_table import RowTable
from prefill_client.vllm.vllm_settings import Gating

_log = logging.getLogger("vllm.encoder_service")
# A request that could prefill a few tokens waits at most this long, about a step, for images that the service has
# already encoded. Over a slow network, it then continues with the images that have arrived.
SOON_S = 0.02


@dataclass(frozen=True, slots=True)
class ImageSpan:
    """Tokens `[begin, end)` of a prompt, filled by the rows of an image."""

    begin: int
    end: int
    index: int  # among the request's multimodal features
    feature: Feature
    rows: int
    name: ImageName

    @classmethod
    def of(cls, index: int, feature: Feature, name: ImageName) -> "ImageSpan":
        """Return the span of feature number `index` of a request."""
        position = feature.mm_position
        begin, end = position.offset, position.offset + position.length
        return cls(begin, end, index, feature, position.get_num_embeds(), name)

    @property
    def identifier(self) -> str:
        """The key of the image in vLLM's encoder cache and in our table."""
        return self.feature.identifier


@dataclass(slots=True, kw_only=True)
class PromptImages:
    """The named images of a request, in the order of its prompt."""

    features: int  # number of multimodal features when the request was read
    tokens: int
    info: RequestInfo
    tenant_salt: str
    fingerprint: bytes  # of the weights whose rows its names stand for
    spans: list[ImageSpan] = field(default_factory=list)
    held: dict[int, ImageSpan] = field(default_factory=dict)  # images that the table holds for it, by index
    parked_s: float = 0.0  # when its wait began, on the steady clock; 0: it does not wait
    waits_soon: bool = False  # whether it stops to wait after `SOON_S`, even if no rows arrive
    stored: set[int] = field(default_factory=set)  # indexes of images that the service has encoded
    needs_rows: int = 0  # the most rows that it needs in host memory at the same time
    place: Place | None = None  # for these rows; None: it does not ask for them

    @property
    def end(self) -> int:
        """The token after its last image."""
        return self.spans[-1].end if self.spans else 0

    def remaining(self, computed: int) -> list[ImageSpan]:
        """Return the images that end after the first `computed` tokens."""
        return self.spans[bisect_right(self.spans, computed, key=lambda span: span.end) :]

    def in_reach(self, computed: int) -> list[ImageSpan]:
        """Return the next images, in order, as many as fit the rows that it reserves."""
        remaining = self.remaining(computed)
        sums = accumulate(span.rows for span in remaining)
        return [span for span, rows in zip(remaining, sums, strict=True) if rows <= self.needs_rows]

    def note_wait(self, counts: Counts, *, ready: bool) -> None:
        """Begin a wait, or count the one that has ended."""
        if not ready:
            self.parked_s = self.parked_s or monotonic()
        elif self.parked_s:
            counts.waited(monotonic() - self.parked_s)
            self.parked_s = 0.0


class PrefillGate:
    """The requests whose images a table holds. A failed image ends its request. For the scheduler's thread.

    Host memory is reserved for a request before its images are fetched, so their rows have space to arrive.
    """

    def __init__(
        self, table: RowTable, signer: NameSigner, counts: Counts, *, description: Callable[[], Description | None],
        may_fetch: Callable[[], bool], tower: TowerInput, tenant_salt: str, window_tokens: int, capacity_rows: int,
        gating: Gating, in_one_step: bool = False,
    ) -> None:  # fmt: skip
        """Make a gate without requests.

        `description` returns that of the service whose rows the engine takes, None before it was joined. `may_fetch`
        returns whether it takes rows now. `tower` describes the input of the engine's own tower, `window_tokens` is the
        most that one step prefills, and `capacity_rows` is the size of host memory.
        `in_one_step`: no wait for an image divides a prompt that one step can prefill.
        """
        self._table = table
        self._signer = signer
        self._counts = counts
        self._description = description
        self._may_fetch = may_fetch
        self._tower = tower
        self._tenant_salt = tenant_salt
        self._window_tokens = window_tokens
        self._gating = gating
        self._in_one_step = in_one_step
        self._room = Room(capacity_rows)  # requests have no holder: first come, first served
        self._prompts: dict[str, PromptImages] = {}
        self._failed: dict[str, EncoderError] = {}
        self.exact = False
        """Whether our cache manager ends each step before the first image that has not arrived."""

    def may_prefill(self, request: VllmRequest, computed: int) -> bool:
        """Whether `request`, whose first `computed` tokens are prefilled, may be scheduled in this step."""
        description = self._description()
        if description is None and any(
            self._signer.is_identifier(each.identifier) for each in request.mm_features
        ):
            return False  # the middleware joined the service before this process did
        request_id = request.request_id
        prompt = self._prompts.get(request_id)
        if prompt is None or prompt.features != len(request.mm_features):
            self.finished(request_id)  # a session that continues with more images
            prompt = self._prompts[request_id] = self._read(request)
        if computed >= prompt.end:
            # Another request may have prefilled its images while it waited.
            prompt.note_wait(self._counts, ready=True)
            self._release_all(request_id, prompt)
            return request_id not in self._failed
        self._collect()
        if description is not None and prompt.fingerprint != description.model_fingerprint:
            self._fail(request_id, ModelMismatchError(NEW_WEIGHTS))
        prompt.waits_soon = False
        may_run = request_id not in self._failed and self._may_fetch()
        ready = may_run and self._is_ready(request_id, prompt, computed)
        prompt.note_wait(self._counts, ready=ready)
        return ready

    def awaits(self, identifier: str) -> bool:
        """Whether this is a named image whose rows have not arrived."""
        return self._signer.is_identifier(identifier) and not self._table.is_here(identifier)

    def prefilled(self, request_id: str, index: int) -> None:
        """Note that the request has prefilled its image number `index`."""
        if prompt := self._prompts.get(request_id):
            prompt.stored.add(index)  # the request may need it again after a preemption
            self._release(request_id, prompt, index)

    def finished(self, request_id: str) -> None:
        """Note that the request has ended, in any way."""
        self._failed.pop(request_id, None)
        prompt = self._prompts.pop(request_id, None)
        if prompt is not None:
            self._release_all(request_id, prompt)

    def failed(self) -> set[str]:
        """Return the requests that must end with an error. They are returned until `finished` is called for them."""
        self._collect()
        return set(self._failed)

    def parked_for_s(self, requests: int) -> float | None:
        """Return how long all requests of the engine wait if no rows arrive, in seconds; None if one does not wait.

        `requests` is their number.
        """
        parked = [
            prompt
            for request_id, prompt in self._prompts.items()
            if prompt.parked_s and request_id not in self._failed
        ]
        if not parked or len(parked) != requests:
            return None
        now_s = monotonic()
        ends_s = (prompt.parked_s + SOON_S for prompt in parked if prompt.waits_soon)
        return max(0.0, min(ends_s, default=inf) - now_s)

    def _collect(self) -> None:
        for (request_id, index), error in self._table.collect():
            self._fail(request_id, error.about(f"image {index}", index))

    def _fail(self, request_id: str, error: EncoderError) -> None:
        if request_id not in self._failed:
            _log.warning("request %s ends with an error: %s", request_id, error.message)
            self._failed[request_id] = error

    def _read(self, request: VllmRequest) -> PromptImages:
        """Return the named images of a request; one with a false claim ends the request."""
        salt = salt_of(self._tenant_salt, request.cache_salt)
        description = self._description()
        info = RequestInfo.read(request.ec_transfer_params, request.request_id)
        names = self._signer.names(info.images[: len(request.mm_features)])  # a caller may send a million
        prompt = PromptImages(
            features=len(request.mm_features),
            tokens=request.num_prompt_tokens,
            info=info,
            tenant_salt=salt,
            fingerprint=description.model_fingerprint if description else b"",
            stored=set(info.stored),
        )
        try:
            if names and not any(self._signer.is_identifier(each.identifier) for each in request.mm_features):
                raise InvalidRequestError(f"image 0: {UNKNOWN_NAME}")
            for index, feature in enumerate(request.mm_features):
                if self._signer.is_identifier(feature.identifier):
                    name = self._signer.name(feature.identifier, names)
                    if description is None or name is None or name.producer != producer_of(description, salt):
                        raise InvalidRequestError(f"image {index}: {UNKNOWN_NAME}")
                    prompt.spans.append(self._span(index, feature, description, name))
                else:
                    self._tower.check(index, feature)
            prompt.needs_rows = self._most_rows(prompt)
        except InvalidRequestError as error:
            prompt.spans.clear()
            self._fail(request.request_id, error)
        return prompt

    def _is_ready(self, request_id: str, prompt: PromptImages, computed: int) -> bool:
        if not self._admit(prompt):
            return False
        self._hold(request_id, prompt, computed)
        return all(self._table.is_here(span.identifier) for span in self._needed(prompt, computed))

    def _span(self, index: int, feature: Feature, description: Description, name: ImageName) -> ImageSpan:
        """Return the span of a named image, after checking everything that the engine would rely on."""
        span, rows = ImageSpan.of(index, feature, name), rows_of_grid(name.grid, description.geometry)
        grid: Grid | None = name.grid
        if description.geometry is None:  # a stand-in, or another image from a caller who knows the name
            self._tower.check(index, feature)
        elif feature.data is None or set(feature.data) != {"image_grid_thw"}:
            raise InvalidRequestError(f"image {index} has a name of the service and also data")
        else:
            grid = grid_of(feature, "image_grid_thw")
        if grid != name.grid or span.rows != rows:
            raise InvalidRequestError(
                f"image {index} was submitted with grid {tuple(name.grid)} and {rows} rows, but the request claims "
                f"grid {grid and tuple(grid)} and {span.rows} rows"
            )
        return span

    def _most_rows(self, prompt: PromptImages) -> int:
        """Return twice the most rows that one step can need, to fetch ahead, but at most the rows of all images."""
        total = most = sum(span.rows for span in prompt.spans)
        if self._gating == "window":
            steps = (self._window(prompt, span.end - 1) for span in prompt.spans)
            most = max((sum(span.rows for span in step) for step in steps), default=0)
        if most > self._room.size:
            raise InvalidRequestError(
                f"one prefill step needs {most} image rows, but host_gib holds only {self._room.size}"
            )
        return min(2 * most, total, self._room.size)

    def _window(self, prompt: PromptImages, computed: int) -> list[ImageSpan]:
        """Return the images that the next step may touch, which begins at token `computed`."""
        end = computed + self._window_tokens
        return list(takewhile(lambda span: span.begin < end, prompt.remaining(computed)))

    def _needed(self, prompt: PromptImages, computed: int) -> list[ImageSpan]:
        """Return the images that the next token needs, and the images that are worth a short wait."""
        if self._gating == "request":
            return prompt.remaining(computed)
        images = self._window(prompt, computed)
        if not self.exact or (self._in_one_step and prompt.tokens - computed <= self._window_tokens):
            return images
        is_soon = not prompt.parked_s or monotonic() - prompt.parked_s < SOON_S
        soon = prompt.stored if is_soon else set()
        prompt.waits_soon = bool(soon)
        return [
            *takewhile(
                lambda span: (
                    span.begin <= computed or span.index in soon or self._table.is_here(span.identifier)
                ),
                images,
            )
        ]

    def _admit(self, prompt: PromptImages) -> bool:
        """Reserve host memory, in turn, for everything that a step of the request can need.

        The rows that it waits for then have space to arrive, no matter what other requests hold.
        """
        if prompt.place is None:
            prompt.place = Place(self._room, "", prompt.needs_rows)
            self._room.line_up(prompt.place)
        return prompt.place.is_taken

    def _hold(self, request_id: str, prompt: PromptImages, computed: int) -> None:
        """Hold the images of the next step, and later ones as far as rows are reserved; release all others.

        The others are prefilled, or were fetched ahead before a preemption and must make space for earlier images.
        """
        images = prompt.in_reach(computed)
        for index in prompt.held.keys() - {span.index for span in images}:
            self._release(request_id, prompt, index)
        for span in images:
            if span.index in prompt.held:
                continue
            chunk, needed_in_ms = when_needed(span.begin - computed, self._window_tokens)
            query = FetchQuery(
                span.name,
                span.rows,
                prompt.info,
                prompt.tenant_salt,
                chunk=chunk,
                needed_in_ms=needed_in_ms,
                submitted_to="".join(prompt.info.submitted_to[span.index : span.index + 1]),
                fingerprint=prompt.fingerprint,
            )
            prompt.held[span.index] = span
            self._table.hold(span.identifier, (request_id, span.index), query)

    def _release(self, request_id: str, prompt: PromptImages, index: int) -> None:
        if span := prompt.held.pop(index, None):
            self._table.release(span.identifier, (request_id, index))

    def _release_all(self, request_id: str, prompt: PromptImages) -> None:
        for index in list(prompt.held):
            self._release(request_id, prompt, index)
        if prompt.place is not None:
            prompt.place.release()
            prompt.place = None
