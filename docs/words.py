"""Counts the words of the pages that people wrote, without those that programs wrote: `python -m docs.words`."""

import re
from pathlib import Path

from bench.harness.results import ROOT
from docs.parts import GENERATED

GENERATED_PAGES = {"settings.md", "metrics.md"}
OF_PROJECTS = {"CHANGELOG.md", "CODE_OF_CONDUCT.md"}  # they grow with releases, or are a standard text


def by_hand() -> dict[Path, int]:
    """Return the words of each page that people wrote. A word has a letter or a digit."""
    pages = sorted([*ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.md")])
    counted = (page for page in pages if page.name not in GENERATED_PAGES | OF_PROJECTS)
    return {page: words(page.read_text()) for page in counted}


def words(text: str) -> int:
    """Return the number of words outside generated parts."""
    return sum(bool(re.search(r"\w", word)) for word in GENERATED.sub("", text).split())


def main() -> None:
    """Print the words of each page, and their sum."""
    counts = by_hand()
    for page, count in counts.items():
        print(f"{count:6} {page.relative_to(ROOT)}")
    print(f"{sum(counts.values()):6} together")


if __name__ == "__main__":
    main()
