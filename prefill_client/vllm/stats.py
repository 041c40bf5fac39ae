"""Shows the counts of the engine's side on vLLM's own /metrics and in its log."""

from typing import Any

from vllm.distributed.ec_transfer.ec_connector.metrics import ECConnectorPromMetrics, ECConnectorStats

from prefill_client.vllm.counts import METRICS


class EncoderServiceStats(ECConnectorStats):  # type: ignore[misc]
    """Sums since the last time: {name: {label: value}}."""

    data: dict[str, dict[str, float]]

    def reset(self) -> None:
        """Reset all sums."""
        self.data = {}

    def is_empty(self) -> bool:
        """Whether nothing was counted."""
        return not self.data

    def aggregate(self, other: ECConnectorStats) -> "EncoderServiceStats":
        """Return the sums of both."""
        for name, labelled in other.data.items():
            mine = self.data.setdefault(name, {})
            for label, value in labelled.items():
                mine[label] = mine.get(label, 0) + value
        return self

    def reduce(self) -> dict[str, int | float]:
        """Return one number for each name, for the log."""
        return {name: round(sum(labelled.values()), 3) for name, labelled in self.data.items()}


class EncoderServiceMetrics(ECConnectorPromMetrics):  # type: ignore[misc]
    """Counters beside vLLM's own, with its labels."""

    def __init__(
        self, vllm_config: Any, metric_types: Any, labelnames: list[str], per_engine: dict[int, list[object]]
    ) -> None:
        super().__init__(vllm_config, metric_types, labelnames, per_engine)
        self._counters = {
            name: self._counter_cls(metric, text, [*labelnames, *([label] if label else [])])
            for name, (metric, label, text) in METRICS.items()
        }

    def observe(self, transfer_stats_data: dict[str, Any], engine_idx: int = 0) -> None:
        """Add the counts of one engine."""
        engine = self.per_engine_labelvalues[engine_idx]
        for name, labelled in transfer_stats_data.items():
            for label, value in labelled.items():
                self._counters[name].labels(*engine, *([label] if METRICS[name][1] else [])).inc(value)
