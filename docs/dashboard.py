"""Draws the Grafana dashboard from what a Prometheus answers, a PNG for each of its rows that has data.

`python -m docs.dashboard URL OUT`: the same panels, queries, units and colours as in Grafana, without Grafana.
"""

import argparse
import io
import json
import math
import re
import time
import urllib.parse
import urllib.request
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter, MaxNLocator
from PIL import Image

DASHBOARD = Path(__file__).resolve().parents[1] / "deploy/grafana/dashboards/encoder-service.json"
WINDOW_S, STEP_S = 20, 2  # of rates, and between points
COLUMNS, COLUMN_IN, ROW_IN, DPI = 24, 0.62, 0.36, 80
COLOURS = {"green": "#2f9e44", "orange": "#e8890c", "red": "#e03131", "blue": "#1c7ed6"}
LINES = ("#1c7ed6", "#e8890c", "#2f9e44", "#e03131", "#7048e8", "#0c8599", "#c2255c", "#868e96")
MOST_LINES = 8


@dataclass(frozen=True)
class Series:
    """One line of a panel: moments in seconds, and values; NaN where there is none."""

    legend: str
    at_s: Sequence[float]
    values: Sequence[float]


def rows(dashboard: Path = DASHBOARD) -> Iterator[tuple[str, list[dict[str, Any]]]]:
    """Yield each row's title and panels."""
    title, panels = "", list[dict[str, Any]]()
    for panel in json.loads(dashboard.read_text())["panels"]:
        if panel["type"] != "row":
            panels.append(panel)
            continue
        if panels:
            yield title, panels
        title, panels = panel["title"], []
    yield title, panels


def filled(text: str, jobs: str, instance: str) -> str:
    """Return an expression with Grafana's variables filled in."""
    for name, value in {"$__rate_interval": f"{WINDOW_S}s", "$job": jobs, "$instance": instance}.items():
        text = text.replace(name, value)
    return text


class Prometheus:
    """Asks a Prometheus about a range of time: seconds since the epoch."""

    def __init__(self, url: str, began_s: float, ended_s: float) -> None:
        self._url = url.rstrip("/")
        self._range = {"start": began_s, "end": ended_s, "step": STEP_S}

    def replicas(self) -> tuple[str, str]:
        """Return the jobs of all replicas, as a regular expression, and the first instance; `LookupError` if none."""
        found = [each["metric"] for each in self._ask("encsvc_build_info")]
        if not found:
            raise LookupError(f"{self._url} has no encsvc_build_info in that time: it scrapes no server")
        return "|".join(sorted({each["job"] for each in found})), min(each["instance"] for each in found)

    def series(self, panel: Mapping[str, Any], jobs: str, instance: str) -> list[Series]:
        """Return all lines of a panel."""
        return [
            Series(
                re.sub(r"{{(\w+)}}", lambda name: found["metric"].get(name[1], ""), target["legendFormat"]),  # noqa: B023
                [float(at) for at, _ in found["values"]],
                [float(value) for _, value in found["values"]],
            )
            for target in panel["targets"]
            for found in self._ask(filled(target["expr"], jobs, instance))
        ]

    def _ask(self, expression: str) -> list[dict[str, Any]]:
        asked = urllib.parse.urlencode({"query": expression, **self._range})
        with urllib.request.urlopen(f"{self._url}/api/v1/query_range?{asked}", timeout=30) as answer:
            return list(json.load(answer)["data"]["result"])


def drawn(panels: Sequence[Mapping[str, Any]], series: Sequence[Sequence[Series]]) -> bytes:
    """Return the PNG of a row: its panels, each with its lines."""
    places = [panel["gridPos"] for panel in panels]
    top = min(place["y"] for place in places)
    height = max(place["y"] + place["h"] for place in places) - top
    figure = Figure(figsize=(COLUMNS * COLUMN_IN, height * ROW_IN), dpi=DPI, facecolor="white")
    for panel, place, lines in zip(panels, places, series, strict=True):
        stat = panel["type"] == "stat"
        left, below = (0.1, 0.2) if stat else (0.9, 0.75)  # inches for ticks and legend
        x, y = place["x"] * COLUMN_IN, (height - (place["y"] - top) - place["h"]) * ROW_IN
        width, tall = place["w"] * COLUMN_IN - left - 0.15, place["h"] * ROW_IN - below - 0.35
        axes = figure.add_axes(
            (
                (x + left) / (COLUMNS * COLUMN_IN),
                (y + below) / (height * ROW_IN),
                width / (COLUMNS * COLUMN_IN),
                tall / (height * ROW_IN),
            )
        )
        axes.set_title(panel["title"], fontsize=10, loc="center" if stat else "left")
        (_stat if stat else _chart)(axes, panel, lines)
    drawing = io.BytesIO()
    figure.savefig(drawing, format="png")
    return small(drawing.getvalue())


