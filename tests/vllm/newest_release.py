"""The newest release of vLLM without its engine: its renderer, scheduler and both wrappers of a worker's connector.

Its wheel is built for CUDA, and no engine of it runs on a CPU. Its Python files do, in the environment of an older
build: `python -m tests.vllm.newest_release MODEL ENDPOINT TIER` with those files first on the path. It prints one
JSON line. TIER is "device" if the server has one.
"""

import json
import os
import sys
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

os.environ["VLLM_TARGET_DEVICE"] = "cpu"  # how this wheel tells that it runs on one

import torch
import vllm
from vllm.config import VllmConfig, set_current_vllm_config
from vllm.distributed import init_distributed_environment, initialize_model_parallel
from vllm.distributed.ec_transfer import ensure_ec_transfer_initialized, get_ec_transfer
from vllm.engine.arg_utils import EngineArgs
from vllm.renderers import ChatParams, renderer_from_config
from vllm.sampling_params import SamplingParams
from vllm.utils.hashing import sha256
from vllm.v1.core.kv_cache_utils import get_request_block_hasher, init_none_hash
from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.engine.input_processor import InputProcessor
from vllm.v1.kv_cache_interface import FullAttentionSpec, KVCacheConfig, KVCacheGroupSpec
from vllm.v1.outputs import ModelRunnerOutput
from vllm.v1.request import Request
from vllm.v1.structured_output import StructuredOutputManager
from vllm.v1.worker.ec_connector_model_runner_mixin import ECConnectorModelRunnerMixin
from vllm.v1.worker.gpu.ec_connector import ActiveECConnector

from encoder_contract.digest import content_digest
from prefill_client import BlockingClient, Image, RowRequest, read_images
from prefill_client.vllm.image_name import ImageName, NameSigner, RequestInfo, producer_of
from prefill_client.vllm.name_key import read_name_key
from prefill_client.vllm.parts import KNOWN_FIELDS
from prefill_client.vllm.row_fetcher import Outcome
from testing.photos import photo
from testing.vllm_engine import CHUNK_TOKENS, CONNECTOR, MANAGER
from tests.vllm import part_kinds

BLOCKS, BLOCK_TOKENS = 64, 32
Cache = dict[str, torch.Tensor]
Wrapper = Callable[[Any], AbstractContextManager[Any]]


class Parts:
    """The parts of an engine that run without it, all in one process."""

    def __init__(self, config: VllmConfig, endpoint: str) -> None:
        self.config = config
        self.client = BlockingClient.connect(endpoint)
        self.signer = NameSigner(read_name_key(""))
        self.inputs = InputProcessor(config, renderer_from_config(config))
        spec = FullAttentionSpec(BLOCK_TOKENS, num_kv_heads=1, head_size=32, dtype=torch.float32)
        cache = KVCacheConfig(BLOCKS, [], [KVCacheGroupSpec(["layer"], spec)])
        self.scheduler = Scheduler(config, cache, StructuredOutputManager(config), BLOCK_TOKENS)

    def start(self, request_id: str, content: list[dict[str, Any]]) -> Request:
        """Render a chat and hand it to the scheduler."""
        messages: list[Any] = [{"role": "user", "content": content}]
        _, (rendered,) = self.inputs.renderer.render_chat([messages], ChatParams())
        sampling = SamplingParams(max_tokens=1, temperature=0, extra_args={})
        RequestInfo(images=tuple(part.pop("name") for part in content if "name" in part)).write(
            sampling.extra_args
        )
        made = self.inputs.process_inputs(request_id, rendered, sampling, ("generate",))
        hasher = get_request_block_hasher(BLOCK_TOKENS, sha256)
        request = Request.from_engine_core_request(made, hasher)
        self.scheduler.add_request(request)
        return request

    def named(self, data: bytes, **changes: Any) -> dict[str, Any]:
        """Return the part with which the middleware would replace an image."""
        (image,) = read_images([data], self.client.description.geometry)
        assert isinstance(image, Image)
        name = ImageName(content_digest(data), image.grid, producer_of(self.client.description, ""))
        embeds = {"image_grid_thw": list(image.grid)}
        identifier = self.signer.identifier(name)
        part = {"type": "image_embeds", "image_embeds": embeds, "uuid": identifier, "name": name.hex()}
        return {**part, **changes}

    def step(self, wrapper: Wrapper) -> None:
        """Plan a step, load its rows as a worker does, and pretend that the model ran."""
        planned = self.scheduler.schedule()
        with wrapper(planned) as loaded:
            pass
        ids = list(planned.num_scheduled_tokens)
        ended = [not self.scheduler.requests[each].is_prefill_chunk for each in ids]
        output = ModelRunnerOutput(
            req_ids=ids,
            req_id_to_index={each: index for index, each in enumerate(ids)},
            sampled_token_ids=[[7] if end else [] for end in ended],
            ec_connector_output=loaded,
        )
        self.scheduler.update_from_output(planned, output)

    def fetched(self, data: bytes) -> torch.Tensor:
        """Fetch the rows of an image by another client."""
        with self.client.fetch([RowRequest(content_digest(data))]) as outcomes:
            (rows,) = outcomes
            return torch.from_numpy(rows.array.copy())


