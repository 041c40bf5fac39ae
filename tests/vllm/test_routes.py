"""What the middleware does on each route, in front of an application that only records what vLLM would get."""

import asyncio
import json
import re
from collections.abc import Awaitable, Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from fastapi.routing import APIRoute
from pydantic import TypeAdapter
from vllm.engine.arg_utils import EngineArgs
from vllm.entrypoints.launchers.app import build_app
from vllm.entrypoints.launchers.cli_args import make_arg_parser
from vllm.tasks import GENERATION_TASKS, POOLING_TASKS
from vllm.utils.argparse_utils import FlexibleArgumentParser

from encoder_contract.digest import content_digest
from encoder_contract.geometry import Grid
from prefill_client import BlockingClient, Image, LostImageError, read_images
from prefill_client.vllm.image_name import ImageName, NameSigner
from prefill_client.vllm.middleware import (
    FORMS,
    GENERATE,
    OTHER_ROUTES,
    RENDER_FORMS,
    WEIGHT_ROUTES,
    EncoderServiceMiddleware,
)
from prefill_client.vllm.name_key import read_name_key
from prefill_client.vllm.weight_updates import QUERY
from testing.photos import photo
from testing.server_process import ServerProcess
from testing.vllm_engine import CONNECTOR, data_url, raw
from tests.vllm.service import ROOT

IMAGE, OTHER = photo(200, 120, 1, "PNG"), photo(130, 170, 2, "PNG")
CHAT = "/v1/chat/completions"
Scenario = Callable[["Front"], Awaitable[None]]


class Front:
    """The middleware, and `received`: the bodies that it has passed on.

    It answers with `status`, and its engine has these `weights`, as the engine core tells them.
    """

    def __init__(self, config: Any, **arguments: Any) -> None:
        self.status = 200
        self.config = config
        self.weights: str | None = ""
        self._state = SimpleNamespace(
            vllm_config=config, args=SimpleNamespace(**arguments), engine_client=self
        )
        self._middleware = EncoderServiceMiddleware(self._vllm)
        file = config.ec_transfer_config.ec_connector_extra_config.get("name_key_file", "")
        self.signer = NameSigner(read_name_key(file))
        self.received: list[Any] = []

    async def post(self, path: str, body: Any) -> tuple[int, str]:
        """Send a request; return status and text of the answer."""
        sent: list[Any] = []
        unread = [body if isinstance(body, bytes) else json.dumps(body).encode()]

        async def receive() -> Any:
            if not unread:
                await asyncio.Event().wait()  # the caller stays
            return {"type": "http.request", "body": unread.pop()}

        async def send(message: Any) -> None:
            sent.append(message)

        scope = {"type": "http", "method": "POST", "path": path, "headers": []}
        await self._middleware({**scope, "app": SimpleNamespace(state=self._state)}, receive, send)
        return sent[0]["status"], b"".join(each.get("body", b"") for each in sent[1:]).decode()

    async def chat(self, *parts: Any, **fields: Any) -> tuple[int, str]:
        return await self.post(CHAT, {"messages": [{"role": "user", "content": list(parts)}], **fields})

    def names(self) -> list[str]:
        """Return the identifiers in the last body, one for each image."""
        text = json.dumps(self.received[-1]["messages"])
        return list(filter(self.signer.is_identifier, text.split('"')))

    async def collective_rpc(self, method: str) -> list[str | None]:
        assert method == QUERY
        return [self.weights]

    async def close(self) -> None:
        await self._middleware({"type": "lifespan"}, None, None)  # type: ignore[arg-type]

    async def _vllm(self, scope: Any, receive: Any, send: Any) -> None:
        if scope["type"] == "http":
            self.received.append(json.loads((await receive())["body"]))
            await send({"type": "http.response.start", "status": self.status})
            await send({"type": "http.response.body", "body": b"ok"})


@pytest.fixture
def run(checkpoint: Path, service: ServerProcess) -> Callable[..., None]:
    """Return a function that runs a scenario with a middleware of these options."""

    def run(scenario: Scenario, *, limit: int = 8, arguments: Any = None, **extra: Any) -> None:
        settings = {"endpoints": service.endpoint, **extra}
        config = EngineArgs(
            str(checkpoint),
            dtype="float32",
            max_model_len=1024,
            limit_mm_per_prompt={"image": limit, "video": 0},
            ec_transfer_config={**CONNECTOR, "ec_connector_extra_config": settings},
        ).create_engine_config()

        async def main() -> None:
            front = Front(config, **(arguments or {}))
            try:
                await scenario(front)
            finally:
                await front.close()

        asyncio.run(main())

    return run


