"""Stand-ins: no tower encodes one, even if a caller or a bug tries; services of other models are refused."""

from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest

from prefill_client.vllm.gate import PrefillGate
from prefill_client.vllm.image_name import NameSigner
from prefill_client.vllm.scheduler_side import SchedulerSide
from testing.photos import photo
from testing.server_process import ServerProcess, running
from testing.vllm_engine import Part, VllmEngine, data_url, raw, tower_output
from testing.vllm_families import OPTIONS, SQUARE, TALL, WIDE, write_small_family
from tests.engines.answers import TOLERANCE
from tests.vllm.http_engine import HttpEngine, rendering, serving
from tests.vllm.service import SERVICE, SETTINGS
from tests.vllm.test_middleware import assert_equal, content, top
from tests.vllm.test_render import GENERATE
from tests.vllm.test_service_check import check, config_of

FAMILY = "idefics3"  # tiles of several sizes, with separators between them
QUESTION: list[Part] = ["a", WIDE, "b", TALL]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A checkpoint of the family."""
    return write_small_family(tmp_path_factory.mktemp(FAMILY), FAMILY)


@pytest.fixture(scope="module")
def service(model: Path) -> Iterator[ServerProcess]:
    """A server of that checkpoint."""
    with running(model, executable=SERVICE, **SETTINGS) as server:
        yield server


@pytest.fixture
def engine(model: Path, service: ServerProcess) -> Iterator[VllmEngine]:
    """An engine for each test: most end it."""
    engine = VllmEngine(model, service.endpoint, **OPTIONS)
    yield engine
    engine.close()


def test_a_forged_or_reused_name_fails_only_its_request(engine: VllmEngine) -> None:
    engine.submit(WIDE, SQUARE)
    named = engine.named(WIDE)
    proven = {key: named[key] for key in ("uuid", "name")}
    for hostile in ({**raw(SQUARE), **proven}, {**raw(WIDE), "uuid": named["uuid"]}):
        request_id = engine.start(["hostile", hostile])
        assert engine.run(request_id)[request_id].reason == "error"
        assert engine.ask(["x", SQUARE]).reason == "length"
    engine.assert_nothing_is_held()


def break_the_gate(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let the scheduler pass stand-ins to the tower."""
    monkeypatch.setattr(PrefillGate, "may_prefill", lambda *_: True)


def test_a_step_that_reads_a_stand_in_ends_the_engine_before_the_tower_runs(
    engine: VllmEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    encoded = tower_output(engine)
    break_the_gate(monkeypatch)
    engine.submit(WIDE)
    request_id = engine.start(["x", WIDE])
    with pytest.raises(KeyError, match=r"[0-9a-f]{64}"):
        engine.run(request_id)
    assert not encoded


def test_a_worker_whose_tower_encoded_a_stand_in_ends_before_any_answer(
    engine: VllmEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    encoded = tower_output(engine)
    break_the_gate(monkeypatch)
    monkeypatch.setattr(SchedulerSide, "allocated", lambda *_: None)
    engine.submit(WIDE)
    request_id = engine.start(["x", WIDE])
    with pytest.raises(RuntimeError, match="the engine's tower encoded a stand-in"):
        engine.run(request_id)
    assert len(encoded) == 1, "a blank"


def test_without_both_guards_the_answer_is_computed_from_the_stand_in(
    engine: VllmEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    right = engine.ask(["x", WIDE], own=True)
    break_the_gate(monkeypatch)
    monkeypatch.setattr(SchedulerSide, "allocated", lambda *_: None)
    engine.submit(WIDE)
    request_id = engine.start(["x", WIDE])
    monkeypatch.setattr(NameSigner, "is_identifier", lambda *_: False)
    answer = engine.run(request_id)[request_id]
    assert answer.reason == "length"
    assert answer.distance(right) > 10 * TOLERANCE


def test_another_checkpoint_or_processor_is_refused(
    model: Path, service: ServerProcess, tmp_path: Path
) -> None:
    check(config_of(model, service.endpoint))
    other = write_small_family(tmp_path / "weights", FAMILY, seed=1)
    with pytest.raises(ValueError, match="serves another model: model fingerprint"):
        check(config_of(other, service.endpoint))
    other = write_small_family(tmp_path / "processor", FAMILY)
    settings = other / "processor_config.json"
    settings.write_text(settings.read_text().replace("0.5", "0.4"))
    with pytest.raises(ValueError, match="serves another model: model fingerprint"):
        check(config_of(other, service.endpoint))


@pytest.mark.story("the same models without the tower in the engine")
def test_an_image_limit_of_0_is_refused_with_stand_ins(model: Path, service: ServerProcess) -> None:
    with pytest.raises(ValueError, match="raise the limit; the tower stays loaded"):
        check(config_of(model, service.endpoint, limit_mm_per_prompt={"image": 0}))


@pytest.fixture
def right(model: Path, service: ServerProcess) -> list[dict[str, float]]:
    """The log-probabilities of the engine's own tower for the question."""
    engine = VllmEngine(model, service.endpoint, **OPTIONS)
    own = engine.ask(QUESTION, own=True)
    engine.close()
    return [{f"token_id:{token}": value for token, value in step.items()} for step in own.top]


def respond(http: HttpEngine, image: bytes) -> httpx.Response:
    """Ask about an image by the API of responses; return the response."""
    part = {"type": "input_image", "detail": "auto", "image_url": data_url(image)}
    body = {"model": "tiny", "input": [{"role": "user", "content": [part]}], "max_output_tokens": 4}
    return httpx.post(http.url + "/v1/responses", json=body, timeout=600)


def test_vllm_serve_answers_chats_and_responses_with_stand_ins(
    model: Path, service: ServerProcess, right: list[dict[str, float]]
) -> None:
    flags = ["--max-num-batched-tokens", str(OPTIONS["max_num_batched_tokens"])]
    with serving(model, service.endpoint, *flags, "--limit-mm-per-prompt", '{"image": 4}') as http:
        response = http.chat(content(QUESTION))
        assert response.status_code == 200, response.text
        assert_equal(top(response.json()["choices"][0]), right)
        assert fed(http) == 2
        response = respond(http, photo(300, 200, 5, "PNG"))
        assert response.status_code == 200, response.text
        assert fed(http) == 3
        rare = http.chat(content(["x", photo(64, 48, 4, "TIFF")]))
        assert rare.status_code == 400
        assert "image 0: vLLM cannot lay out an image of this format" in rare.text


def test_a_model_with_separators_is_rendered_as_by_vllm_and_its_tokens_end_no_engine(
    model: Path, service: ServerProcess, right: list[dict[str, float]]
) -> None:
    """VLLM's answer does not say which tokens of such an image have rows: vLLM's own engine ends."""
    flags = ["--max-num-batched-tokens", str(OPTIONS["max_num_batched_tokens"])]
    flags += ["--limit-mm-per-prompt", '{"image": 4}']
    with (
        rendering(model, service.endpoint, *flags) as render,
        serving(model, service.endpoint, *flags, "--enable-scale-out") as http,
    ):
        rendered = render.render(content(QUESTION))
        assert rendered.status_code == 200, rendered.text
        refused = http.post(GENERATE, rendered.json())
        assert refused.status_code == 400
        assert "image 0: a request of tokens cannot say which tokens of its placeholder" in refused.text
        response = http.chat(content(QUESTION))
        assert response.status_code == 200, response.text
        assert_equal(top(response.json()["choices"][0]), right)


def fed(http: HttpEngine) -> int:
    """Return how many images the engine got from the service."""
    return int(sum(value for name, value in http.metrics().items() if "images_total" in name))
