"""What each prefill chunk needs: tokens [begin, end) of the prompt in, their image rows out."""

from bisect import bisect_right
from dataclasses import dataclass

from encoder_contract.errors import InvalidRequestError
from prefill_client.prompt.layout import Layout


@dataclass(frozen=True, slots=True)
class Window:
    """Rows `[row_begin, row_end)` of image number `image`; they fill the chunk's tokens from `offset` on."""

    image: int
    row_begin: int
    row_end: int
    offset: int

    @property
    def rows(self) -> int:
        """How many rows the window has."""
        return self.row_end - self.row_begin


@dataclass(frozen=True, slots=True)
class Chunk:
    """Tokens `[begin, end)` of the prompt, prefilled in one forward, and the image rows that lie in them."""

    index: int
    begin: int
    end: int
    windows: tuple[Window, ...]

    @property
    def tokens(self) -> int:
        """Length of the chunk."""
        return self.end - self.begin

    @property
    def rows(self) -> int:
        """How many of its tokens are rows of images."""
        return sum(window.rows for window in self.windows)


def plan(layout: Layout, chunk_tokens: int, *, begin: int = 0) -> tuple[Chunk, ...]:
    """Cut the prompt from token `begin` on into chunks of `chunk_tokens`; the KV cache covers what is before.

    Over all chunks every row at or behind `begin` appears exactly once, and a chunk names only images with
    rows in it.
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
