"""Metrics: recorded events, values read at a scrape, and the scrape of another process.

Each metric is declared once. `Metrics` declares those that record events, `collectors.py` those that are read at a
scrape. Names, units and types follow Prometheus: base units, and `_total` for counters. Each label has a few known
values, which callers cannot choose, so the number of series is bounded.
"""

import re
import ssl
import urllib.request
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from http.client import HTTPException
from itertools import pairwise, product
from math import inf
from time import monotonic
from typing import Any, Literal, TypeAlias, TypeVar
from urllib.error import HTTPError, URLError

from prometheus_client import (
    CollectorRegistry,
    Counter,
    Gauge,
    Histogram,
    ProcessCollector,
    disable_created_metrics,
    generate_latest,
)
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.parser import text_string_to_metric_families
from prometheus_client.registry import Collector

from encoder_contract.credentials import Token
from encoder_contract.direct import is_local_url, open_url
from encoder_contract.errors import EncoderError
from encoder_contract.transports import TRANSPORT_NAMES
from encoder_contract.v1 import encoder_pb2 as pb

PREFIX = "encsvc"

Reading: TypeAlias = Metric  # a metric with its values at one scrape
_LabelValues = TypeVar("_LabelValues", bound=str | tuple[str, ...])


def gauge(name: str, text: str, value: float | Mapping[_LabelValues, float], *labels: str) -> Reading:
    """Return a gauge for one scrape: a single value, or one for each combination of label values."""
    return _reading(GaugeMetricFamily(f"{PREFIX}_{name}", text, labels=labels), value)


def counter(name: str, text: str, value: float | Mapping[_LabelValues, float], *labels: str) -> Reading:
    """Return a counter for one scrape. Prometheus adds `_total` to its name."""
    return _reading(CounterMetricFamily(f"{PREFIX}_{name}", text, labels=labels), value)


def _reading(
    family: CounterMetricFamily | GaugeMetricFamily, value: float | Mapping[_LabelValues, float]
) -> Reading:
    for labels, one in value.items() if isinstance(value, Mapping) else [((), value)]:
        family.add_metric([labels] if isinstance(labels, str) else labels, one)
    return family


class _Readings(Collector):
    """Calls `read` once per scrape."""

    def __init__(self, read: Callable[[], Iterable[Reading]]) -> None:
        self._read = read

    def describe(self) -> Iterator[Metric]:
        """Name no metrics."""
        return iter(())  # registering must not read: not every component exists yet

    def collect(self) -> Iterator[Metric]:
        yield from self._read()


# They would be a third of all series, for a start time that process_start_time_seconds has too.
disable_created_metrics()  # type: ignore[no-untyped-call]

# From a hash (40 µs) to a wait that ends at a deadline. Three or four steps per decade are fine enough to act on.
SECONDS = (0.0001, 0.0003, 0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1, 2, 5, 10, 30)
# A lag longer than framing a megabyte takes (4 ms) is worth showing. A lag over 100 ms is an alert.
LAG_SECONDS = (0.0005, 0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1, 5)
PATCHES = tuple(2**power for power in range(8, 19))
IMAGES = tuple(2**power for power in range(9))

SUBMITTED = ("cached", "queued", "failed")
TRANSPORTS = tuple(TRANSPORT_NAMES.values())
STORED = ("device", "host", "peer")  # the outcomes of a Fetch that are hits
FETCHED = (*STORED, "encoded", "failed")
STAGES = ("upload", "hash", "decode", "preprocess", "vit", "copy_out")
TRIED = ("ok", "failed")
DECODERS = ("dali", "pillow", "ffmpeg")
DEMAND = {True: "demanded", False: "speculative"}
CLASSES = {"class": tuple(DEMAND.values())}

_Labelled = TypeVar("_Labelled", Counter, Gauge, Histogram)


def reason(error: Exception) -> str:
    """Return the label of an error: `image_limit` for `ImageLimitError`."""
    return re.sub(r"(?<=[a-z])(?=[A-Z])", "_", type(error).__name__.removesuffix("Error")).lower()


def _reasons(kind: type[EncoderError] = EncoderError) -> Iterator[str]:
    """Yield the label of every error class."""
    for error in kind.__subclasses__():
        yield reason(error(""))
        yield from _reasons(error)


class _Series(dict[tuple[Any, ...], _Labelled]):
    """Series by metric and labels, each bound once: the library's own lookup takes a lock for each event."""

    def __missing__(self, key: tuple[Any, ...]) -> _Labelled:
        metric, *labels = key
        series: _Labelled = metric.labels(*labels)
        self[key] = series
        return series


