"""The scheduler's part of the connector of an engine that encodes itself and shares what its tower makes."""

from typing import TYPE_CHECKING

from prefill_client.vllm.cache_manager import show_encoder_cache
from prefill_client.vllm.counts import Counts
from prefill_client.vllm.engine_checkpoint import producer_of_engine
from prefill_client.vllm.host_memory import HostMemory
from prefill_client.vllm.load_plan import LoadedUpTo, LoadPlan, Outgoing, Save
from prefill_client.vllm.prompt_images import Feature, TowerInput
from prefill_client.vllm.scheduler_side import look_ahead
from prefill_client.vllm.service_check import row_kind
from prefill_client.vllm.settings import Settings
from prefill_client.vllm.shared_store import SharedStore
from prefill_client.vllm.shared_table import SharedImage, SharedTable
from prefill_client.vllm.sharing_gate import SharingGate
from prefill_client.vllm.steps import Steps
from prefill_client.vllm.store_session import StoreSession
from prefill_client.vllm.worker_side import row_bytes

if TYPE_CHECKING:
    from vllm.config import VllmConfig


class SharingSide:
    """One for each scheduler; of its thread."""

    def __init__(self, settings: Settings, config: "VllmConfig") -> None:
        """Join the store and set host memory apart. Raises `ValueError` where this engine cannot share."""
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
        self._steps = Steps[SharedImage](
            self._incoming.path, fetching=lambda: self.table.fetching, wait=self.store.wait
        )
        self._to_save: dict[str, Save] = {}  # with the next plan

    def allocated(self, feature: Feature) -> None:
        """The scheduler counts on an image in the step that it is planning: it is loaded, or the tower makes it."""
        identifier = feature.identifier
        if identifier in self._steps:
            return
        if self.table.is_here(identifier):
            self._steps.load(self.table.begin_load(identifier))
        elif save := self.table.begin_save(identifier, feature.data):
            self._to_save[identifier] = save

    def plan(self, scheduled_tokens: int) -> LoadPlan:
        """Return what the workers are to load before this step and to save in it."""
        plan = self._steps.plan(scheduled_tokens)
        if self._to_save:
            plan.saves, self._to_save = self._to_save, {}
            plan.outgoing = Outgoing(self._outgoing.path, self.store.pipe)
        return plan

    def loaded(self, up_to: LoadedUpTo) -> None:
        """Let go of what the workers have copied."""
        for image in self._steps.loaded(up_to):
            self.table.end_load(image)

    def close(self) -> None:
        """End what is under way, and with it every lease; the engine stops."""
        self.store.close()
        self._incoming.close()
        self._outgoing.close()
