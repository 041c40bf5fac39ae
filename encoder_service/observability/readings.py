"""The metrics that are read at a scrape, each declared once; those that record events are in `metrics`."""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

PREFIX = "encsvc"

# Name -> (kind, help, labels).
READINGS: Mapping[str, tuple[Literal["counter", "gauge"], str, tuple[str, ...]]] = {
    "build_info": ("gauge", "Always 1; the labels say which versions run.", ("version", "python", "torch")),
    "model_info": (
        "gauge",
        "Always 1; the labels say what is served and how.",
        ("model", "model_type", "fingerprint", "dtype", "device", "attention", "decoder"),
    ),
    "log_dropped": ("counter", "Log lines dropped because nobody read them in time.", ()),
    "draining": ("gauge", "1 while the server drains: it refuses new calls.", ()),
    "device_peak_flops": ("gauge", "Floating-point operations per second the device can do at best.", ()),
    "device_memory_bytes": (
        "gauge",
        "Memory of the device: total, free, reserved and allocated by torch; 0 on the CPU.",
        ("state",),
    ),
    "decoder_restarts": ("counter", "Decoder processes that ended and were replaced.", ("reason",)),
    "decoder_messages": (
        "counter",
        "Lines that decoder processes printed to standard error; they are thrown away.",
        (),
    ),
    "batches": ("counter", "Batches of the tower, in a CUDA graph or eagerly.", ("how",)),
    "padding_patches": ("counter", "Patches of padding, computed to fill the shape of a CUDA graph.", ()),
    "queue_images": ("gauge", "Images between admission and outcome.", ("state", "class")),
    "queue_patches": ("gauge", "Patches of those images.", ("state", "class")),
    "queue_source_bytes": ("gauge", "Bytes of the image files queued.", ()),
    "queue_requests": ("gauge", "Requests with an image in the queue.", ()),
    "queue_claims": ("gauge", "Claims of callers on queued images.", ()),
    "queue_clients": ("gauge", "Clients with an image in the queue.", ()),
    "queue_max_images": ("gauge", "Most images the queue accepts.", ()),
    "queue_max_patches": ("gauge", "Most patches the queue accepts.", ()),
    "queue_max_source_bytes": ("gauge", "Most image bytes the queue accepts.", ()),
    "store_used_bytes": ("gauge", "Bytes of the tier's pages that hold embeddings.", ("tier",)),
    "store_size_bytes": ("gauge", "Bytes of the tier.", ("tier",)),
    "store_pinned_bytes": ("gauge", "Bytes of embeddings that are being read.", ("tier",)),
    "store_largest_free_bytes": ("gauge", "Largest run of free pages.", ("tier",)),
    "store_entries": ("gauge", "Embeddings held.", ("tier",)),
    "store_hits": ("counter", "Lookups that found the embedding, by tier.", ("tier",)),
    "store_misses": ("counter", "Lookups that found the embedding in no tier.", ()),
    "store_evictions": ("counter", "Embeddings evicted.", ("tier",)),
    "store_writes": ("counter", "Embeddings written.", ("tier",)),
    "store_pins": ("gauge", "Pins on embeddings.", ()),
    "store_moves": ("counter", "Embeddings moved between tiers.", ("direction",)),
    "store_waits": ("counter", "Writes that waited for a pin to be released.", ()),
    "store_refusals": ("counter", "Writes refused because everything stayed pinned.", ()),
    "segment_free_bytes": ("gauge", "Free bytes of the file system that holds the shared memory.", ()),
    "sources_bytes": ("gauge", "Bytes of image files kept to recompute evicted embeddings.", ()),
    "sources_size_bytes": ("gauge", "Most bytes of image files kept.", ()),
    "sources_images": ("gauge", "Image files kept.", ()),
    "sources_offered": ("counter", "Image files shared with peers, or dropped instead.", ("outcome",)),
    "foreign": (
        "counter",
        "Rows and image files not signed with the fleet's key, and so not used.",
        ("what",),
    ),
    "upload_bytes": ("gauge", "Bytes reserved for uploads.", ()),
    "put_leases": ("gauge", "Images that callers are computing and may put.", ()),
    "index_state": ("gauge", "1 for the state of the index connection, 0 for the others.", ("state",)),
    "index_peers": ("gauge", "Other live replicas that this replica sees.", ()),
}


@dataclass(frozen=True, slots=True)
class Reading:
    """One value at a scrape; `name` is one of `READINGS`."""

    name: str
    value: float
    labels: Sequence[str] = ()


Read = Callable[[], Iterable[Reading]]


class Readings(Collector):
    """Gives Prometheus what `read` returns, which is called once per scrape."""

    def __init__(self) -> None:
        self.read: Read = tuple

    def describe(self) -> Iterator[Metric]:
        """Name no metrics."""
        return iter(())  # registering must not read: the components may not exist yet

    def collect(self) -> Iterator[Metric]:
        """Read, and yield each metric with all its values."""
        families: dict[str, CounterMetricFamily | GaugeMetricFamily] = {}
        for reading in self.read():
            kind, text, labels = READINGS[reading.name]
            if reading.name not in families:
                family = CounterMetricFamily if kind == "counter" else GaugeMetricFamily
                families[reading.name] = family(f"{PREFIX}_{reading.name}", text, labels=labels)
            assert len(reading.labels) == len(labels), reading
            families[reading.name].add_metric(list(reading.labels), reading.value)
        yield from families.values()
