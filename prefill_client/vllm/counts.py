"""Counters of the engine: images by where their rows were found, bytes by transport, waits, failures; and answers.

vLLM passes those of the engine to its own metrics. The answers are those of an API server's middleware.
"""

from collections import defaultdict
from functools import cache
from typing import TYPE_CHECKING

from prefill_client.vllm.row_fetcher import Outcome

if TYPE_CHECKING:
    from prometheus_client import Counter

IMAGES, BYTES, FETCH_S, FAILED = "images", "bytes", "fetch_seconds", "images_failed"
WAITED_S, WAITED, EMPTY = "wait_seconds", "waits", "empty_steps"

# The metric of each counter, its label, and its help.
METRICS = {
    IMAGES: (
        "vllm:encoder_service_images_total",
        "source",
        "Images whose rows arrived, by where the service found them.",
    ),
    BYTES: (
        "vllm:encoder_service_row_bytes_total",
        "transport",
        "Bytes of rows received from the encoder service.",
    ),
    FETCH_S: (
        "vllm:encoder_service_fetch_seconds_total",
        "",
        "Seconds from the request for the rows of an image to their arrival.",
    ),
    FAILED: (
        "vllm:encoder_service_images_failed_total",
        "status",
        "Images whose rows could not be fetched; each ends the requests that need it.",
    ),
    WAITED: ("vllm:encoder_service_waits_total", "", "Prefill steps that waited for rows."),
    WAITED_S: ("vllm:encoder_service_wait_seconds_total", "", "Seconds that prefill steps waited for rows."),
    EMPTY: (
        "vllm:encoder_service_empty_steps_total",
        "",
        "Steps without tokens, because every request waited for rows.",
    ),
}


class Counts:
    """Counters since the last `take`, by name and label. vLLM passes them to its own metrics and log."""

    def __init__(self) -> None:
        self._counted: defaultdict[tuple[str, str], float] = defaultdict(int)

    def ended(self, outcome: Outcome, size_bytes: int) -> None:
        """Count an image whose query has ended; its rows have `size_bytes`."""
        if outcome.state == "here":
            self._counted[IMAGES, outcome.source] += 1
            self._counted[BYTES, outcome.transport] += size_bytes
            self._counted[FETCH_S, ""] += outcome.took_s
        elif outcome.error is not None:
            self._counted[FAILED, outcome.error.status.name.lower()] += 1

    def waited(self, seconds: float) -> None:
        """Count a wait of a prefill step for rows."""
        self._counted[WAITED, ""] += 1
        self._counted[WAITED_S, ""] += seconds

    def empty_step(self) -> None:
        """Count a step that did nothing while requests waited for rows."""
        self._counted[EMPTY, ""] += 1

    def take(self) -> dict[str, dict[str, float]]:
        """Return {name: {label: value}}, and reset all counters."""
        counts: dict[str, dict[str, float]] = {}
        for (name, label), value in self._counted.items():
            counts.setdefault(name, {})[label] = value
        self._counted.clear()
        return counts


@cache
def renders() -> "Counter":
    """Return the counter of the renders that had images."""
    from prometheus_client import Counter

    return Counter(
        "vllm:encoder_service_renders_total",
        "Requests with images that were laid out without pixels for an engine (named), or that vLLM refused (refused).",
        ("result",),
    )


@cache
def answers() -> "Counter":
    """Return the counter of the middleware's own answers."""
    # Import late: vLLM first configures where its processes write their metrics.
    from prometheus_client import Counter

    return Counter(
        "vllm:encoder_service_answers_total",
        "Requests that the middleware answered itself; vLLM's http_requests_total does not count them.",
        ("status", "reason"),
    )
