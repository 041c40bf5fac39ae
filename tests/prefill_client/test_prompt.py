"""Layout: where each image's tokens are in the prompt. Plan: its chunks, and the image rows that each needs."""

from collections import Counter

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from encoder_contract.errors import InvalidRequestError
from prefill_client import Chunk, Layout, Span, Window, expand_prompt, plan

IMAGE = 7
SIZES = st.lists(st.integers(1, 40), max_size=6)
TEXT = st.lists(st.integers(8, 99), max_size=5)


def test_a_placeholder_expands_to_all_tokens_of_its_image() -> None:
    layout = expand_prompt([1, IMAGE, 2, IMAGE, IMAGE], IMAGE, [3, 1, 2])
    assert layout.token_ids.tolist() == [1, 7, 7, 7, 2, 7, 7, 7]
    assert layout.spans == (Span(0, 1, 4), Span(1, 5, 6), Span(2, 6, 8))
    assert (layout.tokens, layout.image_tokens) == (8, 6)


@given(st.data(), SIZES)
def test_an_expanded_prompt_has_the_same_layout(data: st.DataObject, sizes: list[int]) -> None:
    short, expanded, begins = data.draw(TEXT), [], []
    expanded.extend(short)
    for tokens in sizes:
        text = data.draw(TEXT)
        begins.append(len(expanded))
        short += [IMAGE, *text]
        expanded += [IMAGE] * tokens + text
    from_short, from_expanded = expand_prompt(short, IMAGE, sizes), expand_prompt(expanded, IMAGE, sizes)
    assert from_short.token_ids.tolist() == from_expanded.token_ids.tolist() == expanded
    assert from_short.spans == from_expanded.spans
    assert from_short.spans == tuple(
        Span(i, b, b + n) for i, (b, n) in enumerate(zip(begins, sizes, strict=True))
    )


@pytest.mark.parametrize(
    ("ids", "sizes", "message"),
    [
        ([1, IMAGE], [], "1 placeholders fit neither 0 images"),
        ([1, 2], [3], "0 placeholders fit neither 1 images"),
        ([IMAGE, IMAGE, 1], [3], "nor their 3 tokens"),
        ([IMAGE, 1, IMAGE, IMAGE], [3], "the 3 placeholders of image 0 are not contiguous"),
        ([IMAGE], [0], "at least one token"),
        ([[IMAGE]], [1], "must have one dimension"),
    ],
)
def test_wrong_numbers_of_placeholders_are_refused(ids: list[int], sizes: list[int], message: str) -> None:
    with pytest.raises(InvalidRequestError, match=message):
        expand_prompt(ids, IMAGE, sizes)


def test_a_layout_is_read_only() -> None:
    given_ids = np.array([1, IMAGE, 2])
    layout = expand_prompt(given_ids, IMAGE, [1])
    with pytest.raises(ValueError, match="read-only"):
        layout.token_ids[0] = 5
    given_ids[0] = 9
    assert layout.token_ids[0] == 1


@st.composite
def layouts(draw: st.DrawFn) -> Layout:
    prompt, sizes = [1] * draw(st.integers(0, 9)), []
    for tokens in draw(st.lists(st.integers(1, 60), max_size=8)):
        sizes.append(tokens)
        prompt += [IMAGE] + [1] * draw(st.integers(0, 20))
    return expand_prompt(prompt, IMAGE, sizes)


def test_an_image_split_across_chunks_has_a_window_in_each() -> None:
    layout = expand_prompt([1, 1, IMAGE, 1, IMAGE], IMAGE, [5, 2])
    assert plan(layout, 4) == (
        Chunk(0, 0, 4, (Window(0, 0, 2, offset=2),)),
        Chunk(1, 4, 8, (Window(0, 2, 5, offset=0),)),
        Chunk(2, 8, 10, (Window(1, 0, 2, offset=0),)),
    )


@given(layouts(), st.integers(1, 70), st.data())
def test_every_row_after_the_prefix_is_in_exactly_one_window(
    layout: Layout, chunk_tokens: int, data: st.DataObject
) -> None:
    begin = data.draw(st.integers(0, layout.tokens))
    rows: Counter[int] = Counter()
    for chunk in plan(layout, chunk_tokens, begin=begin):
        for window in chunk.windows:
            span = layout.spans[window.image]
            assert 0 <= window.row_begin < window.row_end <= span.tokens
            assert chunk.begin + window.offset == span.begin + window.row_begin
            rows.update(range(span.begin + window.row_begin, span.begin + window.row_end))
    wanted = [token for span in layout.spans for token in range(span.begin, span.end) if token >= begin]
    assert rows == Counter(wanted)


@given(layouts(), st.integers(1, 70))
def test_chunks_tile_the_prompt_with_windows_of_their_images(layout: Layout, chunk_tokens: int) -> None:
    chunks = plan(layout, chunk_tokens)
    assert [c.index for c in chunks] == list(range(len(chunks)))
    assert [c.begin for c in chunks] == list(range(0, layout.tokens, chunk_tokens))
    assert [c.end for c in chunks] == [*[c.begin for c in chunks[1:]], layout.tokens][: len(chunks)]
    for chunk in chunks:
        overlapping = [s.image for s in layout.spans if s.begin < chunk.end and chunk.begin < s.end]
        assert [w.image for w in chunk.windows] == overlapping
        assert chunk.rows == sum((layout.token_ids[chunk.begin : chunk.end] == IMAGE).tolist())


@pytest.mark.parametrize(("chunk_tokens", "begin"), [(0, 0), (-1, 0), (4, -1), (4, 99)])
def test_invalid_chunk_sizes_and_prefixes_are_refused(chunk_tokens: int, begin: int) -> None:
    with pytest.raises(InvalidRequestError):
        plan(expand_prompt([1, 2, 3], IMAGE, []), chunk_tokens, begin=begin)
