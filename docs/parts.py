"""Generates the parts of pages that have a single source elsewhere: errors, alerts and attacks."""

import ast
import re
from collections.abc import Iterator, Mapping
from inspect import getdoc
from pathlib import Path

import yaml

from bench.harness.benchmark import markdown
from bench.harness.results import ROOT
from encoder_contract import errors

DOCS = ROOT / "docs"
PROMETHEUS = ROOT / "deploy" / "prometheus"
GENERATED = re.compile(r"(<!-- (\w+)(?::\w+)? -->\n).*?(<!-- /\2 -->)", re.DOTALL)
"""A generated part of a page between its markers, of this or another program."""


def errors_table() -> str:
    """Return the errors of the contract, each with its status and whether the client retries it."""
    kinds = [kind for kind in vars(errors).values() if isinstance(kind, type)]
    return markdown(
        ("status", "error", "when", "retried"),
        [
            (f"`{kind.status.name}`", f"`{kind.__name__}`", _line(getdoc(kind)), _yes(kind.retryable))
            for kind in kinds
            if issubclass(kind, errors.EncoderError) and kind is not errors.EncoderError
        ],
    )


def _line(text: str | None) -> str:
    return " ".join((text or "").split())


def _yes(value: bool) -> str:
    return "yes" if value else "no"


def alerts() -> str:
    """Return a section for each alert: its severity and summary, of the rule, and what to do, of remedies.yml."""
    (group,) = yaml.safe_load((PROMETHEUS / "alerts.yml").read_text())["groups"]
    remedies = yaml.safe_load((PROMETHEUS / "remedies.yml").read_text())
    return "\n".join(_alert(rule, remedies[rule["alert"]]) for rule in group["rules"])


def _alert(rule: Mapping[str, object], remedy: str) -> str:
    labels, annotations = rule["labels"], rule["annotations"]
    assert isinstance(labels, Mapping)
    assert isinstance(annotations, Mapping)
    summary = annotations["summary"].replace("{{ $labels.instance }}", "a replica")
    summary = re.sub(r"\{\{.*?\}\}", "…", summary)
    lasting = f" after {rule['for']}" if "for" in rule else ""
    title = f"### {rule['alert']}\n{labels['severity'].capitalize()}{lasting}: "
    return f"{title}{summary[0].lower()}{summary[1:]}.\n{remedy}"


def attacks() -> str:
    """Return a row for each attack: the text of its marker, and a link to the test that has it."""
    rows = [
        (text, f"[{name}](../{path.relative_to(ROOT)})")
        for path in sorted((ROOT / "tests").rglob("test_*.py"))
        for name, text in _marked(path)
    ]
    return markdown(("attack", "test"), rows)


def _marked(path: Path) -> Iterator[tuple[str, str]]:
    if "mark.attack(" not in (source := path.read_text()):
        return
    functions = [
        node for node in ast.parse(source).body if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
    ]
    for node in functions:
        for each in node.decorator_list:
            if isinstance(each, ast.Call) and ast.unparse(each.func) == "pytest.mark.attack":
                yield node.name, ast.literal_eval(each.args[0])


PARTS = {"errors": errors_table, "alerts": alerts, "attacks": attacks}


def filled(page: str) -> str:
    """Return the text of a page with its parts between their markers. Parts of other programs stay as they are."""

    def fill(found: re.Match[str]) -> str:
        return f"{found[1]}{PARTS[found[2]]().strip()}\n{found[3]}" if found[2] in PARTS else found[0]

    return GENERATED.sub(fill, page)
