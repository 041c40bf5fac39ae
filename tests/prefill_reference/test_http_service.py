"""The reference prefill service over HTTP, with the official OpenAI client and with bad input."""

import asyncio
import base64
import json
import shutil
import socket
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import openai
import pytest
import transformers
import uvicorn

from encoder_contract.errors import ForbiddenError
from encoder_contract.settings import ConfigError
from encoder_contract.turns import Room
from encoder_service.app import Server
from prefill_client import EncoderClient
from prefill_client.media.destinations import Destinations
from prefill_client.media.image_loader import ImageLoader
from prefill_reference.cli import main
from prefill_reference.config import ServiceConfig
from prefill_reference.http_service import HttpService, Limits
from testing.clips import clip
from testing.photos import data_url, photo
from tests.chats import chat_of
from tests.gate import Gate
from tests.operator_view import fetches_wait_for, settled
from tests.waiting import soon

MODEL = "tiny"
FORBIDDEN = "http://host/forbidden.jpg"
FIRST, SECOND = photo(300, 220, 1), photo(256, 400, 2, orientation=6)


class Service:
    """The running service and its official client."""

    def __init__(self, port: int) -> None:
        self.port = port
        self.openai = openai.AsyncOpenAI(
            base_url=f"http://127.0.0.1:{port}/v1", api_key="none", max_retries=0, timeout=110
        )

    async def ask(self, *messages: dict[str, Any], **options: Any) -> Any:
        options = {"max_tokens": 6, "temperature": 0, **options}
        return await self.openai.chat.completions.create(model=MODEL, messages=list(messages), **options)


@asynccontextmanager
async def serving(
    client: EncoderClient, checkpoint: Path, limits: Limits, loader: ImageLoader | None = None
) -> AsyncIterator[Service]:
    with chat_of(client, checkpoint) as chat, socket.create_server(("127.0.0.1", 0)) as listener:
        http = HttpService(
            chat,
            chat._tokenizer,
            MODEL,
            image_loader=loader or ImageLoader(Destinations([]), max_bytes=1 << 20, timeout_s=1),
            video_loader=ImageLoader(Destinations([]), max_bytes=1 << 20, timeout_s=1, what="video"),
            limits=limits,
        )
        server = uvicorn.Server(uvicorn.Config(http.app(), log_level="warning"))
        running = asyncio.create_task(server.serve(sockets=[listener]))
        while not server.started:
            await asyncio.sleep(0.01)
        service = Service(listener.getsockname()[1])
        # Its client, left open, would close itself in the loop of whichever test runs when it is collected, and fail.
        async with service.openai:
            yield service
        server.should_exit = True
        await running


@pytest.fixture
async def service(client: EncoderClient, checkpoint: Path) -> AsyncIterator[Service]:
    limits = Limits(requests=2, body_bytes=4 << 20, request_s=100)
    async with serving(client, checkpoint, limits) as service:
        yield service


def user(text: str, *urls: str) -> dict[str, Any]:
    images = [{"type": "image_url", "image_url": {"url": url}} for url in urls]
    return {"role": "user", "content": [*images, {"type": "text", "text": text}]}


async def test_openai_client_gets_an_answer_about_images(service: Service) -> None:
    answer = await service.ask(user("What is this?", data_url(FIRST), data_url(SECOND)))
    assert answer.choices[0].finish_reason in ("length", "stop")
    assert answer.usage.completion_tokens <= 6
    assert answer.usage.prompt_tokens > 120
    assert [model.id async for model in service.openai.models.list()] == [MODEL]


async def test_the_context_of_a_trace_reaches_the_encoder(
    service: Service, caplog: pytest.LogCaptureFixture
) -> None:
    known = "4bf92f3577b34da6a3ce929d0e0e4736"
    caplog.set_level("INFO")
    question = user("What is this?", data_url(photo(200, 140, 21)))
    for context in (f"00-{known}-00f067aa0ba902b7-01", "nonsense"):
        await service.ask(question, extra_headers={"traceparent": context})
    fields = [record.fields for record in caplog.records if hasattr(record, "fields")]
    assert {line["trace"] for line in fields if "trace" in line} == {known}


