"""The scheduler's part of the connector: the gate with its table and row source, and plans for the workers."""

from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any, Generic

from vllm.distributed.ec_transfer.ec_connector.base import ECConnectorMetadata, ECConnectorWorkerMetadata

from prefill_client.vllm.cache_manager import gates, show_encoder_cache
from prefill_client.vllm.counts import Counts
from prefill_client.vllm.features import Feature, TowerInput
from prefill_client.vllm.gate import Gate, NamedGate, SharingGate
from prefill_client.vllm.host_memory import HostMemory, Load, Outgoing, Save
from prefill_client.vllm.image_name import NameSigner, is_image_name
from prefill_client.vllm.row_fetcher import AnyQuery, FetchQuery, RowFetcher
from prefill_client.vllm.row_table import Entry, FetchTable, RowTable, SharedTable
from prefill_client.vllm.service_check import check_description, producer_of_engine, row_kind
from prefill_client.vllm.settings import Settings
from prefill_client.vllm.shared_store import SharedStore, StoreQuery, StoreSession
from prefill_client.vllm.staging import Staging
from prefill_client.vllm.worker_side import row_bytes

if TYPE_CHECKING:
    from vllm.config import VllmConfig

# vLLM checks a waiting request nearly a thousand times a second. When nothing else runs, its loop pauses here until
# rows arrive. A request that comes during the pause waits at most this long.
PAUSE_S = 0.004
# After more empty steps than this, nothing runs: with asynchronous scheduling, one step is planned during another.
_EMPTY_STEPS = 3


@dataclass
class LoadPlan(ECConnectorMetadata):  # type: ignore[misc]
    """The rows that every worker loads before a step, and those that one saves after it.

    The rows to load are in host memory at `path`, or are the worker's own copies from a GPU, which it makes for the
    `Staging` at `staging`.
    """

    step: int
    path: str
    staging: bytes = b""
    loads: tuple[Load, ...] = ()
    saves: dict[str, Save] | None = None
    outgoing: Outgoing | None = None


@dataclass
class LoadedUpTo(ECConnectorWorkerMetadata):  # type: ignore[misc]
    """A worker's report, with the output of a step: it has loaded the plans up to this step."""

    step: int

    def aggregate(self, other: "LoadedUpTo") -> "LoadedUpTo":
        """Return the report of all workers: the earlier step."""
        return LoadedUpTo(min(self.step, other.step))


class SchedulerSide(ABC, Generic[AnyQuery]):
    """The connector's part in one scheduler; used only by its thread."""

    counts: Counts
    table: RowTable[AnyQuery]
    gate: Gate[Any]

    def __init__(self, path: str, wait: Callable[[float], None]) -> None:
        """Workers load from the host memory at `path`. `wait` waits for an outcome that the table can process."""
        self._path = path
        self._wait = wait
        self._step = 0
        self._empty_steps = 0  # in a row
        self._to_load: dict[str, Entry[AnyQuery]] = {}  # with the next plan
        # By step: entries that workers may still be reading.
        self._loading: deque[tuple[int, list[Entry[AnyQuery]]]] = deque()

    @abstractmethod
    def allocated(self, feature: Feature) -> None:
        """Note that the step being planned uses an image."""

    @abstractmethod
    def close(self) -> None:
        """Cancel all work; the engine stops."""

    def plan(self, scheduled_tokens: int) -> LoadPlan:
        """Return what the workers load before this step: nothing without scheduled tokens.

        Some of vLLM's model runners do not load in such a step.
        """
        self._step += 1
        self._pause_if_idle(scheduled_tokens)
        if not self._to_load or not scheduled_tokens:
            return LoadPlan(self._step, self._path)
        entries = list(self._to_load.values())
        self._to_load.clear()
        self._loading.append((self._step, entries))
        return LoadPlan(self._step, self._path, loads=tuple(entry.load for entry in entries))

    def loaded(self, up_to: LoadedUpTo) -> None:
        """Release the rows that all workers have copied."""
        while self._loading and self._loading[0][0] <= up_to.step:
            for entry in self._loading.popleft()[1]:
                self.table.end_load(entry)

    def _load(self, identifier: str) -> None:
        """Add an image to the next plan."""
        if identifier not in self._to_load:
            self._to_load[identifier] = self.table.begin_load(identifier)

    def _pause_if_idle(self, scheduled_tokens: int) -> None:
        self._empty_steps = 0 if scheduled_tokens else self._empty_steps + 1
        if self._empty_steps > _EMPTY_STEPS and self.table.has_running:
            self._wait(PAUSE_S)