@pytest.mark.story("images on every route")
def test_the_identifiers_of_a_batch_contain_their_names(run: Callable[..., None]) -> None:
    """VLLM drops `ec_transfer_params` of a batch."""

    async def scenario(front: Front) -> None:
        conversations = [[{"role": "user", "content": [raw(each)]}] for each in (IMAGE, OTHER)]
        assert await front.post(f"{CHAT}/batch", {"messages": conversations}) == (200, "ok")
        names = [front.signer.name(each, {}) for each in front.names()]
        assert len({name.digest for name in names if name is not None}) == 2

    run(scenario)


def test_the_identifiers_of_beam_search_contain_their_names_and_those_of_other_chats_have_64_digits(
    run: Callable[..., None],
) -> None:
    async def scenario(front: Front) -> None:
        await front.chat(raw(IMAGE), use_beam_search=True)
        (sealed,) = front.names()
        await front.chat(raw(IMAGE), raw(IMAGE))
        (identifier, repeated) = front.names()
        assert re.fullmatch("[0-9a-f]{64}", identifier)
        assert identifier == repeated
        (name,) = front.received[-1]["ec_transfer_params"]["encoder_service"]["images"]
        assert sealed == name + identifier
        assert identifier == front.signer.identifier(ImageName.from_hex(name))

    run(scenario)


def test_a_restart_with_the_same_key_changes_no_name(run: Callable[..., None], tmp_path: Path) -> None:
    """VLLM hashes names into the keys of KV blocks, so those that it has stored elsewhere are found again."""
    hashed: list[tuple[str, str]] = []

    async def scenario(front: Front) -> None:
        await front.chat(raw(IMAGE))
        (name,) = front.names()
        await front.chat(raw(IMAGE), use_beam_search=True)
        (sealed,) = front.names()
        hashed.append((name, sealed))

    for key in "aab":
        (tmp_path / "key").write_text(key * 64)
        run(scenario, name_key_file=str(tmp_path / "key"))
    first, restarted, elsewhere = hashed
    assert restarted == first
    assert set(elsewhere).isdisjoint(first)


def test_an_image_is_found_again_by_the_uuid_of_its_caller(run: Callable[..., None]) -> None:
    async def scenario(front: Front) -> None:
        assert (await front.chat({**raw(IMAGE), "uuid": "mine"}))[0] == 200
        (name,) = front.names()
        again = {"type": "image_url", "image_url": None, "uuid": "mine"}
        assert (await front.chat(raw(OTHER), again))[0] == 200
        assert front.names()[1] == name
        for part, fields in (({**again, "uuid": "theirs"}, {}), (again, {"cache_salt": "another tenant"})):
            status, text = await front.chat(part, **fields)
            assert status == 400
            assert "image 0 has no image_url" in text

    run(scenario)


@pytest.mark.story("image files of an allowed folder")
def test_files_of_the_allowed_folder_are_served(run: Callable[..., None], tmp_path: Path) -> None:
    (tmp_path / "images").mkdir()
    (tmp_path / "images" / "one.png").write_bytes(IMAGE)
    (tmp_path / "two.png").write_bytes(OTHER)

    def part(path: str) -> dict[str, Any]:
        return {"type": "image_url", "image_url": {"url": f"file://{tmp_path}/{path}"}}

    async def scenario(front: Front) -> None:
        await front.chat(raw(IMAGE), raw(OTHER), raw(IMAGE))
        expected = front.names()
        assert (await front.chat(part("images/one.png"), raw(OTHER), part("images/one.png")))[0] == 200
        assert front.names() == expected
        assert (await front.chat(part("two.png")))[0] == 403

    run(scenario, arguments={"allowed_local_media_path": str(tmp_path / "images")})

    async def without(front: Front) -> None:
        status, text = await front.chat(part("images/one.png"))
        assert status == 403
        assert "--allowed-local-media-path" in text

    run(without)


