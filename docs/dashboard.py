"""Draws Grafana's dashboard without Grafana: `python -m docs.dashboard`.

A Prometheus with the rules of deploy/ scrapes two replicas, which run on this machine with a Redis under a light load.
Each panel shows what its queries return. Needs Prometheus (Debian: apt install prometheus).
"""

import argparse
import asyncio
import json
import re
import tempfile
import time
import urllib.parse
import urllib.request
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import transformers
import yaml
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter, MaxNLocator

from deploy.grafana import build
from docs.charts import svg
from docs.pictures import PHOTO, PICTURES, found, process
from testing.checkpoints import write_checkpoint
from testing.processes import free_port
from testing.redis_servers import redis_server
from testing.server_process import ServerProcess
from testing.traffic import Supply, Traffic

DRAWN = ("Health", "Latency for users", "Bottlenecks", "Caches")  # the other rows need engines, or errors
SCRAPE_S = 5
WINDOW_S = 4 * SCRAPE_S  # Grafana's $__rate_interval
VARIABLES = {"$job": ".*", "$instance": ".*", "$__rate_interval": f"{WINDOW_S}s"}
REPLICAS = 2
COLUMN_INCHES, LINE_INCHES = 0.5, 0.22  # of Grafana's grid
MOST_SERIES = 6  # of a panel: those with the largest values
COLOURS = {"green": "#31a354", "orange": "#e6550d", "red": "#c0392b", "blue": "#3182bd"}

Series = Mapping[str, Sequence[tuple[float, float]]]
"""What a panel's queries returned: points of seconds and values, by legend."""


def panels() -> list[dict[str, Any]]:
    """Return headings and panels of the rows that are drawn, placed as in Grafana."""
    rows = yaml.safe_load((build.HERE / "panels.yml").read_text())
    return list(build.panels([row for row in rows if row["row"] in DRAWN]))


class Prometheus:
    """The HTTP API of a Prometheus at `url`."""

    def __init__(self, url: str) -> None:
        self.url = url

    def series(self, panel: Mapping[str, Any], begin_s: float, end_s: float) -> Series:
        """Return what the queries of a panel give between two times."""
        found: dict[str, list[tuple[float, float]]] = {}
        for target in panel["targets"]:
            for each in self._range(filled(target["expr"]), begin_s, end_s):
                points = [(at, float(value)) for at, value in each["values"] if value != "NaN"]
                if points:
                    found[_legend(target["legendFormat"], each["metric"]) or target["refId"]] = points
        return found

    def _range(self, query: str, begin_s: float, end_s: float) -> list[dict[str, Any]]:
        given = {"query": query, "start": begin_s, "end": end_s, "step": SCRAPE_S}
        url = f"{self.url}/api/v1/query_range?{urllib.parse.urlencode(given)}"
        with urllib.request.urlopen(url, timeout=30) as answer:
            result: list[dict[str, Any]] = json.load(answer)["data"]["result"]
        return result


def filled(expression: str) -> str:
    """Return a query with the values that Grafana would put in place of its variables."""
    for name, value in VARIABLES.items():
        expression = expression.replace(name, value)
    return expression


def _legend(template: str, labels: Mapping[str, str]) -> str:
    return re.sub(r"\{\{(\w+)\}\}", lambda name: labels.get(name[1], ""), template)


def draw(placed: Sequence[Mapping[str, Any]], found_by_title: Mapping[str, Series], description: str) -> str:
    """Return the dashboard as SVG. A panel without series says so, as in Grafana."""
    lines = max(panel["gridPos"]["y"] + panel["gridPos"]["h"] for panel in placed)
    size = build.COLUMNS * COLUMN_INCHES, lines * LINE_INCHES
    figure = Figure(size)
    for panel in placed:
        place = panel["gridPos"]
        left, top = place["x"] * COLUMN_INCHES, place["y"] * LINE_INCHES
        if panel["type"] == "row":
            figure.text(0.005, 1 - (top + 0.16) / size[1], panel["title"], weight="bold", size=10)
            continue
        width, height = place["w"] * COLUMN_INCHES, place["h"] * LINE_INCHES
        box = left + 0.5, size[1] - top - height + 0.33, width - 0.65, height - 0.6
        axes = figure.add_axes((box[0] / size[0], box[1] / size[1], box[2] / size[0], box[3] / size[1]))
        axes.set_title(panel["title"], size=7, loc="left", pad=3)
        kind = _stat if panel["type"] == "stat" else _lines
        kind(axes, panel, found_by_title[panel["title"]])
    return svg(figure, description)


def _stat(axes: Any, panel: Mapping[str, Any], series: Series) -> None:
    axes.axis("off")
    defaults = panel["fieldConfig"]["defaults"]
    values = [points[-1][1] for points in series.values()] or [float("nan")]
    steps = defaults["thresholds"]["steps"]
    colour = [step["color"] for step in steps if step["value"] is None or values[0] >= step["value"]][-1]
    text = " of ".join(shown(value, defaults["unit"]) for value in values)
    axes.text(0.5, 0.4, text, size=13, color=COLOURS[colour], ha="center", va="center")