async def test_a_streamed_answer_equals_the_complete_one(service: Service) -> None:
    question = user("What is this?", data_url(FIRST))
    whole = await service.ask(question)
    stream = await service.ask(question, stream=True, stream_options={"include_usage": True})
    pieces = [piece async for piece in stream]
    text = "".join(piece.choices[0].delta.content or "" for piece in pieces if piece.choices)
    assert text == whole.choices[0].message.content
    assert pieces[-1].usage.completion_tokens == whole.usage.completion_tokens


async def test_follow_up_turn_uses_the_kv_cache_and_fetches_only_the_new_image(
    service: Service, server: Server
) -> None:
    question = user("What is this?", data_url(FIRST))
    answer = await service.ask(question)
    reply = {"role": "assistant", "content": answer.choices[0].message.content}
    again = await service.ask(question, reply, user("And this?", data_url(SECOND)))
    assert again.usage.prompt_tokens_details.cached_tokens >= answer.usage.prompt_tokens - 1
    await settled(server, "encoded_images_total", 2)


async def test_sampling_with_a_seed_repeats_itself(service: Service) -> None:
    options = {"temperature": 1.5, "top_p": 0.9, "max_tokens": 12}
    answers = [
        (await service.ask(user("Tell"), seed=seed, **options)).choices[0].message for seed in (1, 1, 2)
    ]
    assert answers[0].content == answers[1].content
    assert answers[0].content != answers[2].content


async def test_a_bad_image_is_a_400_that_names_it(service: Service) -> None:
    with pytest.raises(openai.BadRequestError, match="image 1 of the prompt"):
        await service.ask(user("What?", data_url(FIRST), data_url(b"no image")))
    bad = ("data:image/jpeg;base64,@@@@", "data:image/jpeg,abc", "ftp://host/a.jpg", "http://[", "no url")
    for url in bad:
        with pytest.raises(openai.BadRequestError):
            await service.ask(user("What?", url))
    with pytest.raises(openai.PermissionDeniedError, match=r"169\.254\.169\.254"):
        await service.ask(user("What?", "http://169.254.169.254/latest/meta-data"))
    assert (await service.ask(user("Still there?"))).choices


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"model": "other"}, "unknown model 'other'"),
        ({"messages": []}, "messages"),
        ({"temperature": 3}, "temperature"),
        ({"tools": []}, "tools"),
        ({"n": 2}, "n:"),
        ({"messages": [{"role": "robot", "content": "x"}]}, "role"),
    ],
)
async def test_unsupported_fields_are_refused_by_name(
    service: Service, change: dict[str, Any], message: str
) -> None:
    body = {"model": MODEL, "messages": [{"role": "user", "content": "hi"}], **change}
    with pytest.raises(openai.BadRequestError, match=message):
        await service.openai.post("/chat/completions", body=body, cast_to=object)


async def test_a_body_that_is_too_large_is_refused(service: Service) -> None:
    with pytest.raises(openai.BadRequestError, match="more than 4194304 bytes"):
        await service.ask({"role": "user", "content": "x" * (5 << 20)})


async def test_requests_over_the_bound_are_refused_until_one_ends(
    service: Service, server: Server, gate: Gate
) -> None:
    with gate.closed():
        waiting = [
            asyncio.create_task(service.ask(user("What?", data_url(photo(100, 100, seed)))))
            for seed in (5, 6)
        ]
        await fetches_wait_for(server, 2)
        with pytest.raises(openai.RateLimitError) as refused:
            await service.ask(user("Hello"))
        assert refused.value.response.headers["retry-after"] == "1"
    await asyncio.gather(*waiting)
    assert (await service.ask(user("Hello"))).choices


async def test_hanging_up_cancels_the_request(service: Service, server: Server, gate: Gate) -> None:
    body = json.dumps(
        {"model": MODEL, "messages": [user("What?", data_url(photo(100, 100, 9)))], "max_tokens": 2}
    ).encode()
    with gate.closed():
        _, writer = await asyncio.open_connection("127.0.0.1", service.port)
        head = f"POST /v1/chat/completions HTTP/1.1\r\nHost: x\r\nContent-Length: {len(body)}\r\n\r\n"
        writer.write(head.encode() + body)
        await writer.drain()
        await fetches_wait_for(server, 1)
        writer.close()
        await fetches_wait_for(server, 0)
    assert (await service.ask(user("Hello"))).choices


