"""LoRA adapters of the language model: answers are those of an engine with its own tower and the same adapter.

Requests of all adapters and of the base model share the rows of an image, and no prefix.
"""

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from itertools import combinations
from pathlib import Path

import pytest
from vllm.lora.request import LoRARequest

from testing.photos import photo
from testing.server_process import ServerProcess
from testing.vllm_engine import Part, VllmEngine
from tests.engines.answers import TOLERANCE, prompt
from tests.vllm.http_engine import HttpEngine, RenderServer, rendering, serving
from tests.vllm.lora_adapters import RANK, write_adapter
from tests.vllm.test_middleware import ask, assert_equal, content, top
from tests.vllm.test_render import by_token_id, generated, names, rendered

BASE, TUNED, OTHER = "tiny", "tuned", "other"
MODELS = (BASE, TUNED, OTHER)
PROMPTS = [prompt(7700 + images, images) for images in (1, 3, 8)]
# By callers at once, to adapters alone: beside an adapter, vLLM's kernels for the CPU apply it to the base model's
# tokens, too. Requests wait in the engine for their images, because the text before them is worth a step.
TOGETHER = [
    [f"{number} words to prefill " * 110, *prompt(7720 + number, 1 + number % 4)] for number in range(12)
]
Steps = list[dict[str, float]]


