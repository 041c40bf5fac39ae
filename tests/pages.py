"""Reads the pages and the repository's files: which pages there are, and what they have in code formatting."""

import re
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
PAGES = sorted([*ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.md")])
# The changelog also names files, commands and flags that are gone.
OF_NOW = [page for page in PAGES if page.name != "CHANGELOG.md"]
PACKAGES = (
    *("encoder_service", "prefill_client", "prefill_reference", "proto"),
    *("bench", "demo", "testing", "deploy"),
)
SOURCES = (".py", ".proto", ".lua", ".yml", ".yaml", ".toml")


def name_of(page: Path) -> str:
    return str(page.relative_to(ROOT))


def named(pattern: str, text: str) -> set[str]:
    return set(re.findall(pattern, text))


def code_in(page: Path) -> Iterator[str]:
    """Yield the code of a page: fenced blocks, indented blocks, and spans."""
    text = page.read_text()
    yield from re.findall(r"^```.*?\n(.*?)^```", text, re.MULTILINE | re.DOTALL)
    text = re.sub(r"^```.*?^```", "", text, flags=re.MULTILINE | re.DOTALL)
    yield from re.findall(r"(?:^\n)((?: {4,}\S.*\n)+)", text, re.MULTILINE)
    yield from (re.sub(r"\s+", " ", span) for span in re.findall(r"`([^`]+)`", text))


def lines_in(page: Path) -> Iterator[str]:
    """Yield the lines of that code, each command with its continuation and without its comment."""
    for code in code_in(page):
        yield from (line.split(" #")[0] for line in code.replace("\\\n", " ").splitlines())


def sources() -> Iterator[Path]:
    """Yield the files of the programs, benchmarks and deployment; not the tests, which may name anything."""
    for package in PACKAGES:
        yield from (path for path in (ROOT / package).rglob("*") if path.suffix in SOURCES)
    yield from (
        ROOT / name for name in ("Makefile", "pyproject.toml", "deploy/Dockerfile", "deploy/.env.example")
    )
