"""The prompt: where each image's tokens lie in it, and which rows each prefill chunk needs."""

from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from encoder_contract.errors import InvalidRequestError

TokenIds = NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class Span:
    """The tokens `[begin, end)` of the prompt that belong to image number `image`; row r is token begin + r."""

    image: int
    begin: int
    end: int

    @property
    def tokens(self) -> int:
        """Number of tokens of the image, which is its number of rows."""
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
    """Return the layout of a prompt in which the token `placeholder`, or any of several, marks the images, in order.

    `token_ids` has the shape [tokens]; `image_tokens` holds the number of tokens of each image. The prompt marks every
    image by one placeholder, as a chat template does, or every image by all its tokens, as a Hugging Face processor
    does. Raises `InvalidRequestError` if the placeholders fit neither form.
    """
    ids = np.array(token_ids, dtype=np.int64)
    if ids.ndim != 1:
        raise InvalidRequestError(f"a prompt is one row of token ids, not an array of shape {ids.shape}")
    if any(tokens < 1 for tokens in image_tokens):
        raise InvalidRequestError(f"every image must have at least one token, got {list(image_tokens)}")
    marked = np.flatnonzero(np.isin(ids, placeholder))
    if len(marked) == len(image_tokens):
        return _expanded(ids, marked, image_tokens)
    if len(marked) != sum(image_tokens):
        raise InvalidRequestError(
            f"{len(marked)} placeholders fit neither {len(image_tokens)} images (one each) "
            f"nor their {sum(image_tokens)} tokens"
        )
    return Layout(ids, _spans_of_runs(marked, image_tokens))


def _expanded(ids: TokenIds, marked: NDArray[np.intp], image_tokens: Sequence[int]) -> Layout:
    """Repeat the one placeholder of each image to its number of tokens."""
    repeats = np.ones(len(ids), dtype=np.int64)
    repeats[marked] = image_tokens
    ends = np.cumsum(repeats)[marked]
    spans = (
        Span(image, int(end) - tokens, int(end))
        for image, (end, tokens) in enumerate(zip(ends, image_tokens, strict=True))
    )
    return Layout(np.repeat(ids, repeats), tuple(spans))


def _spans_of_runs(marked: NDArray[np.intp], image_tokens: Sequence[int]) -> tuple[Span, ...]:
    """Divide the placeholders of an expanded prompt among the images. The tokens of an image must be contiguous."""
    spans, first = [], 0
    for image, tokens in enumerate(image_tokens):
        begin, last = int(marked[first]), int(marked[first + tokens - 1])
        if last - begin != tokens - 1:
            raise InvalidRequestError(
                f"image {image} has {tokens} tokens, but its placeholders are interrupted"
            )
        spans.append(Span(image, begin, begin + tokens))
        first += tokens
    return tuple(spans)


@dataclass(frozen=True, slots=True)
class Window:
    """Rows `[row_begin, row_end)` of image number `image`, which fill the chunk's tokens from `offset` on."""

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
    """Tokens `[begin, end)` of the prompt, prefilled in one forward, and the windows of image rows among them."""

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
        """Number of its tokens that are image rows."""
        return sum(window.rows for window in self.windows)


def plan(layout: Layout, chunk_tokens: int, *, begin: int = 0) -> tuple[Chunk, ...]:
    """Cut the prompt from token `begin` on into chunks of `chunk_tokens` tokens; the last one may be shorter.

    `begin` is the number of tokens that the KV cache already covers. Over all chunks, every row from `begin` on appears
    exactly once, and a chunk names only images with rows in it. Raises `InvalidRequestError` for chunks of less than
    one token and for a `begin` outside of the prompt.
    """
    if chunk_tokens < 1:
        raise InvalidRequestError(f"a chunk must have at least one token, got {chunk_tokens}")
    if not 0 <= begin <= layout.tokens:
        raise InvalidRequestError(f"token {begin} is outside a prompt of {layout.tokens} tokens")
    edges = range(begin, layout.tokens, chunk_tokens)
    ends = (min(edge + chunk_tokens, layout.tokens) for edge in edges)
    return tuple(
        Chunk(index, edge, end, windows(layout, edge, end))
        for index, (edge, end) in enumerate(zip(edges, ends, strict=True))
    )


def windows(layout: Layout, begin: int, end: int) -> tuple[Window, ...]:
    """Return the window of each image that has rows in tokens `[begin, end)`, in prompt order."""
    found = []
    first = bisect_right(layout.spans, begin, key=lambda span: span.end)
    for span in layout.spans[first:]:
        if span.begin >= end:
            break
        start, stop = max(begin, span.begin), min(end, span.end)
        found.append(Window(span.image, start - span.begin, stop - span.begin, start - begin))
    return tuple(found)