class Metrics:
    """The metrics of one server. Every method is thread-safe and takes microseconds."""

    def __init__(self) -> None:
        self._registry = CollectorRegistry()
        self._counters, self._gauges = _Series[Counter](), _Series[Gauge]()
        self._histograms = _Series[Histogram]()
        ProcessCollector(registry=self._registry)
        self._declare_pipeline()
        self._declare_calls()
        self._declare_cluster_and_loop()

    def _declare_pipeline(self) -> None:
        self._stage = self._histogram("stage_seconds", "Time that an image spends in a stage", stage=STAGES)
        self._queue_wait = self._histogram(
            "queue_wait_seconds",
            "Time from an image's admission to the start of decoding",
            SECONDS,
            **CLASSES,
        )
        self._encode = self._histogram("encode_seconds", "Time from an image's admission to its stored rows")
        self._batch_patches = self._histogram("batch_patches", "Patches in a batch of the tower", PATCHES)
        self._batch_images = self._histogram("batch_images", "Images in a batch of the tower", IMAGES)
        self._shared = self._counter(
            "shared_images", "Images that all devices of the server encoded together"
        )
        self._busy = self._counter("device_busy_seconds", "Time that the device ran the vision tower")
        self._starved = self._counter(
            "device_starved_seconds", "Time that the tower was idle although images were queued"
        )
        self._flops = self._counter(
            "model_flops", "Floating-point operations that the encoded images required"
        )
        self._decoded = self._counter("decoded_images", "Decoded images", decoder=DECODERS)
        self._encoded = self._images(
            "encoded_images",
            "Images that left the pipeline: rows stored, copied from an equal image, or failed",
            ("kept", "copied", "failed"),
        )

    def _declare_calls(self) -> None:
        self._fetch_wait = self._histogram(
            "fetch_wait_seconds",
            "Time from a Fetch call until the rows of an image are ready",
            outcome=FETCHED,
        )
        self._transfer = self._histogram(
            "transfer_seconds", "Time to send the rows of an image", transport=TRANSPORTS
        )
        self._submitted = self._images("submitted_images", "Images answered in Submit calls", SUBMITTED)
        self._fetched = self._images(
            "fetched_images", "Images answered in Fetch calls, by where their rows came from", FETCHED
        )
        self._transfer_bytes = self._counter("transfer_bytes", "Bytes of rows sent", transport=TRANSPORTS)
        self._upload_bytes = self._counter("uploaded_bytes", "Bytes of image and video files received")
        self._calls = self._counter("calls", "Ended calls", call=("submit", "fetch"), status=("OK",))
        self._in_progress = Gauge(
            f"{PREFIX}_calls_in_progress",
            "Open calls. A Fetch over shared memory stays open while its rows are read.",
            ("call",),
            registry=self._registry,
        )

    def _declare_cluster_and_loop(self) -> None:
        self._index_call = self._histogram(
            "index_call_seconds", "Duration of a call to the index", call=(), outcome=()
        )
        self._peer_fetch = self._histogram(
            "peer_fetch_seconds", "Time to fetch the rows of an image from another replica", outcome=TRIED
        )
        self._loop_lag = self._histogram(
            "event_loop_lag_seconds", "How late the event loop wakes a sleeping task", LAG_SECONDS
        )

    def read_from(self, read: Callable[[], Iterable[Reading]]) -> None:
        """Also export what `read` returns. Each scrape calls it once, on a thread."""
        self._registry.register(_Readings(read))

    def exposition(self) -> bytes:
        """Return the answer to a scrape, in Prometheus' text format."""
        return generate_latest(self._registry)

    # The pipeline

    def queued(self, seconds: float, *, demanded: bool) -> None:
        """Record how long an image waited for the decoder."""
        self._histograms[self._queue_wait, DEMAND[demanded]].observe(seconds)

    def batch(
        self, grids: Sequence[tuple[int, int, int]], seconds: float, flops: float, *, devices: int = 1
    ) -> None:
        """Record an encoded batch, how long the devices were busy with it, and the operations that it required."""
        self._shared.inc(devices > 1)
        self._batch_patches.observe(sum(t * h * w for t, h, w in grids))
        self._batch_images.observe(len(grids))
        self._busy.inc(seconds)
        self._flops.inc(flops)

    def decoded(self, decoder: str, images: int) -> None:
        """Record images decoded by one of `DECODERS`."""
        self._counters[self._decoded, decoder].inc(images)

    def starved(self, seconds: float) -> None:
        """Record time that the device was idle although images were queued."""
        self._starved.inc(seconds)

    def encoded(
        self,
        seconds: float,
        stage_ms: Mapping[str, float],
        error: Exception | None = None,
        *,
        is_copied: bool = False,
    ) -> None:
        """Record an image that leaves the pipeline: its rows were stored, or copied from equal frames, or it failed."""
        for stage in STAGES:
            if stage in stage_ms:
                self.stage(stage, stage_ms[stage] / 1000)
        if error is None and not is_copied:
            self._encode.observe(seconds)
        outcome = "failed" if error else "copied" if is_copied else "kept"
        self._counters[self._encoded, outcome, reason(error) if error else ""].inc()

    def stage(self, stage: str, seconds: float) -> None:
        """Record the time that an image spent in one of `STAGES`."""
        assert stage in STAGES, stage
        self._histograms[self._stage, stage].observe(seconds)

    # Calls

    def call_began(self, call: str) -> None:
        """Count an open call."""
        self._gauges[self._in_progress, call].inc()

    def call_ended(self, call: str, status: str) -> None:
        """Count a call that ended with a gRPC status."""
        self._gauges[self._in_progress, call].dec()
        self._counters[self._calls, call, status].inc()

    def submitted(self, outcome: Literal["cached", "queued", "failed"], failure: str = "") -> None:
        """Count an image answered in Submit; `failure` is the `reason` of its error."""
        self._counters[self._submitted, outcome, failure].inc()

    def uploaded(self, size: int, seconds: float) -> None:
        """Count an image whose last byte arrived `seconds` after it was named."""
        self._upload_bytes.inc(size)
        self.stage("upload", seconds)

    def fetched(
        self,
        outcome: Literal["device", "host", "peer", "encoded", "failed"],
        wait_s: float,
        failure: str = "",
    ) -> None:
        """Count an image answered in Fetch, by where its rows came from, and record how long the caller waited."""
        self._counters[self._fetched, outcome, failure].inc()
        self._histograms[self._fetch_wait, outcome].observe(wait_s)

    def transferred(self, transport: pb.Transport.ValueType, size: int, seconds: float) -> None:
        """Count rows sent."""
        self._counters[self._transfer_bytes, TRANSPORT_NAMES[transport]].inc(size)
        self._histograms[self._transfer, TRANSPORT_NAMES[transport]].observe(seconds)

    # The cluster and the event loop

    def index_call(self, call: str, seconds: float, ok: bool) -> None:
        """Count a call to the index."""
        self._histograms[self._index_call, call, TRIED[not ok]].observe(seconds)

    def peer_fetch(self, seconds: float, ok: bool) -> None:
        """Count an attempt to get rows from another replica."""
        self._histograms[self._peer_fetch, TRIED[not ok]].observe(seconds)

    def loop_lag(self, seconds: float) -> None:
        """Record how late a sleeping task was woken."""
        self._loop_lag.observe(seconds)

    # Every series whose labels are known exists from the start. A counter that appeared with its first event would have
    # no rate for that event.

    def _histogram(
        self, name: str, text: str, buckets: Sequence[float] = SECONDS, **labels: Sequence[str]
    ) -> Histogram:
        name, names = f"{PREFIX}_{name}", tuple(labels)
        histogram = Histogram(name, f"{text}.", names, buckets=buckets, registry=self._registry)
        return _with_series(histogram, labels)

    def _counter(self, name: str, text: str, **labels: Sequence[str]) -> Counter:
        counter = Counter(f"{PREFIX}_{name}", f"{text}.", tuple(labels), registry=self._registry)
        return _with_series(counter, labels)

    def _images(self, name: str, text: str, outcomes: Sequence[str]) -> Counter:
        counter = self._counter(name, text, outcome=(), reason=())
        for outcome in outcomes:
            for label in _reasons() if outcome == "failed" else [""]:
                counter.labels(outcome, label)
        return counter


