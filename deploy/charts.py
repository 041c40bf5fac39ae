"""Renders the charts of deploy/helm as Helm does: with `helm` if it is installed, else with its library for Python."""

import json
import shutil
import subprocess
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import yaml

CHARTS = Path(__file__).resolve().parent / "helm"

Manifests = dict[tuple[str, str], dict[str, Any]]
"""Manifests by kind and name."""


class ChartError(Exception):
    """A chart that refuses its values."""


def render(chart: str, values: Mapping[str, Any] | None = None) -> Manifests:
    """Return the manifests of a chart in the namespace that docs/operations.md installs it in.

    Raises `ChartError` if the chart refuses the values.
    """
    release = chart.removesuffix(
        "-service"
    )  # `helm install encoder deploy/helm/encoder-service --namespace encoder`
    if helm := shutil.which("helm"):
        command: list[str | Path] = [
            helm,
            "template",
            release,
            CHARTS / chart,
            "--namespace",
            release,
            "--values",
            "-",
        ]
        done = subprocess.run(
            command, input=json.dumps(values or {}), capture_output=True, text=True, check=False
        )
        if done.returncode:
            raise ChartError(done.stderr)
        texts = [done.stdout]
    else:
        import helm_python

        try:
            files = helm_python.Chart.load(CHARTS / chart).render(
                dict(values or {}), name=release, namespace=release
            )
        except helm_python.HelmRenderError as error:
            raise ChartError(str(error)) from error
        texts = [text for name, text in files.items() if name.endswith(".yaml")]
    found = [each for text in texts for each in yaml.safe_load_all(text) if each]
    return {(each["kind"], each["metadata"]["name"]): each for each in found}


def lint(chart: str, values: Mapping[str, Any]) -> list[str]:
    """Return what Helm criticises in a chart."""
    if helm := shutil.which("helm"):
        command: list[str | Path] = [helm, "lint", "--strict", "--values", "-", CHARTS / chart]
        done = subprocess.run(command, input=json.dumps(values), capture_output=True, text=True, check=False)
        return [done.stdout] if done.returncode else []
    import helm_python

    report = helm_python.lint(CHARTS / chart, values=dict(values), strict=True)
    return [str(each) for each in (*report["errors"], *report["messages"]) if _is_critical(each)]


def _is_critical(message: object) -> bool:
    return not isinstance(message, dict) or message["severity"] > 1


def examples(chart: str) -> Iterator[tuple[str, dict[str, Any]]]:
    """Yield names and contents of the values files in a chart's folder `ci`. Together they set every value."""
    for path in sorted((CHARTS / chart / "ci").glob("*-values.yaml")):
        yield path.name.removesuffix("-values.yaml"), yaml.safe_load(path.read_text()) or {}


def names() -> list[str]:
    """Return the names of all charts."""
    return sorted(path.parent.name for path in CHARTS.glob("*/Chart.yaml"))
