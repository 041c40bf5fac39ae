"""Engines that share KV blocks find those of prompts with images, also after a restart and on two nodes."""

import json
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path

import httpx

from prefill_client.vllm.name_key import VARIABLE
from testing.photos import photo
from testing.processes import EngineProcess, free_port
from testing.server_process import ServerProcess
from testing.vllm_engine import CHUNK_TOKENS, CONNECTOR, MANAGER
from tests.vllm.http_engine import HttpEngine, serving
from tests.vllm.test_middleware import ask, assert_equal, content

ONE_STEP = ("--max-num-batched-tokens", "2048")
EXTERNAL_HITS = "vllm:external_prefix_cache_hits_total"


def counted(engine: HttpEngine, metric: str) -> float:
    """Return the sum of a counter of vLLM's own."""
    lines = httpx.get(engine.url + "/metrics", timeout=30).text.splitlines()
    return sum(float(line.rpartition(" ")[2]) for line in lines if line.startswith(metric + "{"))


def test_two_engines_and_a_restarted_one_share_the_kv_blocks_of_an_image(
    checkpoint: Path, service: ServerProcess, tmp_path: Path
) -> None:
    """By vLLM's own example connector. The engines have different ids, and the second a key of another host."""
    storage = {"shared_storage_path": str(tmp_path / "kv")}
    transfer = {
        "kv_connector": "ExampleConnector",
        "kv_role": "kv_both",
        "kv_connector_extra_config": storage,
    }
    flags = ("--kv-transfer-config", json.dumps(transfer), *ONE_STEP)
    image, other = photo(250, 250, 77, "PNG"), photo(250, 250, 78, "PNG")
    parts = ["a shared document ", image, " and words after it " * 20]
    answers, hits, hits_of_other = [], [], []
    for host in ("one", "another", "one"):
        # Whoever shares KV blocks sets PYTHONHASHSEED: vLLM begins the hashes of blocks with it.
        environment = {"PYTHONHASHSEED": "0", "VLLM_CACHE_ROOT": str(tmp_path / host)}
        with serving(checkpoint, service.endpoint, *flags, environment=environment) as engine:
            answers.append(ask(engine, parts))
            hits.append(counted(engine, EXTERNAL_HITS))
            if host == "another":
                ask(engine, [parts[0], other, parts[2]])
                hits_of_other.append(counted(engine, EXTERNAL_HITS) - hits[-1])
    assert hits[0] == 0
    assert hits[1] == hits[2] > 64, "the image's 64 tokens and text"
    assert hits_of_other == [0], "another image in the first block that is not full of text"
    for again in answers[1:]:
        assert_equal(again, answers[0])


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


def test_two_nodes_with_one_key_answer_every_request(
    checkpoint: Path, service: ServerProcess, tmp_path: Path
) -> None:
    with two_nodes(checkpoint, service.endpoint, tmp_path, "k" * 64, "k" * 64) as engine:
        assert statuses(engine, 100) == [200] * 18


def test_a_node_with_another_key_refuses_the_names(
    checkpoint: Path, service: ServerProcess, tmp_path: Path
) -> None:
    with two_nodes(checkpoint, service.endpoint, tmp_path, "k" * 64, "j" * 64) as engine:
        found = statuses(engine, 200)
    assert set(found) == {200, 500}, "the node of the API server answers, the other refuses"
