"""An engine gives the same answers with the service's rows as with its own tower's. A control shows a difference."""

import random

import pytest
from PIL import Image

from testing.photos import encoded, photo, pixels
from testing.vllm_engine import Answer, Part, VllmEngine

TOLERANCE = 1e-5  # of a log-probability


def prompt(seed: int, images: int) -> list[Part]:
    """Return text and images of mixed sizes and formats, by seed."""
    draw = random.Random(seed)
    parts: list[Part] = [f"prompt {seed}: "]
    for number in range(images):
        size = (draw.randrange(40, 400), draw.randrange(40, 400))
        parts += [
            photo(*size, 100 * seed + number, draw.choice(("PNG", "JPEG"))),
            draw.choice(("", " and ", "?")),
        ]
    return parts


def assert_equal(ours: Answer, own: Answer) -> None:
    assert ours.reason == own.reason == "length"
    assert ours.distance(own) <= TOLERANCE


@pytest.mark.parametrize("images", range(1, 9))
def test_answers_equal_those_of_the_own_tower(engine: VllmEngine, images: int) -> None:
    for seed in range(4):
        parts = prompt(10 * images + seed, images)
        assert_equal(engine.ask(parts), engine.ask(parts, own=True))
    engine.assert_nothing_is_held()


def test_sixteen_concurrent_requests_answer_as_with_the_own_tower(engine: VllmEngine) -> None:
    prompts = [prompt(200 + seed, 1 + seed % 8) for seed in range(16)]
    for parts in prompts:
        engine.submit(*(part for part in parts if isinstance(part, bytes)))
    started = [engine.start(parts) for parts in prompts]
    together = engine.run(*started)
    for request_id, parts in zip(started, prompts, strict=True):
        assert_equal(together[request_id], engine.ask(parts, own=True))
    engine.assert_nothing_is_held()


def test_repeated_image_in_a_prompt_and_in_the_next_turn(engine: VllmEngine) -> None:
    first, second = photo(200, 150, 1, "PNG"), photo(150, 260, 2, "PNG")
    for parts in (["a", first, "b", first], ["a", first, "b", first, "c", second, "d", first]):
        assert_equal(engine.ask(parts), engine.ask(parts, own=True))


def test_rgb_png_with_a_transparent_colour(engine: VllmEngine) -> None:
    picture, colour = Image.fromarray(pixels(200, 150, 3)), (90, 20, 60)
    picture.paste(colour, (20, 20, 150, 120))
    parts: list[Part] = ["x", encoded(picture, "PNG", transparency=colour)]
    assert_equal(engine.ask(parts), engine.ask(parts, own=True))


def test_a_prefix_cache_hit_gives_the_same_answer(engine: VllmEngine) -> None:
    parts = prompt(300, 4)
    engine.forget()
    cold = engine.ask(parts)
    warm = engine.ask(parts)
    assert cold.distance(warm) <= TOLERANCE


def test_other_images_or_another_order_change_the_answer(engine: VllmEngine) -> None:
    parts = ["what is this?", photo(200, 150, 1, "PNG")]
    right = engine.ask(parts, own=True)
    another = engine.ask(["what is this?", photo(200, 150, 2, "PNG")])
    distances = [
        abs(a[token] - b[token])
        for a, b in zip(right.top[:1], another.top[:1], strict=True)
        for token in a.keys() & b.keys()
    ]
    assert right.tokens != another.tokens or max(distances) > 100 * TOLERANCE
