"""Counters of the engine: images by where their rows were found, bytes by transport, waits, failures, puts."""

from collections import Counter

from encoder_contract.errors import EncoderError
from prefill_client.vllm.row_fetcher import Outcome
from prefill_client.vllm.shared_store import Found

IMAGES, BYTES, FETCH_S, FAILED = "images", "bytes", "fetch_seconds", "images_failed"
WAITED_S, WAITED = "wait_seconds", "waits"
ENCODED, PUT = "images_encoded", "images_put"

# The metric of each, its label, and its help.
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
    ENCODED: (
        "vllm:encoder_service_images_encoded_total",
        "made_for",
        "Images that the engine's own tower encodes: for everybody (its rows are put), or for itself.",
    ),
    PUT: (
        "vllm:encoder_service_images_put_total",
        "outcome",
        "Images whose rows the engine put, by outcome: kept, or the reason why not.",
    ),
    WAITED_S: ("vllm:encoder_service_wait_seconds_total", "", "Seconds that prefill steps waited for rows."),
}


class Counts:
    """Counters since the last `take`, by name and label. vLLM passes them to its own metrics and log."""

    def __init__(self) -> None:
        self._counted: Counter[tuple[str, str]] = Counter()

    def fetched(self, outcome: Outcome | Found, size_bytes: int) -> None:
        """An image's rows have arrived."""
        self._counted[IMAGES, outcome.source] += 1
        self._counted[BYTES, outcome.transport] += size_bytes
        self._add(FETCH_S, outcome.took_s)

    def failed(self, error: EncoderError) -> None:
        """The rows of an image could not be fetched."""
        self._counted[FAILED, error.status.name.lower()] += 1

    def found(self, found: Found, size_bytes: int) -> None:
        """The store said who makes the rows of an image, or its rows came from the store."""
        if found.outcome == "here":
            self.fetched(found, size_bytes)
        elif found.outcome == "ours":
            self.encoded(shared=found.lease is not None)

    def encoded(self, *, shared: bool) -> None:
        """The engine's own tower encodes an image; with `shared`, its rows will be put."""
        self._counted[ENCODED, "everybody" if shared else "itself"] += 1

    def put(self, outcome: str) -> None:
        """The store kept the rows of an image that the engine made, or did not; `outcome` says which."""
        self._counted[PUT, outcome] += 1

    def waited(self, wait_s: float) -> None:
        """A prefill step has waited `wait_s` seconds for the rows of its images."""
        self._counted[WAITED, ""] += 1
        self._add(WAITED_S, wait_s)

    def take(self) -> dict[str, dict[str, float]]:
        """Return {name: {label: value}}, and reset all counters."""
        taken: dict[str, dict[str, float]] = {}
        for (name, label), value in self._counted.items():
            taken.setdefault(name, {})[label] = value
        self._counted.clear()
        return taken

    def _add(self, name: str, value_s: float) -> None:
        self._counted[name, ""] += value_s  # type: ignore[assignment]  # a Counter of floats
