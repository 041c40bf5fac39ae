"""Engines that share KV blocks find those of prompts with images, also after a restart and on two nodes."""

import json
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from prefill_client.vllm.name_key import VARIABLE
from testing.photos import photo
from testing.processes import EngineProcess, free_port
from testing.server_process import ServerProcess
from testing.vllm_engine import CHUNK_TOKENS, CONNECTOR, MANAGER, Part, VllmEngine
from tests.vllm.http_engine import HttpEngine
from tests.vllm.test_middleware import content

TOLERANCE = 1e-5


def matches(engine: VllmEngine) -> list[int]:
    """Return a list that gets the number of tokens that the shared KV blocks have for each prompt."""
    connector, found = engine.scheduler.connector, list[int]()
    ask = connector.get_num_new_matched_tokens

    def noted(*arguments: Any) -> Any:
        tokens, is_async = ask(*arguments)
        found.append(tokens)
        return tokens, is_async

    connector.get_num_new_matched_tokens = noted
    return found


@pytest.mark.story("KV blocks shared by engines, or kept over a restart")
@pytest.mark.parametrize("exact", [False, True], ids=["by step", "by image"])
def test_two_engines_share_the_kv_blocks_of_an_image(
    checkpoint: Path, service: ServerProcess, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, exact: bool
) -> None:
    """By vLLM's own example connector, which stores what the first step prefills as the whole prompt.

    The second engine would end if the wait for a new image had divided the prompt of the first. It has another id, as
    an engine on another host or after a restart, and the same key.
    """
    monkeypatch.setenv(VARIABLE, "k" * 64)
    monkeypatch.setenv("PYTHONHASHSEED", "0")  # as everybody who shares blocks: hashes begin with it
    storage = {"shared_storage_path": str(tmp_path / "kv")}
    transfer = {
        "kv_connector": "ExampleConnector",
        "kv_role": "kv_both",
        "kv_connector_extra_config": storage,
    }
    image, other = (photo(250, 250, 77 + 2 * exact + number, "PNG") for number in range(2))
    parts: list[Part] = ["a shared document ", image, " and words after it " * 20]
    answers, found, ids = [], [], set()
    for host in ("one", "another"):
        monkeypatch.setenv("VLLM_CACHE_ROOT", str(tmp_path / host))
        engine = VllmEngine(
            checkpoint,
            service.endpoint,
            exact=exact,
            kv_transfer_config=transfer,
            max_num_batched_tokens=2048,
        )
        try:
            ids.add(engine.config.ec_transfer_config.engine_id)
            matched = matches(engine)
            answers.append(engine.ask(parts))
            found.append(max(matched))
            if host == "another":
                matched.clear()
                engine.ask([parts[0], other, parts[2]])
                assert max(matched) == 0, "another image is another prompt"
        finally:
            engine.close()
    assert len(ids) == 2
    assert found[0] == 0
    assert found[1] > 64, "the image's 64 tokens and the text beside it"
    assert answers[0].distance(answers[1]) <= TOLERANCE


@contextmanager
def two_nodes(checkpoint: Path, endpoint: str, tmp_path: Path, *keys: str) -> Iterator[HttpEngine]:
    """Data parallel over two processes, as on two nodes: one has the API server, the other is headless."""
    port = free_port()
    nodes = ["--data-parallel-size", "2", "--data-parallel-size-local", "1", "--data-parallel-address", "127.0.0.1",
             "--data-parallel-rpc-port", str(port)]  # fmt: skip
    settings = {"endpoints": endpoint, "host_gib": 0.05, "grace_s": 5.0}
    headless = [
        Path(sys.executable).with_name("vllm"), "serve", checkpoint, "--headless", "--dtype", "float32",
        "--enforce-eager", "--max-model-len", "4096", "--max-num-seqs", "8",
        "--max-num-batched-tokens", str(CHUNK_TOKENS), "--block-size", "32",
        "--limit-mm-per-prompt", '{"image": 16, "video": 0}', *nodes, "--data-parallel-start-rank", "1",
        "--ec-transfer-config", json.dumps({**CONNECTOR, "ec_connector_extra_config": settings}),
        "--ec-manager-config", json.dumps(MANAGER),
    ]  # fmt: skip
    environments = [
        {"VLLM_CACHE_ROOT": str(tmp_path / f"node {node}"), VARIABLE: key} for node, key in enumerate(keys)
    ]
    engine = HttpEngine(checkpoint, endpoint, *nodes, "--api-server-count", "1", environment=environments[0])
    other = EngineProcess("", headless, {"VLLM_ENABLE_V1_MULTIPROCESSING": "1", **environments[1]})
    try:
        engine.wait_until_it_answers()
        yield engine
    finally:
        other.stop()
        engine.stop()


def statuses(engine: HttpEngine, seed: int) -> list[int]:
    """Ask about 18 images, six at once."""

    def ask(number: int) -> int:
        return engine.chat(content([f"h{number} ", photo(200, 150, seed + number, "PNG")])).status_code

    with ThreadPoolExecutor(6) as callers:
        return list(callers.map(ask, range(18)))


@pytest.mark.story("data parallel, each engine on one host")
def test_two_nodes_with_one_key_answer_every_request(
    checkpoint: Path, service: ServerProcess, tmp_path: Path
) -> None:
    with two_nodes(checkpoint, service.endpoint, tmp_path, "k" * 64, "k" * 64) as engine:
        assert statuses(engine, 100) == [200] * 18
