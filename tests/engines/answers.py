"""An engine that takes rows from the service gives the answers of its own tower. A control shows a difference."""

import random
from collections.abc import Callable, Iterable, Sequence
from itertools import chain
from typing import Any, Protocol

import pytest

from testing.answers import Answer, Part, images_in
from testing.photos import photo

TOLERANCE = 1e-5  # of a log-probability


class Engine(Protocol):
    """An engine of either kind that takes its images from the service."""

    def ask(self, parts: Sequence[Part]) -> Answer: ...
    def ask_all(self, prompts: Sequence[Sequence[Part]]) -> list[Answer]: ...
    def forget(self) -> None: ...
    def fetched(self) -> float: ...


Own = Callable[[Sequence[Part]], Answer]
"""Returns the answer of the engine's own tower to one of the prompts that it knows: at least those of `ASKED`."""


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


USUAL: dict[str, list[Part]] = {
    "one png": [photo(128, 128, 0, "PNG"), "What is this?"],
    "one jpeg": ["x ", photo(333, 222, 1), "What is this?"],
    "text between": ["A: ", photo(256, 192, 2, "PNG"), " and B: ", photo(320, 320, 3), " differ how?"],
    "the same twice": [photo(256, 256, 4), "and", photo(256, 256, 4), "same?"],
    "sixteen": [part for number in range(16) for part in (f"{number}: ", photo(240, 250, 5 + number))],
}
PROMPTS: dict[str, list[Part]] = {
    "text alone": ["Say something about nothing."],
    **USUAL,
    **{f"{images} of seed {n}": prompt(10 * images + n, images) for images in range(1, 9) for n in range(4)},
}
AT_ONCE = [prompt(200 + seed, 1 + seed % 8) for seed in range(16)]
_FIRST, _SECOND, _THIRD = (photo(256, 192, seed, "PNG") for seed in (31, 32, 33))
TURNS: list[list[Part]] = [
    ["a", _FIRST, "b", _FIRST],
    ["a", _FIRST, "b", _FIRST, "c", _SECOND, "d", _FIRST],
]
ASKED = [*PROMPTS.values(), *AT_ONCE, *TURNS]
"""All prompts whose answers these tests compare with those of the own tower."""


def assert_equal(ours: Answer, own: Answer, tolerance: float = TOLERANCE) -> None:
    assert ours.reason == own.reason == "length"
    assert ours.distance(own) <= tolerance


def assert_answers_equal(
    engine: Engine, own: Own, prompts: Iterable[Sequence[Part]] = USUAL.values()
) -> None:
    """Ask each prompt with empty caches. The engine fetches each of its images once."""
    for parts in prompts:
        engine.forget()
        before = engine.fetched()
        assert_equal(engine.ask(parts), own(parts))
        assert engine.fetched() - before == len(images_in(parts))


@pytest.mark.story("answers equal those of the own tower")
@pytest.mark.story("requests without images")
@pytest.mark.parametrize("name", PROMPTS)
def test_an_answer_is_that_of_the_own_tower(engine: Engine, own: Own, name: str) -> None:
    assert_answers_equal(engine, own, [PROMPTS[name]])


@pytest.mark.story("requests at once")
def test_all_at_once_are_answered_as_each_alone(engine: Engine, own: Own) -> None:
    engine.forget()
    before = engine.fetched()
    for parts, answer in zip(AT_ONCE, engine.ask_all(AT_ONCE), strict=True):
        assert_equal(answer, own(parts))
    assert engine.fetched() - before == len(images_in(chain(*AT_ONCE)))


@pytest.mark.story("an image twice in a prompt, and again in the next turn")
def test_a_repeated_image_in_a_prompt_and_in_the_next_turn(engine: Engine, own: Own) -> None:
    for parts in TURNS:
        assert_equal(engine.ask(parts), own(parts))


@pytest.mark.story("prefix caching")
def test_a_prefix_cache_hit_gives_the_same_answer(engine: Engine) -> None:
    engine.forget()
    cold = engine.ask(PROMPTS["text between"])
    assert_equal(engine.ask(PROMPTS["text between"]), cold)


@pytest.mark.story("an image is encoded once")
def test_an_image_is_encoded_once_and_by_the_service(engine: Engine, service: Any) -> None:
    parts: list[Part] = ["first ", photo(210, 130, 41), " and ", photo(130, 210, 42, "PNG")]
    encoded = service.encodes()
    for text in ("What is this?", "And what is that?"):
        engine.forget()
        engine.ask([*parts, text])
        assert service.encodes() - encoded == len(images_in(parts))


@pytest.mark.story("other images, or another order, change the answer")
def test_other_images_or_another_order_change_the_answer(engine: Engine) -> None:
    right = engine.ask(["A: ", _FIRST, " B: ", _SECOND, " differ?"])
    others: list[list[Part]] = [
        ["A: ", _FIRST, " B: ", _THIRD, " differ?"],
        ["A: ", _SECOND, " B: ", _FIRST, " differ?"],
    ]
    for parts in others:
        other = engine.ask(parts)
        distances = [
            abs(a[token] - b[token])
            for a, b in zip(right.top[:1], other.top[:1], strict=True)
            for token in a.keys() & b.keys()
        ]
        assert right.tokens != other.tokens or max(distances) > 100 * TOLERANCE