def _with_series(metric: _Labelled, labels: Mapping[str, Sequence[str]]) -> _Labelled:
    """Return `metric` with a series for each combination of the values of `labels`."""
    if labels:
        for values in product(*labels.values()):
            metric.labels(*values)
    return metric


MAX_SCRAPE_BYTES = 16 << 20  # one of our servers exports 30 KB
MAX_REFUSAL_BYTES = 1000
Labels = Mapping[str, str]


class ScrapeError(Exception):
    """An endpoint does not answer with metrics. The message names the endpoint and the reason."""


@dataclass(frozen=True, slots=True)
class Scrape:
    """All samples of one endpoint at one moment. Names of our own metrics lack the prefix."""

    at_s: float
    samples: Mapping[str, Sequence[tuple[Labels, float]]]

    def total(self, name: str, **labels: str) -> float:
        """Return the sum of the series of `name` that have `labels`; 0 if there are none."""
        return sum(value for _, value in self.series(name, **labels))

    def series(self, name: str, **labels: str) -> list[tuple[Labels, float]]:
        """Return the series of `name` that have `labels`."""
        required = labels.items()
        return [(found, value) for found, value in self.samples.get(name, ()) if required <= found.items()]

    def text(self, name: str, label: str) -> str:
        """Return the value of a label of the only series with value 1; empty if there is none."""
        return next((found.get(label, "") for found, value in self.series(name) if value == 1), "")