@pytest.mark.parametrize("route", sorted(WEIGHT_ROUTES))
def test_after_an_update_images_are_of_the_weights_that_the_engine_has(
    run: Callable[..., None], route: str
) -> None:
    async def scenario(front: Front) -> None:
        await front.chat(raw(IMAGE))
        names = front.names()
        for weights, reason in [(None, "unknown vision weights"), ("ab" * 32, "model fingerprint")]:
            front.weights = weights
            assert (await front.post(route, {}))[0] == 200
            status, text = await front.chat(raw(IMAGE))
            assert status == 503
            assert reason in text
            assert (await front.chat({"type": "text", "text": "x"}))[0] == 200
        front.weights = ""
        await front.post(route, {})
        assert (await front.chat(raw(IMAGE)))[0] == 200
        assert front.names() == names

    run(scenario)

    async def own_tower(front: Front) -> None:
        front.weights = None
        await front.post(route, {})
        assert (await front.chat(raw(IMAGE)))[0] == 200
        assert front.received[-1]["messages"][0]["content"] == [raw(IMAGE)], (
            "the engine's own tower encodes it"
        )

    run(own_tower, without_service="own_tower")

    async def any_weights(front: Front) -> None:
        front.weights = None
        await front.post(route, {})
        assert (await front.chat(raw(IMAGE)))[0] == 200
        assert len(front.names()) == 1

    run(any_weights, model_fingerprint="any")


def test_an_update_by_another_api_server_is_found_when_a_request_fails(run: Callable[..., None]) -> None:
    async def scenario(front: Front) -> None:
        await front.chat(raw(IMAGE))
        front.weights, front.status = "ab" * 32, 500
        status, text = await front.chat(raw(IMAGE))
        assert status == 503
        assert "weights have changed" in text
        front.status = 200
        status, text = await front.chat(raw(IMAGE))
        assert status == 503
        assert "model fingerprint" in text

    run(scenario)


def test_a_render_server_of_another_release_ends_at_start_with_one_line(checkpoint: Path) -> None:
    config = EngineArgs(str(checkpoint), dtype="float32", max_model_len=1024).create_engine_config()
    assert config.ec_transfer_config is None
    args = SimpleNamespace(ec_transfer_config=SimpleNamespace(ec_connector_extra_config={"endpoints": "x:1"}))
    renderer = SimpleNamespace(model_config=config.model_config, mm_processor=SimpleNamespace())
    state = SimpleNamespace(vllm_config=config, args=args, online_renderer=SimpleNamespace(renderer=renderer))
    sent: list[Any] = []

    async def receive() -> Any:
        return {"type": "lifespan.startup"}

    async def send(message: Any) -> None:
        sent.append(message)

    async def app(*_: object) -> None:
        raise AssertionError("the server does not start")

    scope = {"type": "lifespan", "app": SimpleNamespace(state=state)}
    asyncio.run(EncoderServiceMiddleware(app)(scope, receive, send))
    ((kind, message),) = [(each["type"], each["message"]) for each in sent]
    assert kind == "lifespan.startup.failed"
    assert message.startswith("encoder service: this release of vLLM cannot render without pixels: ")


def test_requests_of_tokens_with_pixels_need_the_engines_own_tower(run: Callable[..., None]) -> None:
    features = {"mm_hashes": {"image": ["5e" * 32]}, "kwargs_data": {"image": ["AAAA" * 1000]}}
    body = {"token_ids": [1], "features": features}

    async def with_tower(front: Front) -> None:
        assert (await front.post(GENERATE, body))[0] == 200
        assert front.received == [body]
        assert (await front.post(GENERATE, {"token_ids": [1]}))[0] == 200

    run(with_tower)

    async def without_tower(front: Front) -> None:
        parts = {
            "token_ids": [1],
            "content_parts": [{"type": "video_url", "url": "data:video/mp4;base64,AA"}],
        }
        for refused in (body, parts):
            status, text = await front.post(GENERATE, refused)
            assert status == 400
            assert "no vision tower" in text

    run(without_tower, limit=0)


@pytest.mark.parametrize("scores_only", [False, True])
def test_rendered_images_stay_submitted_and_those_for_scores_never_are(
    run: Callable[..., None], service: ServerProcess, scores_only: bool
) -> None:
    image = photo(150, 140, 50 + scores_only, "PNG")

    async def scenario(front: Front) -> None:
        await front.chat(raw(OTHER))
        messages = [{"role": "user", "content": [raw(image)]}]
        assert (await front.post(f"{CHAT}/render", {"messages": messages}))[0] == 200
        (identifier,) = front.names()
        (name,) = front.received[-1]["ec_transfer_params"]["encoder_service"]["images"]
        read = ImageName.from_hex(name)
        assert read is not None
        assert read.digest == content_digest(image)
        assert front.signer.identifier(read) == identifier

    run(scenario, scores_only=scores_only)
    with BlockingClient.connect(service.endpoint) as client:
        (known,) = read_images([image], client.description.geometry)
        assert isinstance(known, Image)
        with client.keep_known([known]) as kept:
            assert isinstance(kept.answers[0].error, LostImageError) == scores_only


