"""The metrics of another process: one scrape, and the difference between two."""

import ssl
import urllib.request
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from http.client import HTTPException
from itertools import pairwise
from math import inf
from time import monotonic

from prometheus_client.parser import text_string_to_metric_families

from encoder_contract.credentials import Token
from encoder_contract.endpoint import is_local
from encoder_service.observability.readings import PREFIX

MAX_SCRAPE_BYTES = 16 << 20  # a server exports 30 KB; anything this large is not a server
Labels = Mapping[str, str]


class ScrapeError(Exception):
    """An endpoint that does not answer with metrics; the message names it and the reason."""


@dataclass(frozen=True, slots=True)
class Scrape:
    """All samples of one endpoint at one moment; our metrics' names without the prefix."""

    at_s: float
    samples: Mapping[str, Sequence[tuple[Labels, float]]]

    def total(self, name: str, **labels: str) -> float:
        """Return the sum of the series of `name` that have `labels`; 0 when there are none."""
        return sum(value for _, value in self.series(name, **labels))

    def series(self, name: str, **labels: str) -> list[tuple[Labels, float]]:
        """Return the series of `name` that have `labels`."""
        wanted = labels.items()
        return [(given, value) for given, value in self.samples.get(name, ()) if wanted <= given.items()]

    def text(self, name: str, label: str) -> str:
        """Return a label of the only series whose value is 1; empty if there is none."""
        return next((given.get(label, "") for given, value in self.series(name) if value == 1), "")


def scrape(endpoint: str, timeout_s: float = 2.0, ca: str = "", token: Token | None = None) -> Scrape:
    """Read the metrics of `endpoint`: host:port, or https://host:port, whose certificate is one of `ca` (a PEM file).

    Without `ca` it has to be a public one. `token` is for a server with tenants. Raises `ScrapeError`.
    """
    url = endpoint if endpoint.startswith(("http://", "https://")) else f"http://{endpoint}"
    try:
        context = ssl.create_default_context(cafile=ca or None) if url.startswith("https://") else None
        page = urllib.request.Request(f"{url.rstrip('/')}/metrics")  # noqa: S310
        for header in token.metadata() if token is not None else ():
            if context is None and not is_local(url.removeprefix("http://").rstrip("/")):
                raise ScrapeError(f"{endpoint}: a token is sent by https:// or within this host only")
            page.add_unredirected_header(*header)
        with urllib.request.urlopen(page, timeout=timeout_s, context=context) as answer:  # noqa: S310
            text = answer.read(MAX_SCRAPE_BYTES).decode()
        samples: defaultdict[str, list[tuple[Labels, float]]] = defaultdict(list)
        for family in text_string_to_metric_families(text):
            for sample in family.samples:
                samples[sample.name.removeprefix(f"{PREFIX}_")].append((sample.labels, sample.value))
    except HTTPException as error:
        raise ScrapeError(
            f"{endpoint}: it does not speak HTTP: this is not a --metrics-listen address"
        ) from error
    except (OSError, ValueError) as error:
        reason = getattr(error, "reason", error)  # the error that urllib wraps
        raise ScrapeError(f"{endpoint}: {getattr(reason, 'strerror', None) or reason}") from error
    return Scrape(monotonic(), samples)


@dataclass(frozen=True, slots=True)
class Window:
    """The difference between two scrapes of one endpoint; without an earlier one, since its process started."""

    before: Scrape | None
    now: Scrape
    seconds: float

    def increase(self, name: str, **labels: str) -> float:
        """Return how much the counters `name` grew; a restarted process counts from 0 again."""
        earlier = self.before.total(name, **labels) if self.before is not None else 0.0
        later = self.now.total(name, **labels)
        return later - earlier if later >= earlier else later

    def rate(self, name: str, **labels: str) -> float:
        """Return the growth per second."""
        return self.increase(name, **labels) / self.seconds if self.seconds > 0 else 0.0

    def buckets(self, name: str, **labels: str) -> dict[float, float]:
        """Return the growth of a histogram's cumulative buckets by their upper bound."""
        bounds = {given["le"] for given, _ in self.now.series(f"{name}_bucket", **labels)}
        return {float(le): self.increase(f"{name}_bucket", le=le, **labels) for le in bounds}


def quantile(share: float, buckets: Mapping[float, float]) -> float | None:
    """Return the value below which `share` of the observations lie, interpolated as in Prometheus; None without any."""
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
