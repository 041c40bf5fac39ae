"""What the engine's side counts: images by where they were found, bytes by transport, waits, failures."""

from collections import Counter

from encoder_contract.errors import EncoderError
from prefill_client.vllm.row_fetcher import Outcome

IMAGES, BYTES, FETCH_S, FAILED = "images", "bytes", "fetch_seconds", "images_failed"
WAITED_S, WAITED = "wait_seconds", "waits"

# The metric of each, its label, and what it is.
METRICS = {
    IMAGES: (
        "vllm:encoder_service_images_total",
        "source",
        "Images whose rows came, by where the service had them.",
    ),
    BYTES: (
        "vllm:encoder_service_row_bytes_total",
        "transport",
        "Bytes of rows that came from the encoder service.",
    ),
    FETCH_S: (
        "vllm:encoder_service_fetch_seconds_total",
        "",
        "Seconds between asking for an image's rows and having them.",
    ),
    FAILED: (
        "vllm:encoder_service_images_failed_total",
        "status",
        "Images whose rows did not come, and end requests.",
    ),
    WAITED: ("vllm:encoder_service_waits_total", "", "Prefill steps that waited for rows."),
    WAITED_S: ("vllm:encoder_service_wait_seconds_total", "", "Seconds that prefill steps waited for rows."),
}


class Counts:
    """Counters since the last `take`, by name and label; what vLLM carries to its own metrics and log."""

    def __init__(self) -> None:
        self._counted: Counter[tuple[str, str]] = Counter()

    def fetched(self, outcome: Outcome, size_bytes: int) -> None:
        """An image's rows have arrived."""
        self._counted[IMAGES, outcome.source] += 1
        self._counted[BYTES, outcome.transport] += size_bytes
        self._add(FETCH_S, outcome.took_s)

    def failed(self, error: EncoderError) -> None:
        """An image's rows will not come."""
        self._counted[FAILED, error.status.name.lower()] += 1

    def waited(self, wait_s: float) -> None:
        """A prefill step waited so long for the rows of its images."""
        self._counted[WAITED, ""] += 1
        self._add(WAITED_S, wait_s)

    def take(self) -> dict[str, dict[str, float]]:
        """Return {name: {label: value}} and begin anew."""
        taken: dict[str, dict[str, float]] = {}
        for (name, label), value in self._counted.items():
            taken.setdefault(name, {})[label] = value
        self._counted.clear()
        return taken

    def _add(self, name: str, value_s: float) -> None:
        self._counted[name, ""] += value_s  # type: ignore[assignment]  # a Counter of floats
