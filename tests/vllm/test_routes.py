"""What the middleware does on each route, in front of an application that only records what vLLM would get."""

import asyncio
import json
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

from prefill_client.vllm.image_name import NameSigner, is_image_name
from prefill_client.vllm.middleware import FORMS, OTHER_ROUTES, WEIGHT_ROUTES, EncoderServiceMiddleware
from prefill_client.vllm.name_key import read_name_key
from testing.photos import photo
from testing.server_process import ServerProcess
from testing.vllm_engine import CONNECTOR, raw
from tests.vllm.service import ROOT

IMAGE, OTHER = photo(200, 120, 1, "PNG"), photo(130, 170, 2, "PNG")
CHAT = "/v1/chat/completions"
Scenario = Callable[["Front"], Awaitable[None]]


class Front:
    """The middleware, and `received`: the bodies that it has passed on."""

    def __init__(self, config: Any, **arguments: Any) -> None:
        self._state = SimpleNamespace(vllm_config=config, args=SimpleNamespace(**arguments))
        self._middleware = EncoderServiceMiddleware(self._vllm)
        self.received: list[Any] = []

    async def post(self, path: str, body: Any) -> tuple[int, str]:
        """Send a request; return status and text of the answer."""
        sent: list[Any] = []

        async def receive() -> Any:
            return {
                "type": "http.request",
                "body": body if isinstance(body, bytes) else json.dumps(body).encode(),
            }

        async def send(message: Any) -> None:
            sent.append(message)

        scope = {"type": "http", "method": "POST", "path": path, "headers": []}
        await self._middleware({**scope, "app": SimpleNamespace(state=self._state)}, receive, send)
        return sent[0]["status"], b"".join(each.get("body", b"") for each in sent[1:]).decode()

    async def chat(self, *parts: Any, **fields: Any) -> tuple[int, str]:
        return await self.post(CHAT, {"messages": [{"role": "user", "content": list(parts)}], **fields})

    def names(self) -> list[str]:
        """Return the names in the last body, one for each image."""
        text = json.dumps(self.received[-1]["messages"])
        return [each for each in text.split('"') if is_image_name(each)]

    async def close(self) -> None:
        await self._middleware({"type": "lifespan"}, None, None)  # type: ignore[arg-type]

    async def _vllm(self, scope: Any, receive: Any, send: Any) -> None:
        if scope["type"] == "http":
            self.received.append(json.loads((await receive())["body"]))
            await send({"type": "http.response.start", "status": 200})
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


def test_the_images_of_a_batch_are_named_and_contain_their_proofs(run: Callable[..., None]) -> None:
    """VLLM drops `ec_transfer_params` of a batch."""

    async def scenario(front: Front) -> None:
        conversations = [[{"role": "user", "content": [raw(each)]}] for each in (IMAGE, OTHER)]
        assert await front.post(f"{CHAT}/batch", {"messages": conversations}) == (200, "ok")
        signer = NameSigner(read_name_key(""))
        names = [signer.name(each) for each in front.names()]
        assert len({name.digest for name in names if name is not None}) == 2

    run(scenario)


def test_beam_search_gets_names_with_proofs_and_other_chats_names_of_the_image_alone(
    run: Callable[..., None],
) -> None:
    async def scenario(front: Front) -> None:
        signer = NameSigner(read_name_key(""))
        await front.chat(raw(IMAGE), use_beam_search=True)
        (sealed,) = front.names()
        await front.chat(raw(IMAGE))
        (name,) = front.names()
        assert sealed == signer.sealed(name)
        proofs = front.received[-1]["ec_transfer_params"]["encoder_service"]["proofs"]
        assert proofs == [signer.proof(name)]

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
    assert elsewhere[0] == first[0]
    assert elsewhere[1] != first[1], "names with proofs need the same key"


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


@pytest.mark.parametrize("route", ["/update_weights", "/finish_weight_update"])
def test_new_weights_end_the_use_of_the_service(run: Callable[..., None], route: str) -> None:
    async def scenario(front: Front) -> None:
        assert (await front.chat(raw(IMAGE)))[0] == 200
        assert (await front.post(route, {}))[0] == 200
        status, text = await front.chat(raw(IMAGE))
        assert status == 503
        assert "weights were updated" in text
        assert (await front.chat({"type": "text", "text": "x"}))[0] == 200

    run(scenario)

    async def own_tower(front: Front) -> None:
        await front.post(route, {})
        assert (await front.chat(raw(IMAGE)))[0] == 200
        assert front.received[-1]["messages"][0]["content"] == [raw(IMAGE)], (
            "the engine's own tower encodes it"
        )

    run(own_tower, without_service="own_tower")

    async def frozen_vision(front: Front) -> None:
        await front.post(route, {})
        assert (await front.chat(raw(IMAGE)))[0] == 200
        assert len(front.names()) == 1

    run(frozen_vision, model_fingerprint="any")


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
    known = FORMS.keys() | OTHER_ROUTES
    assert taking <= known
    assert schemas.keys() >= UNTYPED
    assert known >= UNTYPED
    assert schemas.keys() >= WEIGHT_ROUTES


def test_the_page_names_every_known_route() -> None:
    page = (ROOT / "docs/vllm.md").read_text()
    table = page.split("### Routes\n", 1)[1].split("\n##", 1)[0]
    for route in FORMS.keys() | OTHER_ROUTES | WEIGHT_ROUTES:
        unversioned = route.removeprefix("/v1").removeprefix("/v2")  # `/rerank` has both, too
        by_ending = route.endswith(("render", "count_tokens"))
        assert by_ending or f"`{route}`" in table or f"`{unversioned}`" in table, route


def test_other_routes_find_embeddings_and_names_however_they_are_written(run: Callable[..., None]) -> None:
    name = f"encsvc1-{'0' * 64}-4x4-{'0' * 32}"
    embeds = json.dumps({"messages": [{"content": [{"type": "image_embeds"}]}]})
    bodies = [
        embeds.encode(),
        embeds.replace("image_embeds", "im\\u0061ge_emb\\u0065ds").encode(),
        embeds.encode("utf-16"),
        embeds.encode("utf-32-be"),
        json.dumps({"features": [name]}).encode(),
        json.dumps({"features": [name]}).replace("encsvc1-", "encsvc1\\u002d").encode(),
    ]

    async def scenario(front: Front) -> None:
        for body in bodies:
            assert (await front.post("/tokenize", body))[0] == 403, body
        assert not front.received
        assert (await front.post("/tokenize", {"tokens": [1, 2], "prompt": "embedding of é"}))[0] == 200

    run(scenario)


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