@pytest.mark.parametrize(
    ("given", "environment", "message"),
    [
        ({}, {}, "--model"),
        ({"model": Path("m"), "chunk_tokens": 0}, {}, "--chunk-tokens must be from 1 to 1048576"),
        ({"model": Path("m")}, {"PREFILLSVC_CHUNKS": "5"}, "PREFILLSVC_CHUNKS is not a setting"),
        (
            {"model": Path("m")},
            {"PREFILLSVC_CHUNK_TOKENS": "five"},
            "PREFILLSVC_CHUNK_TOKENS=five: must be int",
        ),
        ({"model": Path("m")}, {"PREFILLSVC_DTYPE": "int8"}, "PREFILLSVC_DTYPE=int8: must be one of"),
        ({"model": Path("m"), "listen": "nowhere"}, {}, "--listen"),
    ],
)
def test_unknown_and_bad_settings_are_errors_at_start(
    given: dict[str, Any], environment: dict[str, str], message: str
) -> None:
    with pytest.raises(ConfigError, match=message):
        ServiceConfig.read(given, environment)


def test_flags_win_over_the_environment() -> None:
    environment = {"PREFILLSVC_MODEL": "a", "PREFILLSVC_CHUNK_TOKENS": "7", "PREFILLSVC_IMAGE_S": "2.5"}
    config = ServiceConfig.read({"model": Path("b")}, environment)
    assert config == ServiceConfig(model=Path("b"), chunk_tokens=7, image_s=2.5)


def test_an_unservable_model_ends_the_start(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    assert main(["--model", str(tmp_path)]) == 2
    assert "config.json is missing" in capsys.readouterr().err
    assert main(["--model", str(tmp_path), "--chunk-tokens", "0"]) == 2
    assert "--chunk-tokens must be from 1 to 1048576" in capsys.readouterr().err


async def test_a_chat_about_a_video_is_answered_and_a_bad_one_is_named(service: Service) -> None:
    def about(data: bytes) -> dict[str, Any]:
        url = "data:video/mp4;base64," + base64.b64encode(data).decode()
        parts = [{"type": "video_url", "video_url": {"url": url}}, {"type": "text", "text": "What happens?"}]
        return {"role": "user", "content": parts}

    answer = await service.ask(about(clip("mp4", frames=30, fps=10.0)))
    assert answer.usage.prompt_tokens > 40
    assert answer.usage.completion_tokens > 0
    with pytest.raises(openai.BadRequestError, match="video 0: no video in a supported container"):
        await service.ask(about(b"no video"))


class Endless(ImageLoader):
    """Refuses one URL once the other downloads have started. Those never end by themselves."""

    def __init__(self, others: int) -> None:
        super().__init__(Destinations([]), max_bytes=1 << 20, timeout_s=1)
        self.begun = asyncio.Barrier(others + 1)
        self.running = 0

    async def load(self, url: str, lookups: Room | None = None) -> bytes:
        self.running += 1
        try:
            await self.begun.wait()
            if url == FORBIDDEN:
                raise ForbiddenError("not this one")
            return await asyncio.get_running_loop().create_future()
        finally:
            self.running -= 1


async def test_a_failed_image_cancels_the_other_downloads(client: EncoderClient, checkpoint: Path) -> None:
    others = ["http://host/1.jpg", "http://host/2.jpg"]
    loader = Endless(len(others))
    async with serving(client, checkpoint, Limits(), loader=loader) as service:
        with pytest.raises(openai.PermissionDeniedError, match="not this one"):
            await service.ask(user("What?", FORBIDDEN, *others))
        await soon(lambda: loader.running == 0)


async def test_an_answer_cut_off_by_the_models_limit_has_finish_reason_length(
    client: EncoderClient, checkpoint: Path, tmp_path: Path
) -> None:
    short, room, question = Path(shutil.copytree(checkpoint, tmp_path / "short")), 3, user("What is this?")
    prompt = transformers.AutoTokenizer.from_pretrained(short).apply_chat_template(
        [question], add_generation_prompt=True, return_dict=True
    )
    config = json.loads((short / "config.json").read_text())
    config["text_config"]["max_position_embeddings"] = len(prompt["input_ids"]) + room
    (short / "config.json").write_text(json.dumps(config))
    async with serving(client, short, Limits()) as service:
        whole = await service.ask(question, max_tokens=room + 5)
        stream = await service.ask(question, max_tokens=room + 5, stream=True)
        ends = [piece.choices[0].finish_reason async for piece in stream if piece.choices]
    assert whole.usage.completion_tokens == room
    assert whole.choices[0].finish_reason == "length"
    assert ends[-1] == "length"