def _lines(axes: Any, panel: Mapping[str, Any], series: Series) -> None:
    unit = panel["fieldConfig"]["defaults"]["unit"]
    axes.spines[["top", "right"]].set_visible(False)
    axes.tick_params(labelsize=6, length=2)
    axes.set_xticks([])
    axes.yaxis.set_major_locator(MaxNLocator(3))
    axes.yaxis.set_major_formatter(FuncFormatter(lambda value, _: shown(value, unit)))
    by_size = sorted(series.items(), key=lambda each: max((value for _, value in each[1]), default=0))
    for legend, points in by_size[: -MOST_SERIES - 1 : -1]:
        began_s = points[0][0]
        axes.plot([at - began_s for at, _ in points], [value for _, value in points], lw=1, label=legend)
    axes.set_ylim(bottom=0)
    if series:
        axes.legend(fontsize=5, loc="upper left", bbox_to_anchor=(-0.1, -0.01), ncols=3, frameon=False)
    else:
        axes.text(0.5, 0.5, "No data", size=7, color="grey", ha="center", transform=axes.transAxes)


def shown(value: float, unit: str) -> str:
    """Return a value as a panel of this unit shows it."""
    if unit == "percentunit":
        return f"{100 * value:.3g} %"
    if unit in ("bytes", "Bps"):
        power = next((power for power in (9, 6, 3) if abs(value) >= 10**power), 0)
        prefix = {9: "G", 6: "M", 3: "k", 0: ""}[power]
        return f"{value / 10**power:.3g} {prefix}B{'/s' if unit == 'Bps' else ''}"
    if unit == "s":
        return f"{1000 * value:.3g} ms" if abs(value) < 1 else f"{value:.3g} s"
    return f"{value:,.4g}{'/s' if unit == 'ops' else ''}"


def run(seconds: float) -> str:
    """Start everything, draw what Prometheus has after so many seconds of load, stop everything."""
    with tempfile.TemporaryDirectory() as scratch, ExitStack() as stack:
        folder = Path(scratch)
        transformers.utils.logging.disable_progress_bar()
        checkpoint = write_checkpoint(folder / "checkpoint")
        redis = stack.enter_context(redis_server())
        replicas = [
            ServerProcess(checkpoint, index=redis.url, store_host_gib=0.25, threads=1)
            for _ in range(REPLICAS)
        ]
        for replica in replicas:
            stack.callback(replica.terminate)
        for replica in replicas:
            replica.wait_until_it_listens()
        config = folder / "prometheus.yml"
        config.write_text(yaml.safe_dump(configuration([replica.http_endpoint for replica in replicas])))
        listen = f"127.0.0.1:{free_port()}"
        command = [found("prometheus"), f"--config.file={config}", f"--storage.tsdb.path={folder / 'data'}"]
        command += [f"--web.listen-address={listen}"]
        stack.enter_context(process(command, folder / "prometheus.log", f"http://{listen}/-/ready"))
        began_s = time.time()
        asyncio.run(load([replica.endpoint for replica in replicas], seconds))
        prometheus = Prometheus(f"http://{listen}")
        placed = panels()
        shown_from_s = min(began_s + WINDOW_S, time.time() - SCRAPE_S)
        series = {
            panel["title"]: prometheus.series(panel, shown_from_s, time.time())
            for panel in placed
            if panel["type"] != "row"
        }
    return draw(placed, series, f"python -m docs.dashboard, {time.strftime('%Y-%m-%d')}")


def configuration(targets: Sequence[str]) -> dict[str, Any]:
    """Return the configuration of a Prometheus that scrapes these servers, with the rules of deploy/."""
    rules = [str(build.HERE.parent / "prometheus" / name) for name in ("rules.yml", "alerts.yml")]
    every = f"{SCRAPE_S}s"
    return {
        "global": {"scrape_interval": every, "evaluation_interval": every},
        "rule_files": rules,
        "scrape_configs": [{"job_name": "encoder", "static_configs": [{"targets": list(targets)}]}],
    }


async def load(endpoints: Sequence[str], seconds: float) -> None:
    """Send prompts of images, half of them seen before."""
    async with Traffic(endpoints, Supply(*PHOTO), workers=2, images=3, pause_s=0.5):
        await asyncio.sleep(seconds)


def titles() -> Iterator[str]:
    """Yield the titles of the panels that are drawn."""
    yield from (panel["title"] for panel in panels() if panel["type"] != "row")


def main() -> None:
    """Run the command line."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seconds", type=float, default=180.0, help="of load (default %(default)s)")
    parser.add_argument("--out", type=Path, default=PICTURES / "dashboard.svg", help="(default %(default)s)")
    given = parser.parse_args()
    given.out.write_text(run(given.seconds))


if __name__ == "__main__":
    main()