def test_a_render_that_vllm_fails_is_no_lost_image(run: Callable[..., None]) -> None:
    """VLLM read no rows, so it failed for another reason: an advice to render again would be followed for ever."""

    async def scenario(front: Front) -> None:
        front.status = 500
        messages = [{"role": "user", "content": [raw(photo(150, 140, 52, "PNG"))]}]
        assert await front.post(f"{CHAT}/render", {"messages": messages}) == (500, "ok")

    run(scenario, scores_only=True)
    run(scenario)


def test_an_engine_that_renders_nothing_says_so_itself(run: Callable[..., None]) -> None:
    """Without `--enable-scale-out`, vLLM answers each of these routes with a 403."""
    source = {"type": "base64", "media_type": "image/png", "data": "AA"}
    messages = [{"role": "user", "content": [{"type": "image", "source": source}]}]
    body = {"model": "tiny", "max_tokens": 8, "messages": messages}

    async def scenario(front: Front) -> None:
        front.status = 403
        assert await front.post("/v1/messages/render", body) == (403, "ok")
        assert front.received == [body]

    run(scenario)


def of_content_parts(front: Front, *parts: dict[str, Any], **fields: Any) -> dict[str, Any]:
    """Return a request of tokens with one placeholder for each of these images."""
    token = front.config.model_config.hf_config.image_token_id
    return {
        "token_ids": [token] * len(parts), "sampling_params": {}, "content_parts": [*parts], **fields
    }  # fmt: skip


def url_part(image: bytes, **fields: Any) -> dict[str, Any]:
    return {"type": "image_url", "url": data_url(image), **fields}


@pytest.mark.attack("content parts that vLLM itself would refuse, or that expand to a huge prompt")
def test_content_parts_are_refused_as_by_vllm_and_expand_to_no_more_than_a_prompt(
    run: Callable[..., None],
) -> None:
    large = photo(256, 256, 53, "PNG")
    again = {"type": "image_url", "uuid": "mine"}

    async def with_tower(front: Front) -> None:
        for body, reason in (
            (of_content_parts(front, url_part(OTHER), ec_transfer_params=[1]), "must be an object"),
            (of_content_parts(front, *[url_part(OTHER)] * 9), "At most 8 image(s)"),
        ):
            status, text = await front.post(GENERATE, body)
            assert (status, reason in text) == (400, True), text
        assert not front.received
        assert (await front.post(GENERATE, of_content_parts(front, *[url_part(OTHER)] * 8)))[0] == 200

    run(with_tower)

    async def without_tower(front: Front) -> None:
        parts = [url_part(large, uuid="mine"), *[again] * 5000]
        status, text = await front.post(GENERATE, of_content_parts(front, *parts))
        assert status == 400
        assert "the model takes 1024" in text
        assert not front.received
        assert (await front.post(GENERATE, of_content_parts(front, *parts[:16])))[0] == 200
        assert len(front.received[0]["token_ids"]) == 1024

    run(without_tower, limit=0)


@pytest.mark.attack("an image that a request names many times in few bytes")
def test_an_image_that_a_request_names_many_times_is_submitted_once(
    run: Callable[..., None], service: ServerProcess
) -> None:
    """More often than a call may name images, so that a request cannot use up the calls of its server."""
    image, times = photo(64, 64, 54, "PNG"), 3000

    async def scenario(front: Front) -> None:
        await front.chat(raw(OTHER))
        before = service.metrics().total("submitted_images_total")
        again = {"type": "image_url", "image_url": None, "uuid": "mine"}
        assert (await front.chat({**raw(image), "uuid": "mine"}, *[again] * times))[0] == 200
        assert len(set(front.names())) == 1
        assert len(front.names()) == 1 + times
        assert service.metrics().total("submitted_images_total") == before + 1
        messages = [{"role": "user", "content": [raw(image)]}]
        assert (await front.post(f"{CHAT}/render", {"messages": messages}))[0] == 200
        (identifier,), told = front.names(), front.received[-1]["ec_transfer_params"]
        rows = [{"offset": 4 * index, "length": 4} for index in range(times)]
        features = {"mm_hashes": {"image": [identifier] * times}, "mm_placeholders": {"image": rows}}
        body = {"token_ids": [1], "features": features, "ec_transfer_params": told}
        assert (await front.post(GENERATE, body))[0] == 200
        assert len(front.received[-1]["features"]["mm_metadata"]["image"]) == times
        assert service.metrics().total("submitted_images_total") <= before + 3

    run(scenario)


