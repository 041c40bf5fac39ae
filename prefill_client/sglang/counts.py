"""The plug-in's metrics in SGLang: images by source of their rows, bytes, and images that SGLang's tower encoded."""

from functools import cache
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from prometheus_client import Counter

# For each key: the metric, its label, and its help.
METRICS = {
    "images": (
        "sglang:encoder_service_images_total",
        "source",
        "Images whose rows a prefill chunk fetched, by where the service found them.",
    ),
    "row_bytes": (
        "sglang:encoder_service_row_bytes_total",
        "transport",
        "Bytes of rows received from the encoder service.",
    ),
    "own_tower_images": (
        "sglang:encoder_service_own_tower_images_total",
        "reason",
        "Images that SGLang's own tower encoded instead of the service.",
    ),
    "lost_images": (
        "sglang:encoder_service_lost_images_total",
        "",
        "Images that neither the service nor SGLang's own tower could encode; their requests ended with 503.",
    ),
}


def count(metric: str, label: str = "", amount: int = 1) -> None:
    """Add `amount` to a counter. `metric` is a key of `METRICS`."""
    counter = _counter(metric)
    (counter.labels(label) if label else counter).inc(amount)


@cache
def _counter(metric: str) -> "Counter":
    # Import late: SGLang imports this module before it configures where its processes write their metrics.
    from prometheus_client import Counter

    name, label, text = METRICS[metric]
    return Counter(name, text, [label] if label else [])
