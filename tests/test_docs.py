"""The pages against the code: what they name exists, and what an operator can meet is named."""

import importlib.util
import re
from collections.abc import Iterator
from dataclasses import fields
from pathlib import Path

import pytest

from bench.questions import QUESTIONS, SUMMARY
from bench.report import PAGES
from encoder_contract import errors
from encoder_service.config import Config
from encoder_service.metrics import Metrics
from tests.processes import run
from tests.test_floors import FLOORS

ROOT = Path(__file__).resolve().parent.parent
DOCS = sorted([*ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.md")])
OURS = ("encoder_service", "prefill_client", "encoder_contract", "proto", "bench", "tests", "deploy", "docs")
COMMANDS = {
    "encoder-service": ("serve", "top", "stats", "evict", "flush"),
    "prefill-client": ("encode", "serve", "timeline"),
}
# Of tools that are not ours: Docker, pip, redis, kubectl, git.
FOREIGN_FLAGS = {"--build", "--detach", "--wait", "--no-deps", "--latency", "--force-recreate", "--scale"}
WRITTEN_BY_THE_READER = {"deploy/.env"}
MARKER = re.compile(r"<!-- bench:([a-z]+)(?:\.tables)? -->")


def named(pattern: str, text: str) -> set[str]:
    return {match[1] for match in re.finditer(pattern, text)}


def code_in(text: str) -> Iterator[str]:
    """Yield what a page says in code: fenced blocks and inline spans."""
    yield from re.findall(r"^```.*?^```", text, re.MULTILINE | re.DOTALL)
    yield from re.findall(r"`([^`\n]+)`", text)


@pytest.fixture(scope="module")
def flags() -> set[str]:
    """Every flag of every command and benchmark, as their help says it."""
    commands = [(name, sub, "--help") for name, subs in COMMANDS.items() for sub in subs]
    found: set[str] = set()
    for command in commands:
        found |= named(r"(?<![\w-])(--[a-z][a-z-]+)", run(*command).stdout)
    for module in (ROOT / "bench").glob("*.py"):
        found |= named(r'"(--[a-z][a-z-]+)"', module.read_text())
    return found


@pytest.mark.parametrize("page", DOCS, ids=lambda page: str(page.relative_to(ROOT)))
def test_links_and_files_exist(page: Path) -> None:
    text = page.read_text()
    for target in named(r"\]\((?!https?:)([^)#\s]+)", text):
        assert (page.parent / target).exists(), target
    for code in code_in(text):
        for path in named(rf"(?<![\w./-])((?:{'|'.join(OURS)})/[\w./-]*\w/?)", code) - WRITTEN_BY_THE_READER:
            places = [ROOT / path, ROOT / "proto" / path]
            assert any(place.exists() for place in places), path
        for module in named(
            r"(?<![\w.])((?:bench|encoder_service|prefill_client|encoder_contract)\.[a-z]\w*(?:\.\w+)*)", code
        ):
            assert exists(module), module


def exists(module: str) -> bool:
    """Whether a dotted name is a module, or a name in one."""
    parent, _, name = module.rpartition(".")
    for dotted in (module, parent):
        try:
            if (spec := importlib.util.find_spec(dotted)) is not None:
                return dotted == module or bool(
                    spec.origin and re.search(rf"\b{name}\b", Path(spec.origin).read_text())
                )
        except ModuleNotFoundError:
            continue
    return module.startswith("encoder_contract.v1")


@pytest.mark.parametrize("page", DOCS, ids=lambda page: str(page.relative_to(ROOT)))
def test_anchors_point_to_headings(page: Path) -> None:
    for target, anchor in re.findall(r"\]\((?!https?:)([^)#\s]*)#([^)\s]+)\)", page.read_text()):
        headings = re.findall(
            r"^#+ (.+)$", (page.parent / target if target else page).read_text(), re.MULTILINE
        )
        slugs = {re.sub(r"[^\w -]", "", heading.lower()).replace(" ", "-") for heading in headings}
        assert anchor in slugs, f"{target}#{anchor}"


def test_every_flag_a_page_names_exists(flags: set[str]) -> None:
    for page in DOCS:
        for code in code_in(page.read_text()):
            unknown = named(r"(?<![\w-])(--[a-z][a-z-]+)", code) - flags - FOREIGN_FLAGS
            assert not unknown, f"{page.name}: {unknown}"


def test_every_environment_name_exists() -> None:
    known = {Config.environment_name(field.name) for field in fields(Config)}
    for page in [*DOCS, *(ROOT / "deploy").rglob("*.y*ml"), ROOT / "deploy" / ".env.example"]:
        assert named(r"\b(ENCSVC_[A-Z_]+[A-Z])\b", page.read_text()) <= known, page.name


def test_every_make_target_a_page_names_exists_and_says_what_it_does() -> None:
    makefile = (ROOT / "Makefile").read_text()
    targets, described = (
        named(r"(?m)^\.PHONY: ([a-z-]+)$", makefile),
        named(r"(?m)^([a-z-]+):.*## \w", makefile),
    )
    assert targets == described
    for page in DOCS:
        for code in code_in(page.read_text()):
            assert named(r"(?:^|[\n`;&(] *)make ([a-z-]+)", code) <= targets, f"{page.name}: {code}"


def test_every_metric_a_page_names_exists() -> None:
    metrics = Metrics()
    collected = {metric.name for metric in metrics._registry.collect()}
    from encoder_service.metrics import PREFIX, READINGS

    collected |= {f"{PREFIX}_{name}" for name in READINGS}
    for page in DOCS:
        for code in code_in(page.read_text()):
            for name in named(r"\b(encsvc_\w+)", code):
                base = re.sub(r"_(total|bucket|sum|count)$", "", name)
                assert base in collected, f"{page.name}: {name}"


def test_the_contract_page_names_every_error_with_its_status() -> None:
    rows = re.findall(
        r"^\| `([A-Z_]+)` \| `(\w+)` \|", (ROOT / "docs" / "contract.md").read_text(), re.MULTILINE
    )
    family = {
        (kind.status.name, name)
        for name, kind in vars(errors).items()
        if isinstance(kind, type)
        and issubclass(kind, errors.EncoderError)
        and kind is not errors.EncoderError
    }
    assert set(rows) == family


def test_every_status_a_page_names_exists() -> None:
    statuses = {status.name for status in errors.Status}
    grpc_like = re.compile(r"`((?:INVALID|NOT|RESOURCE|DEADLINE|FAILED|PERMISSION|UNAUTH|UNAVAIL)[A-Z_]+)`")
    for page in DOCS:
        assert set(grpc_like.findall(page.read_text())) <= statuses, page.name


def test_the_map_shows_every_module_on_its_floor() -> None:
    (drawn,) = re.findall(r"^```\n(.*?)^```", (ROOT / "docs/architecture.md").read_text(), re.M | re.S)
    floors = [line.split("│")[0].split() for line in drawn.splitlines()]
    assert [sorted(floor) for floor in floors] == [sorted(floor) for floor in FLOORS]


def test_every_question_has_its_table_and_every_figure_of_the_summary_exists() -> None:
    names = {question.name for question in QUESTIONS}
    assert sorted(MARKER.findall((ROOT / "docs" / "benchmarks.md").read_text())) == sorted(names)
    assert {name for page in PAGES for name in MARKER.findall(page.read_text())} == names | {"summary"}
    for question in QUESTIONS:
        source = (ROOT / "bench" / f"{question.module}.py").read_text()
        given = {
            argument
            for argument in (*question.command(quick=True), *question.arguments)
            if argument[:2] == "--"
        }
        assert given <= named(r'"(--[a-z-]+)"', source), question.name
    figures = {(question.name, figure.key) for question in QUESTIONS for figure in question.figures}
    assert {(name, key) for name, key, _ in SUMMARY} <= figures


def test_the_readme_is_short_and_shows_its_commands_first() -> None:
    lines = (ROOT / "README.md").read_text().splitlines()
    assert len(lines) <= 90
    assert {line.split("#")[0].strip() for line in lines[:30]} >= {"make demo", "make test"}
