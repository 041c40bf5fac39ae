"""An engine gives the same answers with the service's rows as with its own tower's, and holds nothing afterwards."""

from collections.abc import Iterator
from functools import partial

import pytest
from PIL import Image

from testing.photos import encoded, pixels
from testing.vllm_engine import VllmEngine
from tests.engines.answers import *  # noqa: F403 - tests for these fixtures
from tests.engines.answers import Own, assert_equal


@pytest.fixture
def own(engine: VllmEngine) -> Own:
    """Its tower stays loaded."""
    return partial(engine.ask, own=True)


@pytest.fixture(autouse=True)
def nothing_is_held(engine: VllmEngine) -> Iterator[None]:
    yield
    engine.assert_nothing_is_held()


@pytest.mark.story("transparent and turned images")
def test_rgb_png_with_a_transparent_colour(engine: VllmEngine, own: Own) -> None:
    picture, colour = Image.fromarray(pixels(200, 150, 3)), (90, 20, 60)
    picture.paste(colour, (20, 20, 150, 120))
    parts = ["x", encoded(picture, "PNG", transparency=colour)]
    assert_equal(engine.ask(parts), own(parts))
