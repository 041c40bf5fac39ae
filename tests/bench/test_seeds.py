"""The benchmark of many images: each section prints its figures, in a run of few images."""

import pytest

from bench.seeds import BENCHMARK, SECTION_S
from docs.benchmarks import looked_up
from tests.bench.benchmark_run import figures_of_run

IMAGES = 2
"""The images of the quick run, and the rounds of its chat."""


@pytest.mark.process
@pytest.mark.slow
@pytest.mark.timeout(1800)  # it has taken 341 s on two busy cores
def test_every_section_prints_its_figures() -> None:
    found = figures_of_run(BENCHMARK.command(dry_run=True))
    assert found["left_out"] == []
    longer = {f"images_{count}" for count in (4, 8, 16, 32, 64)} | {"round_8"}
    for figure in BENCHMARK.figures:
        if not figure.key.endswith(tuple(longer)):
            assert looked_up(figure.key, found) is not None, figure.key
    assert found["chat_most_encodes_a_round"] == 1
    assert found["most_images"] == found["most_images_transformers"] == IMAGES
    assert found["ranks_handle_bytes"] < 1000 * IMAGES


def test_all_sections_fit_into_a_run() -> None:
    assert sum(SECTION_S.values()) < 600