@contextmanager
def second_runner(cache: Cache, config: VllmConfig, planned: Any) -> Iterator[Any]:
    """The wrapper of the V2 model runner."""
    with ActiveECConnector(config, cache).maybe_get_output(planned) as output:
        yield output


def by_device(parts: Parts, wrapper: Wrapper) -> int:
    """Prefill images until the rows of one come from the service's device; return how many there were before."""
    transports: list[str] = []
    counts = parts.scheduler.ec_connector._scheduler.counts
    fetched = counts.ended

    def noted(outcome: Outcome, size_bytes: int) -> None:
        transports.append(outcome.transport)
        fetched(outcome, size_bytes)

    counts.ended = noted
    while "device" not in transports and len(transports) < 100:
        image = photo(100, 90, 9100 + len(transports), "PNG")
        parts.client.submit([image])
        request = parts.start(f"device {len(transports)}", [parts.named(image)])
        while not request.is_finished():
            parts.step(wrapper)
    counts.ended = fetched
    return transports.index("device")


def prefilled(parts: Parts, cache: Cache, wrapper: Wrapper, seed: int) -> dict[str, Any]:
    """Prefill up to a missing image, submit it, and continue; return a report."""
    first, second = photo(200, 150, seed, "PNG"), photo(190, 160, seed + 1, "PNG")
    text = {"type": "text", "text": "b" * 300}
    parts.client.submit([first])
    request = parts.start(str(seed), [parts.named(first), text, parts.named(second)])
    begin = request.mm_features[1].mm_position.offset
    steps_without = 0
    while request.num_computed_tokens < begin:
        parts.step(wrapper)
    while steps_without < 20:
        parts.step(wrapper)
        steps_without += 1
    stopped_at = request.num_computed_tokens
    parts.client.submit([second])
    while not request.is_finished():
        parts.step(wrapper)
    names = [feature.identifier for feature in request.mm_features]
    return {
        "stops_at_the_missing_image": stopped_at == begin,
        "inside_a_step": begin % CHUNK_TOKENS != 0,
        "status": request.status.name,
        "rows_equal": [
            torch.equal(cache[name], parts.fetched(data))
            for name, data in zip(names, (first, second), strict=True)
        ],
    }


def refused(parts: Parts, wrapper: Wrapper) -> str:
    """Send a part without rows; return how it ended."""
    part = parts.named(photo(90, 90, 1, "PNG"), uuid="mine")
    request = parts.start("hostile", [part])
    while not request.is_finished():
        parts.step(wrapper)
    return str(request.status.name)


def main() -> None:
    """Run everything with the wrappers of both model runners."""
    model, endpoint, tier = sys.argv[1:]
    extra = {"endpoints": endpoint, "host_gib": 0.05, "grace_s": 30.0}
    config = EngineArgs(
        model, dtype="float32", max_model_len=2048, max_num_batched_tokens=CHUNK_TOKENS, enforce_eager=True,
        block_size=BLOCK_TOKENS, limit_mm_per_prompt={"image": 8, "video": 0},
        ec_transfer_config={**CONNECTOR, "ec_connector_extra_config": extra}, ec_manager_config=MANAGER,
    ).create_engine_config()  # fmt: skip
    config.cache_config.num_gpu_blocks = BLOCKS
    init_none_hash(sha256)
    parts = Parts(config, endpoint)
    with TemporaryDirectory() as folder, set_current_vllm_config(config):
        init_distributed_environment(1, 0, f"file://{folder}/one", backend="gloo")
        initialize_model_parallel()
    ensure_ec_transfer_initialized(config)
    cache: Cache = {}

    def first_runner(planned: Any) -> AbstractContextManager[Any]:
        return ECConnectorModelRunnerMixin.maybe_get_ec_connector_output(planned, cache)

    report: dict[str, Any] = {} if tier == "host" else {"host_images": by_device(parts, first_runner)}
    report |= {
        "version": vllm.__version__,
        "from": str(Path(vllm.__file__).parent),
        "first_runner": prefilled(parts, cache, first_runner, 9000),
        "second_runner": prefilled(parts, cache, lambda planned: second_runner(cache, config, planned), 9010),
        "hostile": refused(parts, first_runner),
        "parts": part_kinds.disagreements(2000, 1),
        "same_fields": KNOWN_FIELDS == part_kinds.KNOWN_FIELDS,
        "held": len(parts.scheduler.ec_connector._scheduler.table),
    }
    parts.scheduler.shutdown()
    get_ec_transfer().shutdown()
    parts.client.close()
    sys.stdout.write(json.dumps(report) + "\n")


if __name__ == "__main__":
    main()
