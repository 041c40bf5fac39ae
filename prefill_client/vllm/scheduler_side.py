"""The scheduler's part of the connector: the gate with its table and row source, and plans for the workers."""

import logging
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING

from vllm.distributed.ec_transfer.ec_connector.base import ECConnectorMetadata, ECConnectorWorkerMetadata

from prefill_client.transport.connection import Description
from prefill_client.vllm.cache_manager import gates
from prefill_client.vllm.counts import Counts
from prefill_client.vllm.features import Feature, TowerInput
from prefill_client.vllm.gate import PrefillGate
from prefill_client.vllm.host_memory import HostMemory, RowLoad
from prefill_client.vllm.image_name import NameSigner
from prefill_client.vllm.name_key import read_name_key
from prefill_client.vllm.row_fetcher import RowFetcher
from prefill_client.vllm.row_table import RowSlot, RowTable
from prefill_client.vllm.service_check import check_description, engine_model, row_kind
from prefill_client.vllm.staging import Staging
from prefill_client.vllm.vllm_settings import VllmSettings
from prefill_client.vllm.weight_updates import WeightUpdates
from prefill_client.vllm.worker_side import row_bytes

if TYPE_CHECKING:
    from vllm.config import VllmConfig

_log = logging.getLogger("vllm.encoder_service")
# vLLM checks a waiting request nearly a thousand times a second. When nothing else runs, its loop pauses until rows
# arrive. A request that comes during the pause waits at most this long, except where it ends the pause (`sleep_s`).
PAUSE_S = 0.004
# The longest pause that rows and messages end. What neither of them announces is noticed after it.
MAX_SLEEP_S = 1.0
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
        engine = engine_model(config)
        self._check = partial(check_description, settings, config)
        self._fetcher = RowFetcher(
            settings,
            self._memory,
            width=kind.width,
            dtype=kind.dtype,
            check=partial(self._check, engine),
            staging=self._staging,
        )
        self.updates = None if settings.takes_any_model else WeightUpdates(config, self._weights_changed)
        self._engine = engine
        size = row_bytes(kind.width, kind.dtype)
        self._signer = NameSigner(read_name_key(settings.name_key_file))
        self.table = RowTable(self._memory, self._fetcher, size, self.counts)
        self.gate = gates[config.ec_transfer_config.engine_id] = PrefillGate(
            self.table,
            self._signer,
            self.counts,
            description=self._description,
            may_fetch=lambda: self._fetcher.is_joined and not (self.updates and self.updates.is_running),
            tenant_salt=settings.tenant_salt,
            window_tokens=config.scheduler_config.max_num_batched_tokens + look_ahead(config),
            capacity_rows=self._memory.size_bytes // size,
            gating=settings.gating,
            tower=TowerInput.of(config),
            # Some connectors of KV blocks, such as vLLM's example, store the first step as the whole prompt.
            in_one_step=config.kv_transfer_config is not None,
        )
        # A connector of KV blocks has news only in the output of a step.
        self._steps_have_news = config.kv_transfer_config is not None
        # The engine cores of a MoE model with data parallelism step together: a pause would delay the others' answers.
        self._may_pause = config.parallel_config.data_parallel_size == 1
        self._is_woken = False
        self._step = 0
        self._empty_steps = 0  # in a row, since a request has ended
        self._to_load: dict[str, RowSlot] = {}  # with the next plan
        self._loading: deque[tuple[int, list[RowSlot]]] = (
            deque()
        )  # by step: slots that workers may still be reading

    def allocated(self, feature: Feature) -> None:
        """Note that the step being planned uses an image."""
        identifier = feature.identifier
        if self._signer.is_identifier(identifier) and identifier not in self._to_load:
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

    def finished(self, request_id: str) -> None:
        """Note that a request has ended, in any way. The next step looks who gets its host memory."""
        self.gate.finished(request_id)
        self._empty_steps = 0

    def wake_by(self, wake: Callable[[], None]) -> None:
        """Call `wake` on another thread whenever an outcome arrives. From now on, pauses are those of `sleep_s`."""
        if not self._is_woken:
            self._fetcher.wake, self._is_woken = wake, True

    def sleep_s(self, steps_in_flight: int, unfinished: Callable[[], int]) -> float:
        """Return how long the engine core may wait for an outcome or a message, in seconds; 0 if it must step now.

        `steps_in_flight` were planned and have not ended. `unfinished` returns the number of the engine's requests.
        """
        if self._empty_steps <= steps_in_flight or not self.table.has_running or self._fetcher.has_outcomes:
            return 0.0
        parked_s = None if self._steps_have_news else self.gate.parked_for_s(unfinished())
        return PAUSE_S if parked_s is None else min(parked_s, MAX_SLEEP_S)

    def loaded(self, up_to: LoadedUpTo) -> None:
        """Release the rows that all workers have copied."""
        while self._loading and self._loading[0][0] <= up_to.step:
            for slot in self._loading.popleft()[1]:
                self.table.end_load(slot)

    def _description(self) -> Description | None:
        if self.updates is not None:
            self.updates.settle()
        return self._fetcher.description

    def _weights_changed(self, fingerprint: bytes | None) -> None:
        """Take the rows of a service with this model fingerprint from now on; of none if it is unknown."""
        engine = replace(self._engine, fingerprint=fingerprint)
        self._fetcher.rejoin(fingerprint or b"", partial(self._check, engine))

    def _pause_if_idle(self, scheduled_tokens: int) -> None:
        self._empty_steps = 0 if scheduled_tokens else self._empty_steps + 1
        if not scheduled_tokens and self.table.has_running:
            self.counts.empty_step()
        may_pause = self._may_pause and not self._is_woken
        if may_pause and self._empty_steps > _EMPTY_STEPS and self.table.has_running:
            self._fetcher.wait(PAUSE_S)

    def close(self) -> None:
        """Cancel all work; the engine stops."""
        self._fetcher.close()
        self._memory.close()


def look_ahead(config: "VllmConfig") -> int:
    """Return how many tokens beyond its own a step may touch, because a drafter reads ahead."""
    speculative = config.speculative_config
    return 0 if speculative is None else speculative.num_speculative_tokens + 1
