"""vLLM's encoder-cache connector, for `--ec-transfer-config`.

vLLM makes one connector in the scheduler's process and one in every worker. The scheduler's gate decides which requests
may run, and its table holds rows in host memory. Each worker copies rows to its device.
"""

from typing import TYPE_CHECKING, Any

import torch
from vllm.distributed.ec_transfer.ec_connector.base import (
    ECConnectorBase,
    ECConnectorMetadata,
    ECConnectorRole,
)
from vllm.distributed.ec_transfer.ec_connector.metrics import ECConnectorPromMetrics, ECConnectorStats

from prefill_client.vllm.adapters import count_waiting_adapters
from prefill_client.vllm.counts import METRICS
from prefill_client.vllm.deepstack import keep_deepstack
from prefill_client.vllm.image_name import NameSigner
from prefill_client.vllm.name_key import read_name_key
from prefill_client.vllm.parking import let_core_sleep, let_worker_sleep
from prefill_client.vllm.scheduler_side import LoadedUpTo, LoadPlan, SchedulerSide
from prefill_client.vllm.service_check import check_service, row_kind
from prefill_client.vllm.vllm_settings import VllmSettings
from prefill_client.vllm.weight_updates import WeightUpdates, watch_calls
from prefill_client.vllm.worker_side import RowLoader
from prefill_client.vllm.worker_weights import WorkerWeights

if TYPE_CHECKING:
    from vllm.config import VllmConfig
    from vllm.v1.core.sched.output import SchedulerOutput
    from vllm.v1.outputs import ECConnectorOutput
    from vllm.v1.request import Request


class EncoderServiceStats(ECConnectorStats):  # type: ignore[misc]
    """Counts since the last report: {name: {label: value}}."""

    data: dict[str, dict[str, float]]

    def reset(self) -> None:
        """Reset all counts."""
        self.data = {}

    def is_empty(self) -> bool:
        """Whether all counts are 0."""
        return not self.data

    def aggregate(self, other: ECConnectorStats) -> "EncoderServiceStats":
        """Add the counts of `other`."""
        for name, labelled in other.data.items():
            sums = self.data.setdefault(name, {})
            for label, value in labelled.items():
                sums[label] = sums.get(label, 0) + value
        return self

    def reduce(self) -> dict[str, int | float]:
        """Return one number for each name, for vLLM's log."""
        return {name: round(sum(labelled.values()), 3) for name, labelled in self.data.items()}


class EncoderServiceMetrics(ECConnectorPromMetrics):  # type: ignore[misc]
    """Our counters on vLLM's /metrics, with vLLM's labels."""

    def __init__(
        self, vllm_config: Any, metric_types: Any, labelnames: list[str], per_engine: dict[int, list[object]]
    ) -> None:
        super().__init__(vllm_config, metric_types, labelnames, per_engine)
        self._counters = {
            name: self._counter_cls(metric, help_text, [*labelnames, *([label] if label else [])])
            for name, (metric, label, help_text) in METRICS.items()
        }

    def observe(self, transfer_stats_data: dict[str, Any], engine_idx: int = 0) -> None:
        """Add the counts of one engine."""
        engine = self.per_engine_labelvalues[engine_idx]
        for name, labelled in transfer_stats_data.items():
            for label, value in labelled.items():
                self._counters[name].labels(*engine, *([label] if METRICS[name][1] else [])).inc(value)