def scrape(endpoint: str, timeout_s: float = 2.0, ca: str = "", token: Token | None = None) -> Scrape:
    """Read the metrics of `endpoint`: host:port or https://host:port.

    `ca` is a PEM file of the authorities that may have issued an HTTPS server's certificate; empty: the public ones.
    `token` is for a server with tenants. Raises `ScrapeError`.
    """
    url = endpoint if endpoint.startswith(("http://", "https://")) else f"http://{endpoint}"
    try:
        context = ssl.create_default_context(cafile=ca or None) if url.startswith("https://") else None
        page = urllib.request.Request(f"{url.rstrip('/')}/metrics")  # noqa: S310
        for header in token.metadata() if token is not None else ():
            if context is None and not is_local_url(url):
                raise ScrapeError(f"{endpoint}: a token is sent only over https:// or within this host")
            page.add_unredirected_header(*header)
        with open_url(page, timeout_s, context) as answer:
            text = answer.read(MAX_SCRAPE_BYTES).decode()
        samples: defaultdict[str, list[tuple[Labels, float]]] = defaultdict(list)
        for family in text_string_to_metric_families(text):
            for sample in family.samples:
                samples[sample.name.removeprefix(f"{PREFIX}_")].append((sample.labels, sample.value))
    except (HTTPException, ConnectionResetError) as error:
        hint = "" if url.startswith("https://") else ", or it uses TLS (write https://)"
        raise ScrapeError(
            f"{endpoint}: the server does not speak HTTP: this is not a --metrics-listen address{hint}"
        ) from error
    except HTTPError as error:  # the text says what to do, as about a missing token
        said = error.read(MAX_REFUSAL_BYTES).decode(errors="replace").strip()
        raise ScrapeError(f"{endpoint}: {error.code} {said or error.reason}") from error
    except (OSError, ValueError) as error:
        raise ScrapeError(f"{endpoint}: {_why(error, url)}") from error
    return Scrape(monotonic(), samples)


def _why(error: OSError | ValueError, url: str) -> str:
    """Return the reason for a failed request, and what to change."""
    reason = error.reason if isinstance(error, URLError) else error
    match reason:
        case ssl.SSLCertVerificationError():
            return f"the TLS handshake failed: {reason.verify_message} (--tls-ca is the authority to expect)"
        case ssl.SSLError():
            why = (reason.reason or str(reason)).replace("_", " ").lower()
            return f"the TLS handshake failed: {why}; without TLS, write http://"
        case TimeoutError():
            return f"no answer in time{'; without TLS, write http://' if url.startswith('https') else ''}"
        case ConnectionRefusedError():
            return "Connection refused: nothing listens there (the server needs --metrics-listen)"
        case OSError():
            return reason.strerror or str(reason)
    return str(reason)


@dataclass(frozen=True, slots=True)
class ScrapeDelta:
    """The difference between two scrapes of one endpoint; without an earlier scrape, since its process started."""

    before: Scrape | None
    now: Scrape
    seconds: float

    def increase(self, name: str, **labels: str) -> float:
        """Return by how much the counters `name` grew. The counters of a restarted process begin at 0 again."""
        earlier = self.before.total(name, **labels) if self.before is not None else 0.0
        later = self.now.total(name, **labels)
        return later - earlier if later >= earlier else later

    def rate(self, name: str, **labels: str) -> float:
        """Return the growth per second."""
        return self.increase(name, **labels) / self.seconds if self.seconds > 0 else 0.0

    def buckets(self, name: str, **labels: str) -> dict[float, float]:
        """Return the growth of a histogram's cumulative buckets, by upper bound."""
        bounds = {found["le"] for found, _ in self.now.series(f"{name}_bucket", **labels)}
        return {float(le): self.increase(f"{name}_bucket", le=le, **labels) for le in bounds}


def quantile(share: float, buckets: Mapping[float, float]) -> float | None:
    """Return the value below which `share` of the observations lie, interpolated as Prometheus does.

    Without observations, return None.
    """
    bounds = [0.0, *sorted(buckets)]
    count = buckets.get(inf, 0.0)
    if not count:
        return None
    rank = share * count
    below = 0.0
    for low, high in pairwise(bounds):
        if buckets[high] >= rank:
            if high == inf:
                return low
            return low + (high - low) * (rank - below) / (buckets[high] - below)
        below = buckets[high]
    return bounds[-2]
