"""Images between a render server and an engine: lost, or not needed any more, while the service is killed."""

import json
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from testing.photos import photo
from testing.server_process import ServerProcess
from tests.vllm.http_engine import HttpEngine, RenderServer, rendering, serving
from tests.vllm.restartable import Restartable
from tests.vllm.test_held_back import stopped_device
from tests.vllm.test_middleware import assert_equal, content, top
from tests.vllm.test_render import GENERATE, generated, images_of_the_service, rendered, steps
from tests.waiting import PATIENCE_S, until

PARTS = ["a document ", photo(250, 250, 4401, "PNG"), " and many words after it " * 20]
SUBMIT_S = 10.0
# Room for the rows of 32 images, and for the files of about a hundred small photos.
STORE_GIB, SOURCE_GIB = 2 / 1024, 1 / 4096
TOGETHER = 16


@pytest.fixture(scope="module")
def service(checkpoint: Path, patient_command: Path) -> Iterator[Restartable]:
    """A service with little room, which the tests kill, and whose device they stop."""
    service = Restartable(
        checkpoint, executable=patient_command, store_host_gib=STORE_GIB, source_gib=SOURCE_GIB
    )
    service.start()
    yield service
    service.kill()


@pytest.fixture
def server(service: Restartable) -> ServerProcess:
    """Its process now."""
    return service.process


@pytest.fixture(scope="module")
def render(checkpoint: Path, service: Restartable) -> Iterator[RenderServer]:
    with rendering(checkpoint, service.endpoint, submit_timeout_s=SUBMIT_S) as server:
        yield server


@pytest.fixture(scope="module")
def http(
    checkpoint: Path, service: Restartable, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[HttpEngine]:
    """An engine that stores all KV blocks, caches none, and therefore is as two engines: of prefill and of decode."""
    storage = {"shared_storage_path": str(tmp_path_factory.mktemp("kv"))}
    transfer = {
        "kv_connector": "ExampleConnector",
        "kv_role": "kv_both",
        "kv_connector_extra_config": storage,
    }
    flags = [
        "--enable-scale-out", "--no-enable-prefix-caching", "--max-num-batched-tokens", "2048",
        "--kv-transfer-config", json.dumps(transfer),
    ]  # fmt: skip
    variables = {"PYTHONHASHSEED": "0"}
    with serving(
        checkpoint, service.endpoint, *flags, environment=variables, submit_timeout_s=SUBMIT_S
    ) as engine:
        yield engine


@pytest.mark.story("rows are lost before the prefill")
@pytest.mark.story("render servers, and engines that take tokens")
@pytest.mark.attack("a service killed between the render of a request and its prefill")
def test_a_lost_image_is_said_at_once_and_rendered_again(
    service: Restartable, render: RenderServer, http: HttpEngine
) -> None:
    request = rendered(render, PARTS)
    right = generated(http, request)
    service.kill()
    for down in (http.post(GENERATE, request), RenderServer.render(render, content(PARTS))):
        assert down.status_code == 503, down.text
        assert int(down.headers["retry-after"]) >= 1
    service.start()
    began_s = time.monotonic()
    while (lost := http.post(GENERATE, request)).status_code == 503:  # until the client sees the new server
        assert time.monotonic() - began_s < PATIENCE_S
    assert lost.status_code == 410, lost.text
    assert "render the request again" in lost.text
    assert http.metrics()['vllm:encoder_service_answers_total{reason="lost",status="410"}'] == 1
    again = rendered(render, PARTS)
    assert again["features"]["mm_hashes"] == request["features"]["mm_hashes"]
    assert_equal(generated(http, again), right)
    assert_equal(generated(http, request), right)


@pytest.mark.story("prefill and decode split")
def test_a_decode_leg_needs_no_image(service: Restartable, render: RenderServer, http: HttpEngine) -> None:
    parts = [*PARTS, photo(64, 64, 4402, "PNG"), " and more words " * 20]
    request = rendered(render, parts)
    one: dict[str, Any] = {**request, "kv_transfer_params": {"do_remote_decode": True}}
    one["sampling_params"] = {**request["sampling_params"], "max_tokens": 1}
    assert http.post(GENERATE, one).status_code == 200
    right = generated(http, request)
    images = images_of_the_service(http)
    service.kill()
    remote = {"kv_transfer_params": {"do_remote_prefill": True}}
    response = http.post(GENERATE, {**request, **remote})
    chat = http.chat(content(parts), **remote)
    service.start()
    assert response.status_code == chat.status_code == 200, (response.text, chat.text)
    assert_equal(steps(response.json()["choices"][0]), right)
    assert_equal(top(chat.json()["choices"][0]), right)
    assert images_of_the_service(http) == images


def queued(server: ServerProcess) -> float:
    """Return how many images a server has accepted and not encoded yet."""
    return server.metrics().total("queue_images")


def crowd(render: RenderServer, server: ServerProcess, renders: int, seed: int) -> None:
    """Render new images that nobody asks for, and wait until they are encoded."""
    for first in range(seed, seed + renders * TOGETHER, TOGETHER):
        rendered(render, [photo(64, 64, number) for number in range(first, first + TOGETHER)])
    until(lambda: queued(server) == 0)


def test_an_image_is_encoded_again_until_its_file_is_evicted_too(
    server: ServerProcess, render: RenderServer, http: HttpEngine
) -> None:
    parts = ["evicted ", photo(250, 250, 4403), " and words " * 20]
    request = rendered(render, parts)
    crowd(render, server, 3, 44_100)
    encodes = server.encodes()
    right = generated(http, request)
    assert server.encodes() == encodes + 1, "its rows were evicted, and its file was not"
    crowd(render, server, 16, 44_200)
    lost = http.post(GENERATE, request)
    assert lost.status_code == 410, lost.text
    assert_equal(generated(http, rendered(render, parts)), right)


def test_the_images_of_a_refused_render_leave_the_queue(server: ServerProcess, render: RenderServer) -> None:
    """Those of a render stay in it until they are encoded."""
    until(lambda: queued(server) == 0)
    encodes = server.encodes()
    with stopped_device(server):
        rendered(render, [photo(64, 64, 4404)])
        submitted = server.metrics().total("submitted_images_total")
        refused = RenderServer.render(
            render, content([photo(64, 64, 4405 + each) for each in range(4)]), model="unknown"
        )
        assert refused.status_code == 404, refused.text
        assert server.metrics().total("submitted_images_total") == submitted + 4
        until(lambda: queued(server) == 1)
    until(lambda: queued(server) == 0)
    assert server.encodes() == encodes + 1


@pytest.mark.story("prefix caching off")
def test_without_a_prefix_cache_a_rendered_request_answers_as_a_stock_one(
    checkpoint: Path, render: RenderServer, http: HttpEngine
) -> None:
    """Each with names of its own, under which no KV blocks are stored."""
    with rendering(checkpoint, "") as stock:
        for count in (1, 4, 16):
            photos = [photo(64 + 32 * (seed % 5), 64, 44_500 + seed, "PNG") for seed in range(count)]
            parts = [*photos, " and words"]
            right = generated(http, rendered(stock, parts))
            for tenant in ("one", "another"):
                before = images_of_the_service(http)
                assert_equal(generated(http, rendered(render, parts, cache_salt=tenant)), right)
                assert images_of_the_service(http) == before + count
