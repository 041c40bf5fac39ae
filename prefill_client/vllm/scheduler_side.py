"""The scheduler's part of the connector: the gate with its table and row source, and plans for the workers."""

import logging
from collections import deque
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING

from vllm.distributed.ec_transfer.ec_connector.base import ECConnectorMetadata, ECConnectorWorkerMetadata

from prefill_client.vllm.cache_manager import gates
from prefill_client.vllm.counts import Counts
from prefill_client.vllm.features import Feature, TowerInput
from prefill_client.vllm.gate import PrefillGate
from prefill_client.vllm.host_memory import HostMemory, RowLoad
from prefill_client.vllm.image_name import NameSigner, is_image_name
from prefill_client.vllm.name_key import read_name_key
from prefill_client.vllm.row_fetcher import RowFetcher
from prefill_client.vllm.row_table import RowSlot, RowTable
from prefill_client.vllm.service_check import check_description, row_kind
from prefill_client.vllm.staging import Staging
from prefill_client.vllm.vllm_settings import VllmSettings
from prefill_client.vllm.worker_side import row_bytes

if TYPE_CHECKING:
    from vllm.config import VllmConfig

_log = logging.getLogger("vllm.encoder_service")
# vLLM checks a waiting request nearly a thousand times a second. When nothing else runs, its loop pauses here until
# rows arrive. A request that comes during the pause waits at most this long.
PAUSE_S = 0.004
# After more empty steps than this, nothing runs: with asynchronous scheduling, one step is planned during another.
_EMPTY_STEPS = 3


@dataclass
class LoadPlan(ECConnectorMetadata):  # type: ignore[misc]
    """The rows that every worker loads before a step.

    They are in host memory at `path`, or are the worker's own copies from a GPU, which it makes for the
    `Staging` at `staging`.
    """

    step: int
    path: str
    staging: bytes = b""
    loads: tuple[RowLoad, ...] = ()


@dataclass
class LoadedUpTo(ECConnectorWorkerMetadata):  # type: ignore[misc]
    """A worker's report, with the output of a step: it has loaded the plans up to this step."""

    step: int

    def aggregate(self, other: "LoadedUpTo") -> "LoadedUpTo":
        """Return the report of all workers: the earlier step."""
        return LoadedUpTo(min(self.step, other.step))


class SchedulerSide:
    """The connector's part in one scheduler; used only by its thread."""

    def __init__(self, settings: VllmSettings, config: "VllmConfig") -> None:
        """Allocate host memory and connect to the service. An engine with its own tower starts without it."""
        _log.info(
            "the engine's own tower encodes the images of requests that pass no middleware: those of the class LLM, of "
            "run-batch, of --grpc and of the Rust front end"
        )
        self.counts = Counts()
        self._memory = HostMemory(int(settings.host_gib * (1 << 30)))
        kind = row_kind(config)
        staging_bytes = int(settings.device_gib * (1 << 30)) if settings.shared_memory else 0
        self._staging = Staging(config.parallel_config.world_size, staging_bytes)
        self._fetcher = RowFetcher(
            settings,
            self._memory,
            width=kind.width,
            dtype=kind.dtype,
            check=partial(check_description, settings, config),
            staging=self._staging,
        )
        size = row_bytes(kind.width, kind.dtype)
        self.table = RowTable(self._memory, self._fetcher, size, self.counts)
        self.gate = gates[config.ec_transfer_config.engine_id] = PrefillGate(
            self.table,
            NameSigner(read_name_key(settings.name_key_file)),
            self.counts,
            description=lambda: self._fetcher.description,
            tenant_salt=settings.tenant_salt,
            window_tokens=config.scheduler_config.max_num_batched_tokens + look_ahead(config),
            capacity_rows=self._memory.size_bytes // size,
            gating=settings.gating,
            tower=TowerInput.of(config),
            # Some connectors of KV blocks, such as vLLM's example, store the first step as the whole prompt.
            in_one_step=config.kv_transfer_config is not None,
        )
        self._step = 0
        self._empty_steps = 0  # in a row
        self._to_load: dict[str, RowSlot] = {}  # with the next plan
        self._loading: deque[tuple[int, list[RowSlot]]] = (
            deque()
        )  # by step: slots that workers may still be reading

    def allocated(self, feature: Feature) -> None:
        """Note that the step being planned uses an image."""
        identifier = feature.identifier
        if is_image_name(identifier) and identifier not in self._to_load:
            self._to_load[identifier] = self.table.begin_load(identifier)

    def plan(self, scheduled_tokens: int) -> LoadPlan:
        """Return what the workers load before this step: nothing without scheduled tokens.

        Some of vLLM's model runners do not load in such a step.
        """
        self._step += 1
        self.table.fetch()
        self._pause_if_idle(scheduled_tokens)
        plan = LoadPlan(self._step, self._memory.path, self._staging.address)
        if self._to_load and scheduled_tokens:
            slots = list(self._to_load.values())
            self._to_load.clear()
            self._loading.append((self._step, slots))
            plan.loads = tuple(slot.load for slot in slots)
        return plan

    def loaded(self, up_to: LoadedUpTo) -> None:
        """Release the rows that all workers have copied."""
        while self._loading and self._loading[0][0] <= up_to.step:
            for slot in self._loading.popleft()[1]:
                self.table.end_load(slot)

    def _pause_if_idle(self, scheduled_tokens: int) -> None:
        self._empty_steps = 0 if scheduled_tokens else self._empty_steps + 1
        if self._empty_steps > _EMPTY_STEPS and self.table.has_running:
            self._fetcher.wait(PAUSE_S)

    def close(self) -> None:
        """Cancel all work; the engine stops."""
        self._fetcher.close()
        self._memory.close()


def look_ahead(config: "VllmConfig") -> int:
    """Return how many tokens beyond its own a step may touch, because a drafter reads ahead."""
    speculative = config.speculative_config
    return 0 if speculative is None else speculative.num_speculative_tokens + 1
