"""Layout: where each image's tokens lie in the prompt."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from encoder_contract.errors import InvalidRequestError
from prefill_client import Span, expand_prompt

IMAGE = 7
SIZES = st.lists(st.integers(1, 40), max_size=6)
TEXT = st.lists(st.integers(8, 99), max_size=5)


def test_one_placeholder_becomes_all_tokens_of_its_image() -> None:
    layout = expand_prompt([1, IMAGE, 2, IMAGE, IMAGE], IMAGE, [3, 1, 2])
    assert layout.token_ids.tolist() == [1, 7, 7, 7, 2, 7, 7, 7]
    assert layout.spans == (Span(0, 1, 4), Span(1, 5, 6), Span(2, 6, 8))
    assert (layout.tokens, layout.image_tokens) == (8, 6)


@given(st.data(), SIZES)
def test_expanded_prompt_lays_out_like_its_short_form(data: st.DataObject, sizes: list[int]) -> None:
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
    ("ids", "sizes", "said"),
    [
        ([1, IMAGE], [], "1 placeholders fit neither 0 images"),
        ([1, 2], [3], "0 placeholders fit neither 1 images"),
        ([IMAGE, IMAGE, 1], [3], "nor their 3 tokens"),
        ([IMAGE, 1, IMAGE, IMAGE], [3], "image 0 has 3 tokens, but its placeholders are interrupted"),
        ([IMAGE], [0], "at least one token"),
        ([[IMAGE]], [1], "one row of token ids"),
    ],
)
def test_placeholders_that_do_not_fit_are_refused(ids: list[int], sizes: list[int], said: str) -> None:
    with pytest.raises(InvalidRequestError, match=said):
        expand_prompt(ids, IMAGE, sizes)


def test_layout_cannot_be_changed_afterwards() -> None:
    given_ids = np.array([1, IMAGE, 2])
    layout = expand_prompt(given_ids, IMAGE, [1])
    with pytest.raises(ValueError, match="read-only"):
        layout.token_ids[0] = 5
    given_ids[0] = 9
    assert layout.token_ids[0] == 1
