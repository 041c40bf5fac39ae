"""Writes the dashboard that Grafana reads from panels.yml; `--check` only compares."""

import json
import re
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import yaml

HERE = Path(__file__).parent
TARGET = HERE / "dashboards" / "encoder-service.json"
DATASOURCE = {"type": "prometheus", "uid": "${datasource}"}
COLUMNS = 24
STANDS_FOR = {"SEL": 'job=~"$job", instance=~"$instance"', "[W]": "[$__rate_interval]"}
SIZES = {"stat": (3, 4), "timeseries": (6, 8)}  # columns and rows of a panel


def query(number: int, legend: str, expression: str) -> dict[str, Any]:
    """Return one query of a panel."""
    for short, long in STANDS_FOR.items():
        expression = re.sub(re.escape(short) if short[0] == "[" else rf"\b{short}\b", long, expression)
    name = chr(ord("A") + number)
    return {"refId": name, "datasource": DATASOURCE, "expr": expression, "legendFormat": legend}


def panel(kind: str, given: dict[str, Any], place: dict[str, int]) -> dict[str, Any]:
    """Return one panel."""
    options: dict[str, Any] = {"legend": {"placement": "bottom"}, "tooltip": {"mode": "multi"}}
    if kind == "stat":
        options = {"reduceOptions": {"calcs": ["lastNotNull"]}, "colorMode": "value", "graphMode": "area"}
    defaults: dict[str, Any] = {"unit": given.get("unit", "short"), "min": 0}
    if kind == "stat":
        defaults["thresholds"] = {"mode": "absolute", "steps": steps(given["thresholds"])}
    return {
        "type": kind,
        "title": given["title"],
        "description": given.get("tells", ""),
        "datasource": DATASOURCE,
        "gridPos": place,
        "fieldConfig": {"defaults": defaults, "overrides": []},
        "options": options,
        "targets": [query(number, *each) for number, each in enumerate(given["queries"].items())],
    }


def steps(thresholds: list[float]) -> list[dict[str, Any]]:
    """Return the colours of a stat: green, then orange and red; a stat of falling thresholds is red below the last."""
    if not thresholds:
        return [{"color": "blue", "value": None}]
    warn, bad = thresholds
    colours = ("red", "orange", "green") if bad < warn else ("green", "orange", "red")
    return [
        {"color": each, "value": at} for each, at in zip(colours, (None, *sorted(thresholds)), strict=True)
    ]


def panels(rows: list[dict[str, Any]]) -> Iterator[dict[str, Any]]:
    """Yield headings and panels, placed from left to right and from top to bottom."""
    top = 0
    for row in rows:
        kind = row.get("kind", "timeseries")
        width, height = SIZES[kind]
        heading = {"type": "row", "title": row["row"], "collapsed": False, "panels": []}
        repeat = {"repeat": row["repeat"]} if "repeat" in row else {}
        yield heading | repeat | {"gridPos": {"x": 0, "y": top, "w": COLUMNS, "h": 1}}
        top += 1
        for number, given in enumerate(row["panels"]):
            line, column = divmod(number * width, COLUMNS)
            yield panel(kind, given, {"x": column, "y": top + line * height, "w": width, "h": height})
        top += -(-len(row["panels"]) * width // COLUMNS) * height


def variable(name: str, query: str) -> dict[str, Any]:
    """Return a template variable that is looked up in Prometheus and may be several."""
    looked_up = {"type": "query", "datasource": DATASOURCE, "query": {"query": query, "refId": name}}
    chosen = {"refresh": 2, "multi": True, "includeAll": True, "current": {"text": "All", "value": "$__all"}}
    return {"name": name} | looked_up | chosen


def dashboard() -> dict[str, Any]:
    """Return the dashboard."""
    rows = yaml.safe_load((HERE / "panels.yml").read_text())
    variables = [
        {"name": "datasource", "type": "datasource", "query": "prometheus", "current": {}},
        variable("job", "label_values(encsvc_build_info, job)"),
        variable("instance", 'label_values(encsvc_build_info{job=~"$job"}, instance)'),
    ]
    return {
        "uid": "encoder-service",
        "title": "Encoder service",
        "tags": ["encoder-service"],
        "schemaVersion": 39,
        "editable": False,
        "refresh": "10s",
        "time": {"from": "now-30m", "to": "now"},
        "templating": {"list": variables},
        "panels": [{"id": number, **each} for number, each in enumerate(panels(rows), 1)],
    }


def main() -> int:
    """Write the dashboard, or with `--check` say whether it is up to date."""
    text = json.dumps(dashboard(), indent=1) + "\n"
    if "--check" not in sys.argv[1:]:
        TARGET.write_text(text)
    elif TARGET.read_text() != text:
        sys.stderr.write(f"{TARGET} is stale: run python {Path(__file__)}\n")
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
