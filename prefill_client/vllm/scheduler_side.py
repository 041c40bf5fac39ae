"""The scheduler's part of the connector: the gate and all that it needs, and what the workers are told to load."""

from functools import partial
from typing import TYPE_CHECKING
from weakref import WeakValueDictionary

from prefill_client.vllm.counts import Counts
from prefill_client.vllm.gate import Gate
from prefill_client.vllm.host_memory import HostMemory
from prefill_client.vllm.image_name import NameSigner, is_ours
from prefill_client.vllm.load_plan import LoadedUpTo, LoadPlan
from prefill_client.vllm.prompt_images import Feature, TowerInput
from prefill_client.vllm.row_fetcher import RowFetcher
from prefill_client.vllm.row_table import Rows, RowTable
from prefill_client.vllm.service_check import check_description, row_kind
from prefill_client.vllm.settings import Settings
from prefill_client.vllm.steps import Steps
from prefill_client.vllm.worker_side import row_bytes

if TYPE_CHECKING:
    from vllm.config import VllmConfig

gates: "WeakValueDictionary[str, Gate]" = WeakValueDictionary()
"""The gate of each scheduler of this process by its engine id: where the cache manager finds it."""


class SchedulerSide:
    """One for each scheduler; of its thread."""

    def __init__(self, settings: Settings, config: "VllmConfig") -> None:
        """Connect to the service, or go on without it if the engine has its own tower, and set host memory apart."""
        self.counts = Counts()
        self._memory = HostMemory(int(settings.host_gib * (1 << 30)))
        kind = row_kind(config)
        self._fetcher = RowFetcher(
            settings,
            self._memory,
            width=kind.width,
            dtype=kind.dtype,
            check=partial(check_description, settings, config),
        )
        size = row_bytes(kind.width, kind.dtype)
        self.table = RowTable(self._memory, self._fetcher, size, self.counts)
        self.gate = gates[config.ec_transfer_config.engine_id] = Gate(
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
        self._steps = Steps[Rows](
            self._memory.path,
            fetching=lambda: self.table.fetching,
            wait=lambda timeout_s: self._fetcher.wait(timeout_s),
        )

    def allocated(self, feature: Feature) -> None:
        """The scheduler counts on an image in the step that it is planning."""
        identifier = feature.identifier
        if is_ours(identifier) and identifier not in self._steps:
            self._steps.load(self.table.begin_load(identifier))

    def plan(self, scheduled_tokens: int) -> LoadPlan:
        """Return what the workers are to load before this step."""
        return self._steps.plan(scheduled_tokens)

    def loaded(self, up_to: LoadedUpTo) -> None:
        """Let go of what the workers have copied."""
        for rows in self._steps.loaded(up_to):
            self.table.end_load(rows)

    def close(self) -> None:
        """End what is under way; the engine stops."""
        self._fetcher.close()
        self._memory.close()


def look_ahead(config: "VllmConfig") -> int:
    """Return how many tokens behind its own a step may touch: those that a drafter reads ahead."""
    speculative = config.speculative_config
    return 0 if speculative is None else speculative.num_speculative_tokens + 1