class EncoderServiceConnector(ECConnectorBase):  # type: ignore[misc]
    """The connector of the scheduler and of each worker. It ignores arguments that a newer vLLM adds to a call."""

    def __init__(self, vllm_config: "VllmConfig", role: ECConnectorRole, *_: object, **__: object) -> None:
        """Raise `ValueError` if the service or the configuration does not fit this engine."""
        super().__init__(vllm_config, role)
        settings = VllmSettings.read(vllm_config.ec_transfer_config.ec_connector_extra_config)
        if role is ECConnectorRole.SCHEDULER:
            self._scheduler = SchedulerSide(settings, vllm_config)
            watch_calls(self._scheduler.updates)
            let_core_sleep()
            if vllm_config.lora_config is not None:
                count_waiting_adapters()
        else:  # before the weights are loaded, so that a mismatch ends the start early
            self._init_worker(settings, vllm_config)
        self._is_open = True

    def _init_worker(self, settings: VllmSettings, config: "VllmConfig") -> None:
        device = torch.device(config.device_config.device)
        kind = row_kind(config)
        check_service(settings, config)
        keep_deepstack(config)
        let_worker_sleep()
        self.weights = None if settings.takes_any_model else WorkerWeights(config)
        self._loader = RowLoader(kind.width, kind.dtype, device)
        self._signer = NameSigner(read_name_key(settings.name_key_file))
        self._loaded_step = 0
        self._encoder_cache: dict[str, torch.Tensor] = {}
        self._loaded: set[str] = set()  # images in the cache before the tower runs

    def shutdown(self) -> None:
        """Cancel all work; a second call does nothing."""
        if self._is_open and self.role is ECConnectorRole.SCHEDULER:
            self._scheduler.close()
        self._is_open = False

    @property
    def scheduler_side(self) -> SchedulerSide | None:
        """The part in the scheduler's process; None in a worker."""
        return self._scheduler if self.role is ECConnectorRole.SCHEDULER else None

    @property
    def updates(self) -> WeightUpdates | None:
        """What the scheduler's process knows of the engine's vision weights; None if it compares nothing."""
        return self._scheduler.updates if self.role is ECConnectorRole.SCHEDULER else None

    # In the scheduler's process.

    def ensure_cache_available(self, request: "Request", num_computed_tokens: int, **_: object) -> bool:
        """Whether the images of the request's next step are ready; called before every step."""
        return self._scheduler.gate.may_prefill(request, num_computed_tokens)

    def has_cache_item(self, identifier: str, **_: object) -> bool:
        """Whether the rows of an image have arrived, so that the engine loads them instead of encoding the image."""
        return self._scheduler.table.is_here(identifier)

    def update_state_after_alloc(self, request: "Request", index: int, **_: object) -> None:
        """Note that the step being planned uses the image."""
        self._scheduler.allocated(request.mm_features[index])

    def update_state_after_free(self, request: "Request", index: int, **_: object) -> None:
        """Note that the request has prefilled the image."""
        self._scheduler.gate.prefilled(request.request_id, index)

    def request_finished(self, request: "Request", **_: object) -> tuple[bool, dict[str, Any] | None]:
        """Note that the request has ended, failed or been aborted."""
        self._scheduler.finished(request.request_id)
        return False, None

    def take_unavailable_requests(self) -> set[str]:
        """Return the requests with a failed image: only these end with an error."""
        return self._scheduler.gate.failed()

    def build_connector_meta(self, scheduler_output: "SchedulerOutput", **_: object) -> ECConnectorMetadata:
        """Return what the workers load before this step."""
        return self._scheduler.plan(scheduler_output.total_num_scheduled_tokens)

    def update_connector_output(self, connector_output: "ECConnectorOutput", **_: object) -> None:
        """Note which step the workers have finished: its rows have been copied."""
        if isinstance(connector_output.ec_connector_worker_meta, LoadedUpTo):
            self._scheduler.loaded(connector_output.ec_connector_worker_meta)

    def get_ec_connector_stats(self) -> EncoderServiceStats | None:
        """Return the counts since the last call."""
        if self.role is not ECConnectorRole.SCHEDULER:
            return None
        return EncoderServiceStats(self._scheduler.counts.take())

    # In every worker.

    def start_load_caches(self, encoder_cache: dict[str, torch.Tensor], **_: object) -> None:
        """Copy this step's rows to the device."""
        plan = self._get_connector_metadata()
        assert isinstance(plan, LoadPlan)
        self._loader.connect(plan.staging)
        if plan.loads:
            self._loader.load(plan.path, plan.loads, encoder_cache)
            self._loaded_step = plan.step
        self._encoder_cache, self._loaded = encoder_cache, set(encoder_cache)

    def is_named(self, identifier: str) -> bool:
        """Whether the rows of an image are the service's."""
        return self._signer.is_identifier(identifier)

    def build_connector_worker_meta(self) -> LoadedUpTo | None:
        """Report the last loaded step, once.

        Raises `RuntimeError` if the tower has encoded a named image in this step. That image was a stand-in: its rows
        are wrong, and the engine's caches would pass them to later requests. Only the end of the engine empties the
        caches.
        """
        for identifier in filter(self.is_named, self._encoder_cache.keys() - self._loaded):
            raise RuntimeError(
                f"the engine's tower encoded a stand-in, whose rows only the service has: {identifier}"
            )
        step, self._loaded_step = self._loaded_step, 0
        return LoadedUpTo(step) if step else None

    def save_caches(self, encoder_cache: dict[str, torch.Tensor], mm_hash: str, **_: object) -> None:
        """Do nothing: a consumer saves no rows."""

    # In the API server.

    @classmethod
    def build_ec_connector_stats(cls, data: dict[str, Any] | None = None) -> EncoderServiceStats:
        """Return the counts that came from the engine's process."""
        return EncoderServiceStats(data or {})

    @classmethod
    def build_prom_metrics(cls, *arguments: Any, **named: Any) -> EncoderServiceMetrics:
        """Return the metrics that show the counts on vLLM's /metrics."""
        return EncoderServiceMetrics(*arguments, **named)