def small(png: bytes) -> bytes:
    """Return a PNG in 64 colours, a third of its size."""
    written = io.BytesIO()
    Image.open(io.BytesIO(png)).convert("RGB").quantize(64).save(written, format="png", optimize=True)
    return written.getvalue()


def _stat(axes: Axes, panel: Mapping[str, Any], lines: Sequence[Series]) -> None:
    axes.set_axis_off()
    last = next((value for each in lines for value in reversed(each.values) if not math.isnan(value)), None)
    told = "no data" if last is None else amount(last, _unit(panel))
    axes.text(0.5, 0.5, told, fontsize=20, ha="center", va="center", color=_colour(panel, last))


def _colour(panel: Mapping[str, Any], value: float | None) -> str:
    steps = panel["fieldConfig"]["defaults"]["thresholds"]["steps"]
    reached = [
        step for step in steps if step["value"] is None or (value is not None and value >= step["value"])
    ]
    return "#868e96" if value is None else COLOURS[reached[-1]["color"]]


def _chart(axes: Axes, panel: Mapping[str, Any], lines: Sequence[Series]) -> None:
    unit = _unit(panel)
    axes.spines[["top", "right"]].set_visible(False)
    axes.tick_params(labelsize=8)
    axes.grid(alpha=0.25)
    alive = [each for each in lines if any(not math.isnan(value) for value in each.values)]
    if not alive:
        axes.set_xticks([])
        axes.set_yticks([])
        axes.text(0.5, 0.5, "no data", ha="center", va="center", color="#868e96", transform=axes.transAxes)
        return
    began = min(each.at_s[0] for each in alive)
    for number, each in enumerate(alive[:MOST_LINES]):
        axes.plot(
            [at - began for at in each.at_s], each.values, color=LINES[number], label=each.legend, lw=1.4
        )
    axes.set_ylim(bottom=0)
    if (
        axes.get_ylim()[1] < 1e-9
        or max(value for each in alive for value in each.values if value == value) == 0
    ):
        axes.set_ylim(0, 1)
    axes.xaxis.set_major_formatter(FuncFormatter(lambda at, _: f"{at:g} s"))
    axes.yaxis.set_major_formatter(FuncFormatter(lambda value, _: amount(value, unit)))
    axes.yaxis.set_major_locator(MaxNLocator(5))
    place: dict[str, Any] = {"loc": "upper left", "bbox_to_anchor": (-0.12, -0.13), "ncols": 3}
    axes.legend(**place, fontsize=7, frameon=False, borderpad=0, handlelength=1.0, columnspacing=0.8)


def _unit(panel: Mapping[str, Any]) -> str:
    return str(panel["fieldConfig"]["defaults"]["unit"])


def amount(value: float, unit: str) -> str:
    """Return a value in Grafana's unit, for people."""
    if unit == "percentunit":
        return f"{value:.3g} %" if (value := value * 100) else "0 %"
    if unit == "s":
        return f"{value * 1000:.3g} ms" if 0 < value < 1 else f"{value:.3g} s"
    if unit in ("bytes", "Bps"):
        for scale, name in ((2**30, "GiB"), (2**20, "MiB"), (2**10, "KiB")):
            if value >= scale:
                return f"{value / scale:.3g} {name}{'/s' if unit == 'Bps' else ''}"
        return f"{value:.3g} B{'/s' if unit == 'Bps' else ''}"
    return f"{value:.3g}{'/s' if unit == 'ops' else ''}" if value < 1000 else f"{value:,.0f}"


def write(prometheus: Prometheus, out: Path) -> list[Path]:
    """Write a picture of each row that has data, and remove those of earlier runs; return their paths."""
    for stale in out.glob("dashboard-*.png"):
        stale.unlink()
    written = []
    jobs, first = prometheus.replicas()
    for title, panels in rows():
        instance = first if "$instance" in title else ".*"
        series = [prometheus.series(panel, jobs, instance) for panel in panels]
        if any(series):
            slug = re.sub(r"\W+", "-", title.replace("$instance", "").strip().lower())
            written.append(out / f"dashboard-{slug}.png")
            written[-1].write_bytes(drawn(panels, series))
    return written


def main() -> None:
    """Run the command line."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("url", help="of a Prometheus, for example http://127.0.0.1:9090")
    parser.add_argument("out", type=Path, help="folder")
    parser.add_argument("--minutes", type=float, default=5.0, help="until now (default %(default)s)")
    given = parser.parse_args()
    now = time.time()
    for path in write(Prometheus(given.url, now - 60 * given.minutes, now), given.out):
        print(path)


if __name__ == "__main__":
    main()
