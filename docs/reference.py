"""Writes what pages repeat of the code: settings, metrics, and the parts of docs/parts.py, from their declarations."""

import ast
import inspect
import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import MISSING, fields
from itertools import pairwise
from pathlib import Path
from typing import Literal, get_args, get_origin, get_type_hints

from prometheus_client import CollectorRegistry

from bench.harness.benchmark import markdown
from docs.parts import filled
from encoder_contract.settings import Settings, at_most, declared, flag
from encoder_service.config import Config
from encoder_service.metrics import PREFIX, Metrics
from prefill_client.plugin.service_settings import ServiceSettings
from prefill_client.sglang import counts as sglang_counts
from prefill_client.sglang.sglang_settings import SglangSettings
from prefill_client.sglang_gateway.config import GatewayConfig
from prefill_client.sglang_gateway.metrics import GatewayMetrics
from prefill_client.vllm import counts as vllm_counts
from prefill_client.vllm.vllm_settings import VllmSettings
from prefill_reference.config import ServiceConfig

HERE = Path(__file__).resolve().parent
COLLECTORS = HERE.parent / "encoder_service" / "collectors.py"
PROGRAMS: tuple[tuple[str, type[Settings]], ...] = (
    ("encoder-service serve", Config),
    ("prefill-reference", ServiceConfig),
    ("encoder-sglang-gateway", GatewayConfig),
)
PLUG_INS: tuple[tuple[str, type[ServiceSettings]], ...] = (
    ("Keys of vLLM's connector", VllmSettings),
    ("Keys of SGLang's packages", SglangSettings),
)
SETTINGS = """# Settings

Every setting of a program is a flag and an environment variable; flags win. The plug-ins of engines read JSON instead.
If a name is unknown or a value is invalid, the program does not start: it exits with code 2 and prints one line that
names it. `python -m docs.reference` writes this page from the declarations that `--help` shows.
"""
METRICS = """# Metrics

`encoder-service serve --metrics-listen ...` exports these metrics at `/metrics`, besides the `process_` metrics of all
Prometheus clients; engines and the gateway export those below. A counter's name ends in `_total`; a histogram has
`_bucket`, `_sum` and `_count`. The alerts and their remedies are in [operations.md](operations.md#alerts). `python -m
docs.reference` writes this page from the declarations.

"""


def settings_page() -> str:
    """Return docs/settings.md."""
    programs = (section for program, kind in PROGRAMS for section in _sections(program, kind))
    plug_ins = (line for title, kind in PLUG_INS for line in _keys(title, kind))
    return "\n".join([SETTINGS, *programs, *plug_ins])


def _sections(program: str, kind: type[Settings]) -> Iterator[str]:
    yield f"## {program}\n"
    rows: list[tuple[str, str, str]] = []
    for setting, each, hint in declared(kind):
        if setting in kind.headings:
            yield from _table(rows)
            rows = []
            yield f"### {kind.headings[setting]}\n"
        default = (
            "required" if each.default is MISSING else f"`{each.default}`" if each.default != "" else "empty"
        ) + at_most(each)
        name = f"`{flag(setting)}`, `{kind.environment_name(setting)}`"
        choices = " or ".join(f"`{choice}`" for choice in get_args(hint))
        text = f"{choices}: {each.metadata['help']}" if choices else each.metadata["help"]
        rows.append((name, default, text.replace("|", "\\|")))
    yield from _table(rows)


def _keys(title: str, kind: type[ServiceSettings]) -> Iterator[str]:
    """Yield the section of a plug-in: its keys, with the docstrings of the fields."""
    yield f"## {title}\n\nIn `{kind.location}`. Other keys are errors.\n"
    docstrings = {name: text for each in reversed(kind.__mro__[:-1]) for name, text in _fields_of(each)}
    hints = get_type_hints(kind)
    rows = []
    for each in fields(kind):
        default = "required" if each.default is MISSING else f"`{json.dumps(each.default)}`"
        text, hint = docstrings.get(each.name) or each.metadata["help"], hints[each.name]
        if get_origin(hint) is Literal:
            text = f"{' or '.join(f'`{json.dumps(choice)}`' for choice in get_args(hint))}: {text}"
        rows.append((f"`{each.name}`", default, text))
    yield from _table(rows)


