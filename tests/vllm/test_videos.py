"""Videos at an unmodified `vllm serve`: pairs of frames get the answers of vLLM's own tower."""

import base64
import json
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest

from encoder_contract.digest import content_digest
from encoder_contract.video import VideoInfo, VideoSettings
from prefill_client.images import Image
from prefill_client.vllm.image_name import ImageName
from prefill_client.vllm.videos import prompt_parts
from testing.clips import clip, rotated, with_index_first
from testing.photos import photo
from testing.server_process import ServerProcess, running
from testing.vllm_engine import CHUNK_TOKENS, VllmEngine, raw
from tests.vllm.conftest import checkpoint_of
from tests.vllm.http_engine import HttpEngine, rendering, serving
from tests.vllm.service import SERVICE, SETTINGS
from tests.vllm.test_middleware import assert_equal, top
from tests.vllm.test_render import GENERATE, steps
from tests.vllm.test_without_middleware_cures import behind_middleware

TOLERANCE = 1e-4
PROCESSOR = {
    "video_processor_type": "Qwen3VLVideoProcessor",
    "size": {"longest_edge": 262144, "shortest_edge": 1024},
    "patch_size": 16,
    "temporal_patch_size": 2,
    "merge_size": 2,
    "image_mean": [0.5, 0.5, 0.5],
    "image_std": [0.5, 0.5, 0.5],
    "fps": 2,
    "min_frames": 4,
    "max_frames": 768,
    "cap_pixels_per_frame": False,
}
TRUST, DETAILS = "--trust-request-mm-kwargs", "--enable-prompt-tokens-details"
CLIP = clip("mp4", frames=45, fps=10.0, seed=1)  # 9 frames are shown, in 5 pairs
OTHER = clip("webm", frames=30, fps=12.5, width=200, height=120, seed=2)
SHORT = clip("mp4", frames=12, fps=6.0, seed=3)
TURNED = rotated(clip("mp4", frames=30, fps=15.0, width=192, seed=4), 90)
CUT = with_index_first(clip("mp4", frames=60, fps=10.0, seed=5))
CUT = CUT[: len(CUT) * 2 // 3]


def video(data: bytes) -> dict[str, Any]:
    """Return a video as callers send it."""
    url = "data:video/mp4;base64," + base64.b64encode(data).decode()
    return {"type": "video_url", "video_url": {"url": url}}


def text(words: str) -> dict[str, Any]:
    return {"type": "text", "text": words}


def loading(**options: float) -> dict[str, Any]:
    """The options of vLLM's loader for the videos of a request."""
    return {"media_io_kwargs": {"video": options}}


def processing(**options: float) -> dict[str, Any]:
    """The options of the model's processor."""
    return {"mm_processor_kwargs": options}


QUESTIONS: dict[str, tuple[list[dict[str, Any]], dict[str, Any]]] = {
    "a clip": ([text("what happens"), video(CLIP)], {}),
    "images and clips": (
        [raw(photo(120, 90, 6)), text("then"), video(CLIP), text("and"), raw(photo(64, 64, 7)), video(OTHER)],
        {},
    ),
    "turned": ([video(TURNED), text("what happens")], {}),
    "cut": ([video(CUT), text("what happens")], {}),
    "one frame a second": ([video(CLIP)], loading(fps=1)),
    "a number that the loader ignores": ([video(CLIP)], loading(num_frames=4)),
    "a rate that the processor ignores": ([video(CLIP)], processing(fps=4)),
    "all frames loaded": ([video(SHORT)], loading(fps=30)),
    "all frames loaded, a rate": ([video(SHORT)], loading(fps=30) | processing(fps=5)),
    "all frames loaded, a number": ([video(SHORT)], loading(fps=30) | processing(num_frames=7)),
    "a placeholder before it": ([text("first <|video_pad|> then"), video(SHORT), text("what")], {}),
    "a placeholder behind it": ([video(SHORT), text("and <|vision_start|><|video_pad|><|vision_end|>")], {}),
    "placeholders among images and clips": (
        [text("<|video_pad|>"), raw(photo(64, 64, 7)), video(SHORT), text("<|video_pad|>b<|video_pad|>"), video(OTHER)],
        {},
    ),
}  # fmt: skip


Tokens = tuple[int, dict[str, int]]
"""The tokens of a prompt, and how many of them belong to images and to videos."""


def ask(
    http: HttpEngine, content: list[dict[str, Any]], **body: Any
) -> tuple[Tokens, list[dict[str, float]]]:
    """Return the tokens of the prompt, and the likeliest tokens of each step."""
    response = http.chat(content, **body)
    assert response.status_code == 200, response.text
    answer = response.json()
    return tokens_of(answer["usage"]), top(answer["choices"][0])


def tokens_of(usage: dict[str, Any]) -> Tokens:
    return usage["prompt_tokens"], usage["prompt_tokens_details"]["multimodal_tokens"]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A checkpoint with settings for videos, as published ones have them."""
    folder = checkpoint_of("qwen3_vl", tmp_path_factory.mktemp("videos"))
    (folder / "video_preprocessor_config.json").write_text(json.dumps(PROCESSOR))
    return folder


@pytest.fixture(scope="module")
def right(folder: Path) -> dict[str, tuple[Tokens, list[dict[str, float]]]]:
    """The answers of vLLM with its own loader and tower."""
    flags = (TRUST, DETAILS, "--limit-mm-per-prompt", '{"image": 16, "video": 2}')
    with serving(folder, "", *flags) as stock:
        return {name: ask(stock, content, **body) for name, (content, body) in QUESTIONS.items()}


@pytest.fixture(scope="module")
def service_of_videos(folder: Path) -> Iterator[ServerProcess]:
    with running(folder, executable=SERVICE, **SETTINGS) as server:
        yield server


@pytest.fixture(scope="module")
def http(folder: Path, service_of_videos: ServerProcess, right: object) -> Iterator[HttpEngine]:
    """An engine without a tower, so that only the service can have encoded a frame."""
    flags = (
        TRUST,
        DETAILS,
        "--limit-mm-per-prompt",
        '{"image": 0, "video": 0}',
        "--allowed-media-domains",
        "127.0.0.1",
        "--enable-scale-out",
    )
    with serving(folder, service_of_videos.endpoint, *flags) as engine:
        yield engine


@pytest.mark.story("videos of Qwen3-VL")
@pytest.mark.parametrize("name", QUESTIONS)
def test_videos_answer_as_with_vllms_own_loader_and_tower(
    http: HttpEngine, right: dict[str, tuple[Tokens, list[dict[str, float]]]], name: str
) -> None:
    content, body = QUESTIONS[name]
    tokens, answer = ask(http, content, **body)
    assert tokens == right[name][0]
    assert_equal(answer, right[name][1], TOLERANCE)


def test_a_streamed_answer_counts_the_tokens_of_videos(
    http: HttpEngine, right: dict[str, tuple[Tokens, list[dict[str, float]]]]
) -> None:
    content, _ = QUESTIONS["images and clips"]
    text = http.chat(content, stream=True, stream_options={"include_usage": True}).text
    *_, last = [json.loads(line[6:]) for line in text.splitlines() if line.startswith("data: {")]
    assert tokens_of(last["usage"]) == right["images and clips"][0]


def test_a_rendered_video_answers_as_a_chat(
    folder: Path,
    service_of_videos: ServerProcess,
    http: HttpEngine,
    right: dict[str, tuple[Tokens, list[dict[str, float]]]],
) -> None:
    content, _ = QUESTIONS["images and clips"]
    flags = ("--limit-mm-per-prompt", '{"image": 16, "video": 2}')
    with rendering(folder, service_of_videos.endpoint, *flags) as server:
        rendered = server.render(content)
    assert rendered.status_code == 200, rendered.text
    response = http.post(GENERATE, rendered.json())
    assert response.status_code == 200, response.text
    assert_equal(steps(response.json()["choices"][0]), right["images and clips"][1], TOLERANCE)


@pytest.mark.story("another video changes the answer")
def test_another_video_changes_the_answer(
    http: HttpEngine, right: dict[str, tuple[Tokens, list[dict[str, float]]]]
) -> None:
    """The control: answers about other frames differ more than those of two towers."""
    moved = clip("mp4", frames=45, fps=10.0, seed=8)
    _, answer = ask(http, [text("what happens"), video(moved)])
    with pytest.raises(AssertionError):
        assert_equal(answer, right["a clip"][1], TOLERANCE)


def test_a_second_question_about_a_video_encodes_nothing(
    http: HttpEngine, service_of_videos: ServerProcess
) -> None:
    data = clip("mp4", frames=45, fps=10.0, seed=10)
    encoded = service_of_videos.encodes()
    ask(http, [text("what happens"), video(data)])
    assert service_of_videos.encodes() == encoded + 5, "one for each pair"
    ask(http, [text("a prompt that shares no prefix with the first"), video(data)])
    ask(http, [video(data)], **loading(fps=2))
    assert service_of_videos.encodes() == encoded + 5


def test_shared_pairs_of_two_requests_are_encoded_once(
    http: HttpEngine, service_of_videos: ServerProcess
) -> None:
    one, other = (clip("mp4", frames=20, fps=10.0, seed=seed) for seed in (11, 12))
    encoded = service_of_videos.encodes()
    ask(http, [video(one), text("what happens")])
    ask(http, [video(one), text("and then"), video(other)])
    assert service_of_videos.encodes() == encoded + 4, "two pairs of each"
    ask(http, [text("the same frames, chosen by another rate"), video(one)], **loading(fps=1.5))
    assert service_of_videos.encodes() == encoded + 4


def test_concurrent_callers_share_the_pairs_of_a_video(
    http: HttpEngine, service_of_videos: ServerProcess
) -> None:
    data = clip("mp4", frames=45, fps=10.0, seed=13)
    encoded = service_of_videos.encodes()
    questions = [[text(f"caller {number}"), video(data)] for number in range(8)]
    with ThreadPoolExecutor(8) as pool:
        assert len(list(pool.map(partial(ask, http), questions))) == 8
    assert service_of_videos.encodes() == encoded + 5


def test_another_salt_shares_no_pair(http: HttpEngine, service_of_videos: ServerProcess) -> None:
    data = clip("mp4", frames=20, fps=10.0, seed=14)
    ask(http, [video(data)])
    encoded = service_of_videos.encodes()
    ask(http, [video(data)], cache_salt="another")
    assert service_of_videos.encodes() == encoded + 2


@pytest.mark.parametrize(
    ("part", "body", "status", "message"),
    [
        (video(b"no video at all"), {}, 400, "video 0: "),
        (video(CLIP[:500]), {}, 400, "video 0: "),
        (video(photo(90, 90, 1)), {}, 400, "video 0: "),
        (video(clip("mp4", frames=20, fps=10.0, width=640, height=2)), {}, 400, "video 0: aspect ratio"),
        ({"type": "video_url", "video_url": {"url": "http://169.254.169.254/x.mp4"}}, {}, 403, "video 0: "),
        ({"type": "video_url", "video_url": {"url": "data:video/jpeg;base64,AA,BB"}}, {}, 400, "send a video file"),
        ({"type": "video_url", "video_url": None, "uuid": "someone's"}, {}, 400, "needs its video_url"),
        (video(CLIP), processing(max_pixels=1024), 400, "mm_processor_kwargs.max_pixels is not supported"),
        (video(CLIP), loading(max_frames=8), 400, "media_io_kwargs.video.max_frames is not supported"),
        (video(CLIP), {"chat_template_kwargs": {"add_vision_id": True}}, 400, "add_vision_id"),
        (video(CLIP), {"documents": [{"text": "an <|image_pad|>"}]}, 400, "contains <|image_pad|>"),
    ],
)  # fmt: skip
def test_unservable_videos_are_refused_with_their_own_error(
    http: HttpEngine, part: dict[str, Any], body: dict[str, Any], status: int, message: str
) -> None:
    response = http.chat([text("x"), part], **body)
    assert (response.status_code, response.json()["error"]["code"]) == (status, status), response.text
    assert message in response.json()["error"]["message"]


@pytest.mark.story("a damaged video")
def test_a_video_that_fails_to_decode_fails_only_its_request(
    http: HttpEngine, right: dict[str, tuple[Tokens, list[dict[str, float]]]]
) -> None:
    data = bytearray(with_index_first(clip("mp4", frames=45, fps=10.0, seed=9)))
    piece = len(data) // 20
    # Half of the frames, so that the prompt has some of them. The container's header is unchanged.
    data[-12 * piece : -2 * piece] = bytes(10 * piece)
    broken = http.chat([text("what happens"), video(bytes(data))])
    assert broken.status_code == 400, broken.text
    assert "video 0: frame" in broken.json()["error"]["message"]
    content, body = QUESTIONS["a clip"]
    assert_equal(ask(http, content, **body)[1], right["a clip"][1], TOLERANCE)


def test_a_video_is_loaded_from_an_allowed_domain(
    http: HttpEngine, right: dict[str, tuple[Tokens, list[dict[str, float]]]], tmp_path: Path
) -> None:
    (tmp_path / "clip.mp4").write_bytes(CLIP)
    handler = partial(SimpleHTTPRequestHandler, directory=str(tmp_path))
    with ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        url = f"http://127.0.0.1:{server.server_port}"
        content = [text("what happens"), {"type": "video_url", "video_url": {"url": f"{url}/clip.mp4"}}]
        assert_equal(ask(http, content)[1], right["a clip"][1], TOLERANCE)
        missing = http.chat([{"type": "video_url", "video_url": {"url": f"{url}/none.mp4"}}])
        assert missing.status_code == 422
        assert "video 0: " in missing.json()["error"]["message"]
        server.shutdown()


@pytest.fixture(scope="module")
def counting(folder: Path, service_of_videos: ServerProcess) -> Iterator[VllmEngine]:
    """An engine that takes five images and one video a prompt."""
    limits = {"image": 5, "video": 1}
    engine = VllmEngine(folder, service_of_videos.endpoint, limit_mm_per_prompt=limits)
    yield engine
    engine.close()


@pytest.mark.story("videos of Qwen3-VL")
def test_a_prefill_step_waits_only_for_the_pairs_that_it_reads(counting: VllmEngine, folder: Path) -> None:
    """The last two pairs are of a file that the service gets later: a server with a file can encode all its pairs."""
    settings = VideoSettings.from_folder(folder)
    chosen = settings.clip(VideoInfo(45, 45, 10.0, 160, 96))
    pairs, parts = [], []
    for seed, pair in zip((15, 15, 15, 16, 16), chosen.pairs, strict=True):
        data = clip("mp4", frames=45, fps=10.0, seed=seed)
        pairs.append(Image(data, content_digest(data), pair.grid, settings.tokens(pair), frames=pair))
        name = ImageName(pairs[-1].digest, pair.grid, counting.producer, pair)
        parts.append(
            {
                "type": "image_embeds",
                "image_embeds": {"image_grid_thw": list(pair.grid)},
                **counting.named_fields(name),
            }
        )
    content = [text(each) if isinstance(each, str) else each for each in prompt_parts(chosen, parts)]
    counting.client.submit(pairs[:3])  # the first step reads two, and begins with the third
    request_id = counting.start([text("what happens"), *content])
    counting.run_until(lambda: counting.computed(request_id) == CHUNK_TOKENS)
    for _ in range(50):
        assert not counting.step()
    assert counting.computed(request_id) == CHUNK_TOKENS, "the next step reads pairs that are not there"
    counting.client.submit(pairs[3:])
    assert len(counting.run(request_id)[request_id].tokens) == 8
    counting.assert_nothing_is_held()


def refusal(engine: VllmEngine, *parts: dict[str, Any], **body: Any) -> tuple[int, Any]:
    """Return the status of the middleware's answer, and the content that vLLM would get."""
    status, sent = behind_middleware(engine, list(parts), **body)
    return status, sent and sent["messages"][0]["content"]


def test_limit_mm_per_prompt_counts_videos_and_their_pairs(counting: VllmEngine) -> None:
    assert refusal(counting, video(CLIP))[0] == 200
    assert refusal(counting, video(SHORT), video(SHORT)) == (400, None), "one video, as vLLM says it"
    assert refusal(counting, raw(photo(90, 90, 1)), video(CLIP)) == (400, None), "six images"


def test_video_options_need_trust_request_mm_kwargs(counting: VllmEngine) -> None:
    assert refusal(counting, video(SHORT))[0] == 200
    assert refusal(counting, video(SHORT), **loading(fps=1)) == (400, None), "as vLLM"


def test_a_field_of_a_video_that_the_chat_template_reads_is_refused(counting: VllmEngine) -> None:
    """The template is shown pictures and no video, and would write another prompt."""
    labelled = {**video(SHORT), "label": "seven", "cache_control": {"type": "ephemeral"}}
    assert refusal(counting, labelled)[0] == 200
    assert refusal(counting, labelled, chat_template="{{ part['label'] }}") == (400, None)
    assert refusal(counting, video(SHORT), chat_template="{{ part['label'] }}")[0] == 200


@pytest.mark.story("videos of Qwen2.5-VL and other families")
@pytest.mark.parametrize("without_service", ["refuse", "own_tower"])
def test_videos_of_families_without_times_are_refused_or_left_to_the_own_tower(
    tmp_path: Path, without_service: str
) -> None:
    folder = checkpoint_of("qwen2_5_vl", tmp_path)
    with running(folder, executable=SERVICE, **SETTINGS) as service:
        limits = {"image": 16, "video": 1}
        extra = {"without_service": without_service}
        engine = VllmEngine(folder, service.endpoint, extra=extra, limit_mm_per_prompt=limits)
        part = video(CLIP)
        refused = (400, None) if without_service == "refuse" else (200, [part])
        assert refusal(engine, part) == refused
        engine.close()