@pytest.fixture(scope="module")
def adapters(checkpoint: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """The folders of two adapters, by name."""
    folder = tmp_path_factory.mktemp("adapters")
    return {name: write_adapter(folder / name, checkpoint, seed) for seed, name in enumerate((TUNED, OTHER))}


@pytest.fixture(scope="module")
def flags(adapters: dict[str, Path]) -> list[str]:
    """The flags of an engine that has both adapters, of which one at a time may run, as by default."""
    modules = [f"{name}={folder}" for name, folder in adapters.items()]
    return [
        "--enable-lora", "--max-lora-rank", str(RANK), "--max-cpu-loras", "4", "--lora-modules", *modules,
        "--enable-scale-out", "--enable-prompt-tokens-details", "--max-model-len", "8192",
    ]  # fmt: skip


@pytest.fixture(scope="module")
def stock(checkpoint: Path, flags: list[str]) -> dict[str, list[Steps]]:
    """The answers of an engine without our flags: by model to `PROMPTS`, and those to `TOGETHER`."""
    with serving(checkpoint, "", *flags) as engine:
        chats = {model: [ask(engine, parts, model=model) for parts in PROMPTS] for model in MODELS}
        for model in MODELS:
            request = rendered(engine, PROMPTS[1], model=model)
            assert request["model"] == model
            assert_equal(generated(engine, request), chats[model][1])
        together = [ask(engine, parts, model=adapter_of(number)) for number, parts in enumerate(TOGETHER)]
    return {**chats, "together": together}


@pytest.fixture(scope="module")
def http(checkpoint: Path, service: ServerProcess, stock: object, flags: list[str]) -> Iterator[HttpEngine]:
    """An engine with our three flags, which may also get adapters while it runs."""
    variables = {"VLLM_ALLOW_RUNTIME_LORA_UPDATING": "1"}
    with serving(checkpoint, service.endpoint, *flags, environment=variables) as engine:
        yield engine


@pytest.fixture(scope="module")
def render(checkpoint: Path, service: ServerProcess, stock: object) -> Iterator[RenderServer]:
    """A render server that calls the model by the name of an adapter, too."""
    with rendering(checkpoint, service.endpoint, "--served-model-name", BASE, TUNED) as server:
        yield server


def adapter_of(number: int) -> str:
    return (TUNED, OTHER)[number % 2]


def differ(one: Steps, another: Steps) -> bool:
    """Whether the first token has clearly other log-probabilities."""
    both = one[0].keys() & another[0].keys()
    return not both or max(abs(one[0][token] - another[0][token]) for token in both) > 1000 * TOLERANCE


@pytest.mark.story("LoRA on the language model")
@pytest.mark.parametrize("model", MODELS)
def test_adapters_and_the_base_model_answer_as_with_the_own_tower(
    http: HttpEngine, stock: dict[str, list[Steps]], model: str
) -> None:
    for parts, right in zip(PROMPTS, stock[model], strict=True):
        assert_equal(ask(http, parts, model=model), right)
    for one, another in combinations(MODELS, 2):
        assert all(map(differ, stock[one], stock[another])), "adapters change answers"


@pytest.mark.story("LoRA on the language model")
def test_models_share_the_rows_of_an_image_and_no_prefix(http: HttpEngine, service: ServerProcess) -> None:
    parts = ["shared rows ", photo(200, 150, 7740, "PNG"), " and words after them" * 5]
    encodes, found = service.encodes(), []
    for model in 2 * MODELS:
        response = http.chat(content(parts), model=model)
        assert response.status_code == 200, response.text
        answer = response.json()
        cached = (answer["usage"]["prompt_tokens_details"] or {}).get("cached_tokens") or 0
        found.append((top(answer["choices"][0]), cached))
    assert service.encodes() == encodes + 1
    first, again = found[: len(MODELS)], found[len(MODELS) :]
    assert [cached for _, cached in first] == [0] * len(MODELS)
    for (answer, cached), (expected, _) in zip(again, first, strict=True):
        assert cached > 64, "the image's tokens and the text beside it"
        assert_equal(answer, expected)
    assert all(differ(one, another) for (one, _), (another, _) in combinations(first, 2))


def test_a_rendered_request_answers_by_the_adapter_that_it_names(
    http: HttpEngine, render: RenderServer, stock: dict[str, list[Steps]]
) -> None:
    for index, parts in enumerate(PROMPTS):
        request = rendered(render, parts)
        for model in MODELS:
            assert_equal(generated(http, {**request, "model": model}), stock[model][index])
            by_engine = rendered(http, parts, model=model)
            assert (by_engine["model"], names(by_engine)) == (model, names(request))
        named = rendered(render, parts, model=TUNED)
        assert (named["model"], names(named)) == (TUNED, names(request))
        assert_equal(generated(http, named), stock[TUNED][index])
    unknown = RenderServer.render(render, content(PROMPTS[0]), model=OTHER)
    assert unknown.status_code == 404, unknown.text


def test_an_adapter_for_all_images_needs_no_name(
    http: HttpEngine, stock: dict[str, list[Steps]], adapters: dict[str, Path]
) -> None:
    """As one of `--default-mm-loras`, which vLLM chooses by the parts of a chat. This one is loaded, and unloaded."""
    adapter = {"lora_name": "image", "lora_path": str(adapters[OTHER])}
    loaded = http.post("/v1/load_lora_adapter", adapter)
    assert loaded.status_code == 200, loaded.text
    assert_equal(ask(http, PROMPTS[1]), stock[OTHER][1])
    assert_equal(ask(http, PROMPTS[1], model=TUNED), stock[TUNED][1])
    unloaded = http.post("/v1/unload_lora_adapter", adapter)
    assert unloaded.status_code == 200, unloaded.text
    assert_equal(ask(http, PROMPTS[1]), stock[BASE][1])


def test_callers_of_both_adapters_at_once(http: HttpEngine, stock: dict[str, list[Steps]]) -> None:
    """New images for more adapters than may run: while a request waits for rows, no other adapter gets its place."""
    with ThreadPoolExecutor(len(TOGETHER)) as callers:
        answers = callers.map(
            lambda number: ask(http, TOGETHER[number], model=adapter_of(number)), range(len(TOGETHER))
        )
        for answer, right in zip(answers, stock["together"], strict=True):
            assert_equal(answer, right)


@pytest.fixture
def requests(adapters: dict[str, Path]) -> dict[str, LoRARequest]:
    """What an engine without a server is told of each adapter."""
    numbered = enumerate(adapters.items(), 1)
    return {name: LoRARequest(name, number, str(folder)) for number, (name, folder) in numbered}


def test_an_adapter_answers_alike_without_the_tower(
    checkpoint: Path,
    service: ServerProcess,
    stock: dict[str, list[Steps]],
    requests: dict[str, LoRARequest],
) -> None:
    limits = {"image": 0, "video": 0}
    engine = VllmEngine(
        checkpoint, service.endpoint, limit_mm_per_prompt=limits, enable_lora=True, max_lora_rank=RANK
    )
    try:
        for parts, right in zip(PROMPTS, stock[OTHER], strict=True):
            engine.submit(*(part for part in parts if isinstance(part, bytes)))
            request_id = engine.start(parts, adapter=requests[OTHER])
            assert_equal(by_token_id(engine.run(request_id)[request_id]), right)
    finally:
        engine.close()


@pytest.fixture(scope="module")
def stepped(checkpoint: Path, service: ServerProcess) -> Iterator[VllmEngine]:
    """An engine that tests step by hand."""
    engine = VllmEngine(checkpoint, service.endpoint, exact=True, enable_lora=True, max_lora_rank=RANK)
    yield engine
    engine.close()


def test_no_other_adapter_runs_while_a_request_waits_for_rows(
    stepped: VllmEngine, requests: dict[str, LoRARequest]
) -> None:
    """With `--max-loras 1`, vLLM's default, an engine ends in a step with two adapters."""
    tuned, other = requests[TUNED], requests[OTHER]
    image = photo(200, 150, 7741, "PNG")
    parts: list[Part] = ["a text before the image ", image, " and after it"]
    waiting = stepped.start(parts, adapter=tuned)
    stepped.run_until(lambda: stepped.computed(waiting) > 0)
    others = [stepped.start(["only text"], adapter=other) for _ in range(2)]
    free = [stepped.start(["only text"], adapter=adapter) for adapter in (tuned, None)]
    ended = stepped.run(*free)
    assert ended.keys() == set(free)
    assert [stepped.computed(each) for each in others] == [0, 0]
    stepped.submit(image)
    ended = stepped.run(waiting, *others)
    assert {ended[each].reason for each in (waiting, *others)} == {"length"}
    right = stepped.start(parts, own=True, adapter=tuned)
    assert ended[waiting].distance(stepped.run(right)[right]) <= TOLERANCE
    stepped.assert_nothing_is_held()