TAKES_IMAGES = ('"image_url"', '"input_image"', '"image"', '"images"', '"image_embeds"')
"""Keys and types in the schema of a body that can hold an image."""
UNTYPED = {
    "/invocations", "/inference/v1/generate",
    "/v1/chat/completions/render", "/v1/responses/render", "/v1/messages/render",
}  # fmt: skip
"""Routes with images that vLLM parses itself."""


@pytest.fixture(scope="module")
def schemas(checkpoint: Path) -> dict[str, str]:
    """The schema of the body of each POST route of vLLM's server, for all tasks; empty for routes without one."""
    found: dict[str, str] = {}
    arguments = make_arg_parser(FlexibleArgumentParser()).parse_args([])
    for runner, tasks in [("generate", [GENERATION_TASKS]), ("pooling", [(task,) for task in POOLING_TASKS])]:
        model = (
            EngineArgs(str(checkpoint), runner=runner, max_model_len=1024).create_engine_config().model_config
        )
        with pytest.MonkeyPatch.context() as patched:
            patched.setenv("VLLM_SERVER_DEV_MODE", "1")
            apps = [build_app(arguments, tuple(each), model) for each in tasks]
        for route in (each for app in apps for each in app.routes):
            if isinstance(route, APIRoute) and "POST" in route.methods:
                field = route.body_field
                schema = TypeAdapter(field.field_info.annotation).json_schema() if field else {}
                found[route.path] = json.dumps(schema) if field else ""
    return found


def test_every_route_of_vllm_that_takes_images_is_known(schemas: dict[str, str]) -> None:
    taking = {path for path, schema in schemas.items() if any(key in schema for key in TAKES_IMAGES)}
    assert len(taking) >= 15
    known = FORMS.keys() | RENDER_FORMS.keys() | OTHER_ROUTES | {GENERATE}
    assert taking <= known
    assert schemas.keys() >= UNTYPED
    assert known >= UNTYPED
    assert schemas.keys() >= WEIGHT_ROUTES


def test_the_page_names_every_known_route() -> None:
    page = (ROOT / "docs/vllm.md").read_text()
    table = page.split("### Routes\n", 1)[1].split("\n##", 1)[0]
    for route in FORMS.keys() | RENDER_FORMS.keys() | OTHER_ROUTES | WEIGHT_ROUTES | {GENERATE}:
        unversioned = route.removeprefix("/v1").removeprefix("/v2")  # `/rerank` has both, too
        by_ending = route.endswith(("render", "count_tokens"))
        assert by_ending or f"`{route}`" in table or f"`{unversioned}`" in table, route


def test_other_routes_find_embeddings_and_names_however_they_are_written(run: Callable[..., None]) -> None:
    name = NameSigner(read_name_key("")).identifier(ImageName(bytes(32), Grid(1, 4, 4), bytes(16)))
    embeds = json.dumps({"messages": [{"content": [{"type": "image_embeds"}]}]})
    bodies = [
        embeds.encode(),
        embeds.replace("image_embeds", "im\\u0061ge_emb\\u0065ds").encode(),
        embeds.encode("utf-16"),
        embeds.encode("utf-32-be"),
        json.dumps({"uuid": name}).encode(),
        json.dumps({"uuid": name}).replace("uuid", "u\\u0075id").encode(),
    ]

    async def scenario(front: Front) -> None:
        for body in bodies:
            assert (await front.post("/tokenize", body))[0] == 403, body
        assert not front.received
        assert (await front.post("/tokenize", {"tokens": [1, 2], "prompt": "embedding of é"}))[0] == 200

    run(scenario)


@pytest.mark.story("images on every route")
def test_other_routes_keep_their_images_and_say_when_there_is_no_tower(run: Callable[..., None]) -> None:
    body = {"messages": [{"role": "user", "content": [{"type": "image", "source": {"data": "AA"}}]}]}

    async def with_tower(front: Front) -> None:
        assert (await front.post("/v1/messages", body))[0] == 200
        assert front.received == [body]

    run(with_tower)

    async def without_tower(front: Front) -> None:
        status, text = await front.post("/v1/messages", body)
        assert status == 400
        assert "no vision tower" in text
        assert (await front.post("/tokenize", {"prompt": "an image"}))[0] == 200

    run(without_tower, limit=0)