class FetchingSide(SchedulerSide[FetchQuery]):
    """For an engine whose images the service encodes."""

    def __init__(self, settings: Settings, config: "VllmConfig") -> None:
        """Allocate host memory and connect to the service. An engine with its own tower starts without it."""
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
        self.table = FetchTable(self._memory, self._fetcher, size, self.counts)
        self.gate = gates[config.ec_transfer_config.engine_id] = NamedGate(
            self.table,
            NameSigner(config.ec_transfer_config.engine_id),
            self.counts,
            description=lambda: self._fetcher.description,
            tenant_salt=settings.tenant_salt,
            window_tokens=config.scheduler_config.max_num_batched_tokens + look_ahead(config),
            capacity_rows=self._memory.size_bytes // size,
            gating=settings.gating,
            tower=TowerInput.of(config),
        )
        super().__init__(self._memory.path, wait=lambda timeout_s: self._fetcher.wait(timeout_s))

    def allocated(self, feature: Feature) -> None:
        """Note that the step being planned uses an image."""
        if is_image_name(feature.identifier):
            self._load(feature.identifier)

    def plan(self, scheduled_tokens: int) -> LoadPlan:
        """Return what the workers load before this step, and where they connect."""
        plan = super().plan(scheduled_tokens)
        plan.staging = self._staging.address
        return plan

    def close(self) -> None:
        """Cancel all work; the engine stops."""
        self._fetcher.close()
        self._memory.close()


class SharingSide(SchedulerSide[StoreQuery]):
    """For an engine that encodes images itself and shares the rows of its tower."""

    table: SharedTable

    def __init__(self, settings: Settings, config: "VllmConfig") -> None:
        """Allocate host memory and join the store. Raises `ValueError` if this engine cannot share."""
        self.counts = Counts()
        kind = row_kind(config)
        size_bytes = int(settings.host_gib * (1 << 30))
        self._incoming, self._outgoing = HostMemory(size_bytes), HostMemory(size_bytes)
        session = StoreSession(settings, producer_of_engine(config), kind, self._incoming)
        self.store = SharedStore(session, self._outgoing)
        self.table = SharedTable(
            self.store, self._incoming, self._outgoing, row_bytes(kind.width, kind.dtype), self.counts
        )
        self.gate = SharingGate(
            self.table,
            self.counts,
            tower=TowerInput.of(config),
            window_tokens=config.scheduler_config.max_num_batched_tokens + look_ahead(config),
            gating=settings.gating,
        )
        show_encoder_cache(self.gate, config)
        super().__init__(self._incoming.path, self.store.wait)
        self._to_save: dict[str, Save] = {}  # with the next plan

    def allocated(self, feature: Feature) -> None:
        """Note that the step being planned uses an image: workers load it, or the tower makes it."""
        identifier = feature.identifier
        if identifier in self._to_load:
            return
        if self.table.is_here(identifier):
            self._load(identifier)
        elif save := self.table.begin_save(identifier, feature.data):
            self._to_save[identifier] = save

    def plan(self, scheduled_tokens: int) -> LoadPlan:
        """Return what the workers load before this step and save after it."""
        plan = super().plan(scheduled_tokens)
        if self._to_save:
            plan.saves, self._to_save = self._to_save, {}
            plan.outgoing = Outgoing(self._outgoing.path, self.store.pipe)
        return plan

    def close(self) -> None:
        """Cancel all work and end all leases; the engine stops."""
        self.store.close()
        self._incoming.close()
        self._outgoing.close()


def look_ahead(config: "VllmConfig") -> int:
    """Return how many tokens beyond its own a step may touch, because a drafter reads ahead."""
    speculative = config.speculative_config
    return 0 if speculative is None else speculative.num_speculative_tokens + 1
