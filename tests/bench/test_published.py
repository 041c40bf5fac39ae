"""The simulated tables: their arithmetic at the points where it is known, and the page that shows them."""

from pathlib import Path

import pytest

from bench.harness.tables import markdown
from bench.published import (
    DESIGNS,
    SIZES,
    VIT_8_MS,
    VIT_MS,
    by_images,
    chunk_aware,
    encoder_then_prefill,
    ours,
    prefill_ms,
    prompt,
    show,
    vit_ms,
    whole_set_first,
)

PAGE = Path(__file__).resolve().parents[2] / "docs" / "overlap.md"


def test_the_page_shows_what_the_command_prints() -> None:
    page = PAGE.read_text()
    for made in show():
        assert f"{made['title']}:\n\n{markdown(made['heads'], made['rows'])}" in page


@pytest.mark.parametrize("size", SIZES)
def test_the_tower_takes_what_was_published(size: str) -> None:
    assert vit_ms(size, 0) == 0
    assert vit_ms(size, 1) == VIT_MS[size]
    assert vit_ms(size, 8) == pytest.approx(VIT_8_MS[size])


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("images", [1, 3, 17, 64])
def test_no_design_beats_its_own_bounds(size: str, images: int) -> None:
    request = prompt(size, images)
    prefill = sum(prefill_ms(chunk) for chunk in request.chunks)
    last = prefill_ms(request.chunks[-1])
    encode = vit_ms(size, images)
    assert whole_set_first(request) >= encode + prefill
    assert chunk_aware(request) >= encode + prefill
    assert encoder_then_prefill(request) >= encode + prefill
    assert ours(request) >= max(prefill + VIT_MS[size], encode + last)
    assert ours(request) <= chunk_aware(request) + request.transfer_ms * len(request.chunks)


def test_a_turn_prefills_and_encodes_only_what_is_new() -> None:
    request = prompt("1080p", 5, held=4)
    assert request.new == (4,)
    assert request.chunks[0].begin == request.layout.spans[4].begin
    assert {window.image for chunk in request.chunks for window in chunk.windows} == {4}


def test_every_design_has_a_figure_for_every_size_and_number() -> None:
    table = by_images()
    assert set(table) == set(SIZES)
    for designs in table.values():
        assert set(designs) == set(DESIGNS)
        assert all(times == sorted(times) for times in designs.values())
