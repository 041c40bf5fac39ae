"""Runs a real vLLM engine in this process, with rows from a real server. Tests can step it by hand."""

import os
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from vllm import LLM, RequestOutput, SamplingParams
from vllm.distributed import cleanup_dist_env_and_memory
from vllm.lora.request import LoRARequest

from encoder_contract.digest import content_digest
from encoder_contract.geometry import Grid
from prefill_client import BlockingClient, Image, RowRequest, read_images
from prefill_client.vllm.counts import IMAGES, METRICS
from prefill_client.vllm.image_name import ImageName, NameSigner, RequestInfo, producer_of
from prefill_client.vllm.name_key import read_name_key
from prefill_client.vllm.request_images import blank_url, size_of
from testing.answers import Answer as Answer
from testing.answers import Part as Part
from testing.answers import data_url as data_url
from testing.engine_flags import CHUNK_TOKENS as CHUNK_TOKENS
from testing.engine_flags import CONNECTOR as CONNECTOR
from testing.engine_flags import MANAGER as MANAGER

# How long cancelled calls may hold rows, on a machine that does much else.
HELD_S = 240.0


class VllmEngine:
    """An engine of `vllm`. The service or the engine's own tower encodes its images."""

    def __init__(
        self,
        model: Path,
        endpoint: str,
        *,
        exact: bool = False,
        extra: dict[str, Any] | None = None,
        transfer: dict[str, Any] | None = None,
        **options: Any,
    ) -> None:
        """`transfer` is another connector's configuration; by default, the engine has ours."""
        arguments = {
            "dtype": "float32",
            "enforce_eager": True,
            "max_model_len": 4096,
            "max_num_seqs": 8,
            "max_num_batched_tokens": CHUNK_TOKENS,
            "block_size": 32,
            "limit_mm_per_prompt": {"image": 16, "video": 0},
            "seed": 0,
            "disable_log_stats": False,
            **options,
        }
        settings = {
            "endpoints": endpoint,
            "host_gib": 0.05,
            "grace_s": 100.0,
            "timeout_s": 120.0,
            **(extra or {}),
        }
        if exact:
            arguments["ec_manager_config"] = MANAGER
        self.llm = LLM(
            str(model),
            ec_transfer_config=transfer or {**CONNECTOR, "ec_connector_extra_config": settings},
            **arguments,
        )
        self.config = self.llm.llm_engine.vllm_config
        if self.config.parallel_config.world_size > 1:
            self._leave_cores()
        self.client = BlockingClient.connect(endpoint)
        self.signer = NameSigner(read_name_key(""))
        self.producer = producer_of(self.client.description, "")
        self._stored: set[bytes] = (
            set()
        )  # content digests of images that the service had stored when they were last submitted
        self._grids: dict[bytes, Grid] = {}  # of all submitted images

    @property
    def core(self) -> Any:
        """The engine core of vLLM."""
        return self.llm.llm_engine.engine_core.engine_core

    @property
    def scheduler(self) -> Any:
        """The scheduler of vLLM."""
        return self.core.scheduler

    @property
    def model(self) -> Any:
        """The model that the worker runs."""
        return self.core.model_executor.driver_worker.worker.model_runner.model

    @property
    def side(self) -> Any:
        """Our connector's scheduler side."""
        return self.scheduler.ec_connector._scheduler

    def image(self, data: bytes) -> Image:
        """Return an image as the client reads it from its header."""
        (image,) = read_images([data], self.client.description.geometry)
        assert isinstance(image, Image)
        return image

    def named(self, data: bytes, **changes: Any) -> dict[str, Any]:
        """Return the part with which the middleware replaces an image, with its `name`, without submitting the image.

        If only the server can count the rows, the image must have been submitted before.
        """
        digest = content_digest(data)
        if self.client.description.geometry is None:
            grid = self._grids[digest]
            part: dict[str, Any] = {"type": "image_url", "image_url": {"url": blank_url(*size_of(data))}}
        else:
            grid = grid_of(self.image(data))
            part = {"type": "image_embeds", "image_embeds": {"image_grid_thw": list(grid)}}
        return {**part, **self.named_fields(ImageName(digest, grid, self.producer)), **changes}

    def named_fields(self, name: ImageName) -> dict[str, str]:
        """Return the `uuid` of a named part, and its name, which `start` sends beside the part."""
        return {"uuid": self.signer.identifier(name), "name": name.hex()}

    def submit(self, *images: bytes) -> None:
        """Submit images."""
        for answer in self.client.submit(images):
            assert answer.error is None, answer.error
            assert answer.grid is not None
            self._grids[answer.digest] = answer.grid
            (self._stored.add if answer.cached else self._stored.discard)(answer.digest)

    def rows(self, *images: bytes) -> list[np.ndarray]:
        """Fetch the rows [rows, width] of submitted images."""
        outcomes = self.client.fetch([RowRequest(content_digest(image)) for image in images], timeout_s=60)
        arrays = {outcome.index: outcome.array.copy() for outcome in outcomes}
        return [arrays[index] for index in range(len(images))]

    def start(
        self,
        parts: Sequence[Part | dict[str, Any]],
        *,
        own: bool = False,
        tokens: int = 8,
        adapter: LoRARequest | None = None,
    ) -> str:
        """Add a request to the engine, with named images (raw ones with `own`); return its id."""
        content = [self._part(part, own=own) for part in parts]
        images = [content_digest(part) for part in parts if isinstance(part, bytes) and not own]
        info = RequestInfo(
            stored=tuple(index for index, digest in enumerate(images) if digest in self._stored),
            images=tuple(part.pop("name") for part in content if "name" in part),
        )
        parameters = sampling(tokens)
        parameters.extra_args = {}
        info.write(parameters.extra_args)  # as the middleware does
        (request_id,) = self.llm.enqueue_chat(
            [{"role": "user", "content": content}], parameters, use_tqdm=False, lora_request=adapter
        )
        return str(request_id).partition("-")[0]  # the id in its outputs

    def step(self) -> dict[str, Answer]:
        """Run one step; return the answers that ended in it."""
        outputs = self.llm.llm_engine.step()
        return {output.request_id: _answer(output) for output in outputs if output.finished}

    def run(self, *wanted: str, steps: int = 100_000) -> dict[str, Answer]:
        """Step until these requests have ended; return all answers. Raises `TimeoutError` after `steps` steps."""
        ended: dict[str, Answer] = {}
        for _ in range(steps):
            if set(wanted) <= ended.keys():
                return ended
            ended |= self.step()
        raise TimeoutError(f"after {steps} steps {set(wanted) - ended.keys()} still run")

    def run_until(self, reached: Callable[[], bool], steps: int = 100_000) -> None:
        """Step until a condition holds."""
        for _ in range(steps):
            if reached():
                return
            self.step()
        raise AssertionError(f"the condition does not hold after {steps} steps")

    def abort(self, request_id: str) -> None:
        """Abort a request, as vLLM does when its caller disconnects."""
        self.llm.llm_engine.abort_request([request_id])

    def ask(self, parts: Sequence[Part | dict[str, Any]], *, own: bool = False, tokens: int = 8) -> Answer:
        """Submit the images of a prompt, run the request, and return the answer."""
        return self.ask_all([parts], own=own, tokens=tokens)[0]

    def ask_all(
        self, prompts: Sequence[Sequence[Part | dict[str, Any]]], *, own: bool = False, tokens: int = 8
    ) -> list[Answer]:
        """Submit the images of prompts, run all requests at once, and return the answers."""
        if not own:
            self.submit(*(part for parts in prompts for part in parts if isinstance(part, bytes)))
        started = [self.start(parts, own=own, tokens=tokens) for parts in prompts]
        ended = self.run(*started)
        return [ended[request_id] for request_id in started]

    def computed(self, request_id: str) -> int:
        """Return the number of tokens of a request that are prefilled or scheduled in the last step."""
        return next(
            int(request.num_computed_tokens)
            for known, request in self.scheduler.requests.items()
            if known.startswith(f"{request_id}-")
        )

    def fetched(self) -> float:
        """Return how many images it has fetched the rows of, as its metrics say."""
        name = METRICS[IMAGES][0].removesuffix("_total")
        return sum(float(each.value) for each in self.llm.get_metrics() if each.name == name)

    def forget(self) -> None:
        """Empty vLLM's prefix cache and encoder cache."""
        self.llm.reset_prefix_cache()
        self.scheduler.reset_encoder_cache()

    def assert_nothing_is_held(self) -> None:
        """Check that no rows, reservations or requests are left."""
        side = self.side
        deadline = time.monotonic() + HELD_S
        staged = side._staging._staged
        while (
            len(side.table) or staged
        ) and time.monotonic() < deadline:  # cancelled queries end with their calls
            side.gate.failed()
        assert len(side.table) == len(staged) == 0
        assert side.gate._room.held == 0
        assert side._memory.free_bytes == side._memory.size_bytes
        assert not side.gate._prompts
        assert not side.gate._room._line.holders

    def close(self) -> None:
        """End the engine, so that this process can start another."""
        self.client.close()
        self.llm.llm_engine.engine_core.shutdown()
        del self.llm
        cleanup_dist_env_and_memory()

    def _leave_cores(self) -> None:
        """Pin the workers of all ranks to one core, and leave the other cores to the server.

        Between steps each worker calls `sched_yield` in a loop. If two cores run such loops, Linux 6.18 gives other
        processes no time on them for up to a minute.
        """
        core = max(os.sched_getaffinity(0))
        for worker in self.core.model_executor.workers:
            os.sched_setaffinity(worker.proc.pid, {core})

    def _part(self, part: Part | dict[str, Any], *, own: bool) -> dict[str, Any]:
        if isinstance(part, dict):
            return {**part}
        if isinstance(part, str):
            return {"type": "text", "text": part}
        return raw(part) if own else self.named(part)


def tower_output(engine: VllmEngine) -> list[torch.Tensor]:
    """Return a list to which the engine's own tower appends the rows [rows, width] of each image."""
    encode = engine.model.embed_multimodal
    encoded: list[torch.Tensor] = []

    def recording(**inputs: Any) -> Any:
        rows = encode(**inputs)
        encoded.extend(each.clone() for each in rows)
        return rows

    engine.model.embed_multimodal = recording
    return encoded


def raw(data: bytes) -> dict[str, Any]:
    """Return the part of an image as callers send it."""
    return {"type": "image_url", "image_url": {"url": data_url(data)}}


def sampling(tokens: int) -> SamplingParams:
    """Return parameters for greedy sampling that return the five likeliest tokens of each step."""
    return SamplingParams(max_tokens=tokens, temperature=0, logprobs=5, ignore_eos=True)


def grid_of(image: Image) -> Grid:
    """Return the grid of an image whose format is not rare."""
    assert image.grid is not None
    return image.grid


def _answer(output: RequestOutput) -> Answer:
    (answer,) = output.outputs
    top = tuple(
        {token: float(each.logprob) for token, each in step.items()} for step in answer.logprobs or ()
    )
    return Answer(tuple(answer.token_ids), top, str(answer.finish_reason))
