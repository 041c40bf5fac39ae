"""Prompt layout: where each image's tokens are, and which rows each prefill chunk needs."""

from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from encoder_contract.errors import InvalidRequestError

TokenIds = NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class Span:
    """The prompt tokens `[begin, end)` of image number `image`. Row r of the image is token begin + r."""

    image: int
    begin: int
    end: int

    @property
    def tokens(self) -> int:
        """Number of tokens of the image, equal to its number of rows."""
        return self.end - self.begin


@dataclass(frozen=True, eq=False)
class Layout:
    """A prompt in which every image is expanded to its tokens.

    `token_ids` is a read-only int64 array [tokens]. `spans` has one span per image, in prompt order, without overlap.
    """

    token_ids: TokenIds
    spans: tuple[Span, ...]

    def __post_init__(self) -> None:
        end = 0
        for number, span in enumerate(self.spans):
            assert span.image == number, "spans are numbered in prompt order"
            assert end <= span.begin < span.end <= self.tokens, "spans are disjoint and inside the prompt"
            end = span.end
        self.token_ids.setflags(write=False)

    @property
    def tokens(self) -> int:
        """Length of the prompt in tokens."""
        return len(self.token_ids)

    @property
    def image_tokens(self) -> int:
        """Number of tokens that belong to images."""
        return sum(span.tokens for span in self.spans)


def expand_prompt(
    token_ids: Sequence[int] | TokenIds, placeholder: int | Sequence[int], image_tokens: Sequence[int]
) -> Layout:
    """Return the layout of a prompt whose images are marked by `placeholder` tokens, in order.

    `token_ids` has the shape [tokens]. `placeholder` is one token id, or several that mark different kinds of images.
    `image_tokens` has the number of tokens of each image. The prompt has either one placeholder per image, as a chat
    template writes it, or one per image token, as a Hugging Face processor writes it. Raises `InvalidRequestError` if
    the placeholders fit neither form.
    """
    ids = np.array(token_ids, dtype=np.int64)
    if ids.ndim != 1:
        raise InvalidRequestError(f"token_ids must have one dimension, got an array of shape {ids.shape}")
    if any(tokens < 1 for tokens in image_tokens):
        raise InvalidRequestError(f"every image must have at least one token, got {list(image_tokens)}")
    places = np.flatnonzero(np.isin(ids, placeholder))
    if len(places) == len(image_tokens):
        return _expanded(ids, places, image_tokens)
    if len(places) != sum(image_tokens):
        raise InvalidRequestError(
            f"{len(places)} placeholders fit neither {len(image_tokens)} images (one each) "
            f"nor their {sum(image_tokens)} tokens"
        )
    return Layout(ids, _spans_of_runs(places, image_tokens))


def _expanded(ids: TokenIds, places: NDArray[np.intp], image_tokens: Sequence[int]) -> Layout:
    """Repeat the placeholder of each image once per token."""
    repeats = np.ones(len(ids), dtype=np.int64)
    repeats[places] = image_tokens
    ends = np.cumsum(repeats)[places]
    spans = (
        Span(image, int(end) - tokens, int(end))
        for image, (end, tokens) in enumerate(zip(ends, image_tokens, strict=True))
    )
    return Layout(np.repeat(ids, repeats), tuple(spans))


def _spans_of_runs(places: NDArray[np.intp], image_tokens: Sequence[int]) -> tuple[Span, ...]:
    """Divide the placeholders of an expanded prompt among the images."""
    spans, first = [], 0
    for image, tokens in enumerate(image_tokens):
        begin, last = int(places[first]), int(places[first + tokens - 1])
        if last - begin != tokens - 1:
            raise InvalidRequestError(f"the {tokens} placeholders of image {image} are not contiguous")
        spans.append(Span(image, begin, begin + tokens))
        first += tokens
    return tuple(spans)


@dataclass(frozen=True, slots=True)
class Window:
    """Rows `[row_begin, row_end)` of image number `image`. They fill the tokens of a chunk from `offset` on."""

    image: int
    row_begin: int
    row_end: int
    offset: int

    @property
    def rows(self) -> int:
        """Number of rows in the window."""
        return self.row_end - self.row_begin


@dataclass(frozen=True, slots=True)
class Chunk:
    """The prompt tokens `[begin, end)` of one forward pass, and the windows of image rows among them."""

    index: int
    begin: int
    end: int
    windows: tuple[Window, ...]

    @property
    def tokens(self) -> int:
        """Length of the chunk in tokens."""
        return self.end - self.begin

    @property
    def rows(self) -> int:
        """Number of tokens that are image rows."""
        return sum(window.rows for window in self.windows)


def plan(layout: Layout, chunk_tokens: int, *, begin: int = 0) -> tuple[Chunk, ...]:
    """Split the prompt into chunks of `chunk_tokens` tokens, starting at token `begin`. The last one may be shorter.

    `begin` is the number of tokens that the KV cache already covers. Each row from `begin` on is in exactly one chunk.
    Raises `InvalidRequestError` if `chunk_tokens` is less than one or `begin` is outside the prompt.
    """
    if chunk_tokens < 1:
        raise InvalidRequestError(f"a chunk must have at least one token, got {chunk_tokens}")
    if not 0 <= begin <= layout.tokens:
        raise InvalidRequestError(f"token {begin} is outside the prompt of {layout.tokens} tokens")
    edges = range(begin, layout.tokens, chunk_tokens)
    ends = (min(edge + chunk_tokens, layout.tokens) for edge in edges)
    return tuple(
        Chunk(index, edge, end, windows(layout, edge, end))
        for index, (edge, end) in enumerate(zip(edges, ends, strict=True))
    )


def windows(layout: Layout, begin: int, end: int) -> tuple[Window, ...]:
    """Return one window for each image with rows in the tokens `[begin, end)`, in prompt order."""
    found = []
    first = bisect_right(layout.spans, begin, key=lambda span: span.end)
    for span in layout.spans[first:]:
        if span.begin >= end:
            break
        start, stop = max(begin, span.begin), min(end, span.end)
        found.append(Window(span.image, start - span.begin, stop - span.begin, start - begin))
    return tuple(found)
