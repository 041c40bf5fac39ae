"""The live view of `encoder-service top`: queue, rates, waits and tiers of replicas, read from their metrics."""

import asyncio
import ssl
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from time import time

from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.table import Table
from rich.text import Text

from encoder_contract.credentials import Token
from encoder_contract.transports import TRANSPORT_NAMES
from encoder_service.metrics import STAGES, STORED, Scrape, ScrapeDelta, ScrapeError, quantile, scrape

# Columns of what users experience, and of the resources that limit it. They form one table on a terminal of at least
# `WIDE` characters, else two tables of at most 80 characters.
EXPERIENCE = ("state", "index", "queue", "spec", "img/s", "hit", "wait p50", "p99")
RESOURCES = ("busy", "mfu", "batch", "pins", "sent", "refused", "loop p99")
WIDE = 140


@dataclass(frozen=True, slots=True)
class ReplicaRow:
    """One row: the window of a replica that answers, or the error of one that does not."""

    endpoint: str
    window: ScrapeDelta | None
    error: str = ""


class Top:
    """Scrapes the endpoints concurrently, and compares each with its previous scrape."""

    def __init__(self, endpoints: Sequence[str], ca: str = "", token: Token | None = None) -> None:
        """See `scrape` for `ca` and `token`."""
        self._endpoints = endpoints
        self._ca = ca
        self._token = token
        self._before: dict[str, Scrape] = {}

    async def scrape(self) -> list[ReplicaRow]:
        """Scrape every endpoint once."""
        return list(await asyncio.gather(*map(self._scrape, self._endpoints)))

    async def _scrape(self, endpoint: str) -> ReplicaRow:
        try:
            now = await asyncio.to_thread(scrape, endpoint, ca=self._ca, token=self._token)
        except ScrapeError as error:
            self._before.pop(endpoint, None)
            return ReplicaRow(endpoint, None, str(error).removeprefix(f"{endpoint}: "))
        before = self._before.get(endpoint)
        self._before[endpoint] = now
        age = time() - now.total("process_start_time_seconds")
        return ReplicaRow(
            endpoint, ScrapeDelta(before, now, age if before is None else now.at_s - before.at_s)
        )


def frame(replicas: Sequence[ReplicaRow], width: int) -> RenderableType:
    """Draw one frame for a screen of `width` characters."""
    windows = [replica.window for replica in replicas if replica.window is not None]
    first, *second = (EXPERIENCE + RESOURCES,) if width >= WIDE else (EXPERIENCE, RESOURCES)
    parts: list[RenderableType] = [_replicas(replicas, first)]
    parts += [
        Text(f"{replica.endpoint}: {replica.error}", style="dim")
        for replica in replicas
        if replica.window is None
    ]
    if windows:
        parts += [part for names in second for part in (Text(), _replicas(replicas, names))]
        parts += [Text(), _tiers(windows), Text(), _stages(windows)]
    return Group(*parts)


def _replicas(replicas: Sequence[ReplicaRow], names: Sequence[str]) -> Table:
    table = Table(box=None, header_style="bold", pad_edge=False, expand=False)
    for name in ("replica", *names):
        table.add_column(
            name, justify="left" if name in ("replica", "state", "index") else "right", no_wrap=True
        )
    for replica in replicas:
        cells: dict[str, str | Text] = {"state": Text("gone", style="red")}
        if replica.window is not None:
            cells = dict(zip(EXPERIENCE + RESOURCES, _row(replica.window), strict=True))
        table.add_row(replica.endpoint, *(cells.get(name, "") for name in names))
    return table


def _row(window: ScrapeDelta) -> Iterable[str | Text]:
    now = window.now
    waits = window.buckets("fetch_wait_seconds")
    peak = now.total("device_peak_flops")
    busy = window.rate("device_busy_seconds_total")
    batches = window.increase("batch_patches_count")
    refused = window.increase("submitted_images_total", reason="overloaded")
    refused += window.increase("fetched_images_total", reason="overloaded")
    return (
        Text("draining", style="yellow") if now.total("draining") else Text("serving", style="green"),
        now.text("index_state", "state") or "-",
        _count(now.total("queue_images", **{"class": "demanded"})),
        _count(now.total("queue_images", **{"class": "speculative"})),
        f"{window.rate('encoded_images_total', outcome='kept'):.1f}",
        _share(_hits([window])),
        _seconds(quantile(0.5, waits)),
        _seconds(quantile(0.99, waits)),
        Text(f"{busy:.0%}", style="yellow" if busy > 0.95 else ""),
        f"{window.rate('model_flops_total') / peak:.0%}" if peak else "-",
        _count(window.increase("batch_patches_sum") / batches) if batches else "-",
        _count(now.total("store_pins")),
        f"{_size(window.rate('transfer_bytes_total'))}/s",
        Text(_count(refused), style="red" if refused else ""),
        _seconds(quantile(0.99, window.buckets("event_loop_lag_seconds"))),
    )


