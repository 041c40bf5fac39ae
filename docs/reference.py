"""Writes docs/settings.md from the settings' declarations and docs/metrics.md from those of the metrics."""

import asyncio
import tempfile
from collections.abc import Iterator
from dataclasses import MISSING, fields
from pathlib import Path
from typing import get_args, get_type_hints

from prometheus_client import CollectorRegistry

from bench.harness.benchmark import markdown
from encoder_contract.settings import Settings, flag
from encoder_service.app import Server
from encoder_service.config import Config
from encoder_service.engine.model import load_model
from prefill_client.sglang_gateway.config import GatewayConfig
from prefill_reference.config import ServiceConfig
from testing.checkpoints import write_checkpoint

HERE = Path(__file__).resolve().parent
PROGRAMS: tuple[tuple[str, type[Settings]], ...] = (
    ("encoder-service serve", Config),
    ("prefill-reference", ServiceConfig),
    ("encoder-sglang-gateway", GatewayConfig),
)
SETTINGS = """# Settings

Every setting is a flag and an environment variable; flags win. If a name is unknown or a value is invalid, the program
does not start: it exits with code 2 and prints one line that names it. `python -m docs.reference` writes this page from
the declarations that `--help` shows.
"""
METRICS = """# Metrics

`encoder-service serve --metrics-listen ...` exports these metrics at `/metrics`, besides the `process_` metrics of all
Prometheus clients. A counter's name ends in `_total`; a histogram has `_bucket`, `_sum` and `_count`. The alerts and
their remedies are in [operations.md](operations.md#alerts). `python -m docs.reference` writes this page from the
declarations.

"""


def settings_page() -> str:
    """Return docs/settings.md."""
    return "\n".join(
        [SETTINGS, *(section for program, kind in PROGRAMS for section in _sections(program, kind))]
    )


def _sections(program: str, kind: type[Settings]) -> Iterator[str]:
    yield f"## {program}\n"
    hints = get_type_hints(kind)
    rows: list[tuple[str, str, str]] = []
    for each in fields(kind):
        if each.name in kind.headings:
            yield from _table(rows)
            rows = []
            yield f"### {kind.headings[each.name]}\n"
        default = (
            "required" if each.default is MISSING else f"`{each.default}`" if each.default != "" else "empty"
        )
        name = f"`{flag(each.name)}`, `{kind.environment_name(each.name)}`"
        choices = " or ".join(f"`{choice}`" for choice in get_args(hints[each.name]))
        text = f"{choices}: {each.metadata['help']}" if choices else each.metadata["help"]
        rows.append((name, default, text.replace("|", "\\|")))
    yield from _table(rows)


def _table(rows: list[tuple[str, str, str]]) -> Iterator[str]:
    if rows:
        yield markdown(("setting", "default", "meaning"), rows) + "\n"


def metrics_page(server: Server) -> str:
    """Return docs/metrics.md: what `server` declares, and what it reads at a scrape."""
    rows = {name: (f"`{name}`", *told) for name, told in (*_recorded(server), *_read(server))}
    return (
        METRICS
        + markdown(("metric", "type", "labels", "meaning"), [rows[name] for name in sorted(rows)])
        + "\n"
    )


def _recorded(server: Server) -> Iterator[tuple[str, tuple[str, str, str]]]:
    """Yield the metrics that record events; labels also of those that have no sample yet."""
    registry: CollectorRegistry = server.metrics._registry
    for collector in list(registry._collector_to_names):
        labels = getattr(collector, "_labelnames", None)
        if labels is not None:
            (family,) = collector.collect()
            yield _named(family.name, family.type), (family.type, _labels(labels), family.documentation)


def _read(server: Server) -> Iterator[tuple[str, tuple[str, str, str]]]:
    for family in server.readings():
        labels = getattr(family, "_labelnames", ())  # of metrics that have no sample yet, too
        yield _named(family.name, family.type), (family.type, _labels(labels), family.documentation)


def _named(name: str, kind: str) -> str:
    return f"{name}_total" if kind == "counter" else name


def _labels(names: object) -> str:
    return ", ".join(f"`{name}`" for name in names)  # type: ignore[attr-defined]


async def _metrics_of_a_server() -> str:
    """Return the page as a server of a tiny checkpoint has it; it is constructed and does not serve."""
    with tempfile.TemporaryDirectory() as folder:
        config = Config(
            model=write_checkpoint(Path(folder) / "checkpoint"),
            devices="cpu",
            store_host_gib=0.01,
            device_peak_tflops=1.0,
        )
        model = load_model(config)
        server = Server(config, model, [])
        try:
            return metrics_page(server)
        finally:
            server.store.close()
            model.decoder.close()


def main() -> None:
    """Write both pages."""
    (HERE / "settings.md").write_text(settings_page())
    (HERE / "metrics.md").write_text(asyncio.run(_metrics_of_a_server()))


if __name__ == "__main__":
    main()