def _fields_of(kind: type) -> Iterator[tuple[str, str]]:
    """Yield the name and the docstring of each field that a class declares."""
    (node,) = ast.parse(inspect.getsource(kind)).body
    assert isinstance(node, ast.ClassDef)
    for field, after in pairwise(node.body):
        if isinstance(field, ast.AnnAssign) and isinstance(after, ast.Expr):
            yield ast.unparse(field.target), " ".join(ast.literal_eval(after.value).split())


def _table(rows: list[tuple[str, str, str]]) -> Iterator[str]:
    if rows:
        yield markdown(("setting", "default", "meaning"), rows) + "\n"


def metrics_page() -> str:
    """Return docs/metrics.md."""
    parts = [METRICS + _metrics((*_recorded(Metrics()._registry), *_read()))]
    parts.append(f"## In vLLM's `/metrics`\n\n{_metrics(_of_vllm())}")
    parts.append(f"## In SGLang's `/metrics`\n\n{_metrics(_counted(sglang_counts.METRICS))}")
    parts.append(f"## Of the gateway for SGLang\n\n{_metrics(_recorded(GatewayMetrics().registry))}")
    return "\n".join(parts)


def _metrics(metrics: Iterable[tuple[str, tuple[str, str, str]]]) -> str:
    rows = [(f"`{name}`", *told) for name, told in sorted(metrics)]
    return markdown(("metric", "type", "labels", "meaning"), rows) + "\n"


def _of_vllm() -> Iterator[tuple[str, tuple[str, str, str]]]:
    """Yield the metrics of the engine, which vLLM exports, and those of the API server's middleware."""
    yield from _counted(vllm_counts.METRICS)
    for counter in (vllm_counts.renders(), vllm_counts.answers()):
        (family,) = counter.describe()
        yield f"{family.name}_total", ("counter", _labels(counter._labelnames), family.documentation)


def _counted(metrics: Mapping[str, tuple[str, str, str]]) -> Iterator[tuple[str, tuple[str, str, str]]]:
    """Yield the metrics that a plug-in declares as a name, a label or none, and a help text."""
    for name, label, text in metrics.values():
        yield name, ("counter", _labels([label] if label else []), text)


def _recorded(registry: CollectorRegistry) -> Iterator[tuple[str, tuple[str, str, str]]]:
    """Yield the metrics of a registry."""
    for collector in list(registry._collector_to_names):
        labels = getattr(collector, "_labelnames", None)
        if labels is not None:
            (family,) = collector.collect()
            yield _named(family.name, family.type), (family.type, _labels(labels), family.documentation)


def _read() -> Iterator[tuple[str, tuple[str, str, str]]]:
    """Yield the metrics that are read at a scrape: the calls of `gauge` and `counter` in the source of collectors.py.

    To run them would take a server. Labels are constants, or unpacked from a tuple or the keys of a dict.
    """
    for function in ast.parse(COLLECTORS.read_text()).body:
        local = {
            node.targets[0].id: node.value
            for node in ast.walk(function)
            if isinstance(node, ast.Assign) and isinstance(node.targets[0], ast.Name)
        }
        for call in ast.walk(function):
            if not (isinstance(call, ast.Call) and isinstance(call.func, ast.Name)):
                continue
            if (kind := call.func.id) in ("gauge", "counter"):
                name, text = (ast.literal_eval(each) for each in call.args[:2])
                labels = [label for each in call.args[3:] for label in _label_names(each, local)]
                yield _named(f"{PREFIX}_{name}", kind), (kind, _labels(labels), text)


def _label_names(given: ast.expr, local: Mapping[str, ast.expr]) -> Sequence[str]:
    if not isinstance(given, ast.Starred):
        return (ast.literal_eval(given),)
    assert isinstance(given.value, ast.Name)
    unpacked = local[given.value.id]
    if isinstance(unpacked, ast.Dict):
        return [ast.literal_eval(key) for key in unpacked.keys if key is not None]
    return list(ast.literal_eval(unpacked))


def _named(name: str, kind: str) -> str:
    return f"{name}_total" if kind == "counter" else name


def _labels(names: Iterable[str]) -> str:
    return ", ".join(f"`{name}`" for name in names)


def pages() -> dict[Path, str]:
    """Return the pages that have something generated by this program, each with the text that it should have."""
    parts = {page: filled(page.read_text()) for page in (*HERE.parent.glob("*.md"), *HERE.rglob("*.md"))}
    return parts | {HERE / "settings.md": settings_page(), HERE / "metrics.md": metrics_page()}


def main() -> None:
    """Write them."""
    for page, text in pages().items():
        page.write_text(text)


if __name__ == "__main__":
    main()