def _tiers(windows: Sequence[ScrapeDelta]) -> Table:
    table = Table(box=None, header_style="bold", pad_edge=False)
    for name in ("tier", "used", "of", "", "pinned", "embeddings", "hits/s", "evicted/s"):
        table.add_column(name, justify="left" if name in ("tier", "") else "right", no_wrap=True)
    names = {labels["tier"] for window in windows for labels, _ in window.now.series("store_size_bytes")}
    for tier in sorted(names):
        used, size, pinned, entries = (
            sum(window.now.total(name, tier=tier) for window in windows)
            for name in ("store_used_bytes", "store_size_bytes", "store_pinned_bytes", "store_entries")
        )
        rates = (
            f"{sum(window.rate(name, tier=tier) for window in windows):.1f}"
            for name in ("store_hits_total", "store_evictions_total")
        )
        bar = _bar(used / size if size else 0)
        table.add_row(tier, _size(used), _size(size), bar, _size(pinned), _count(entries), *rates)
    files, room = (
        sum(window.now.total(name) for window in windows) for name in ("sources_bytes", "sources_size_bytes")
    )
    kept = sum(window.now.total("sources_images") for window in windows)
    table.add_row(
        "image files", _size(files), _size(room), _bar(files / room if room else 0), "", _count(kept)
    )
    return table


def _stages(windows: Sequence[ScrapeDelta]) -> Table:
    table = Table(box=None, header_style="bold", pad_edge=False)
    for name in ("stage", "per s", "p50", "p99"):
        table.add_column(name, justify="left" if name == "stage" else "right", no_wrap=True)
    rows: list[tuple[str, str, dict[str, str]]] = [("queue", "queue_wait_seconds", {})]
    rows += [(stage, "stage_seconds", {"stage": stage}) for stage in STAGES]
    rows += [(f"send {by}", "transfer_seconds", {"transport": by}) for by in TRANSPORT_NAMES.values()]
    for label, name, labels in rows:
        buckets: Counter[float] = Counter()
        for window in windows:
            buckets.update(window.buckets(name, **labels))
        rate = sum(window.rate(f"{name}_count", **labels) for window in windows)
        table.add_row(
            label, f"{rate:.1f}", _seconds(quantile(0.5, buckets)), _seconds(quantile(0.99, buckets))
        )
    return table


def _hits(windows: Sequence[ScrapeDelta]) -> float | None:
    """Return the share of fetched images whose rows were already stored."""
    encoded = sum(window.increase("fetched_images_total", outcome="encoded") for window in windows)
    held = sum(
        window.increase("fetched_images_total", outcome=source) for window in windows for source in STORED
    )
    return held / (held + encoded) if held + encoded else None


def _share(value: float | None) -> str:
    return "-" if value is None else f"{value:.0%}"


def _count(value: float) -> str:
    return f"{value:.0f}" if value < 10_000 else f"{value / 1000:.0f}k"


def _seconds(value: float | None) -> str:
    if value is None:
        return "-"
    return f"{value * 1000:.1f} ms" if value < 1 else f"{value:.1f} s"


def _size(value: float) -> str:
    for unit in ("B", "KB", "MB"):
        if value < 1000:
            return f"{value:.0f} {unit}"
        value /= 1000
    return f"{value:.1f} GB"


def _bar(share: float, width: int = 20) -> Text:
    full = round(min(share, 1) * width)
    return Text("█" * full + "░" * (width - full), style="yellow" if share > 0.95 else "green")


async def run(
    endpoints: Sequence[str],
    *,
    interval_s: float,
    once: bool,
    console: Console,
    tls_ca: str = "",
    token_file: str = "",
) -> int:
    """Draw frames until interrupted, or with `once` a single frame that covers each replica's lifetime.

    Returns the exit code: with `once`, 1 if no replica answers. Raises `ValueError` for a token or authorities that
    cannot be read.
    """
    try:
        ssl.create_default_context(cafile=tls_ca or None)
    except OSError as error:
        why = "not a PEM file of certificates" if isinstance(error, ssl.SSLError) else error.strerror
        raise ValueError(f"--tls-ca {tls_ca}: {why}") from error
    top = Top(endpoints, tls_ca, Token(token_file))
    replicas = await top.scrape()
    if once and not any(replica.window for replica in replicas):
        for replica in replicas:
            said = f"encoder-service: {replica.endpoint}: {replica.error}"
            Console(stderr=True).print(said, soft_wrap=True, markup=False, highlight=False)
        return 1
    if once:
        console.print(frame(replicas, console.width))
        return 0
    with Live(frame(replicas, console.width), console=console, screen=True, auto_refresh=False) as live:
        while True:
            await asyncio.sleep(interval_s)
            live.update(frame(await top.scrape(), console.width), refresh=True)
