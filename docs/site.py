"""Builds the documentation site from the Markdown pages of the repository: `make docs`.

The pages link to each other, to pictures and to files of the repository by relative paths. They are copied to a folder
with the same paths, so that all links hold, and so are the files that they link to. The API reference is made of
docstrings, types and defaults. A link or a name that leads nowhere fails the build.
"""

import dataclasses
import inspect
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import prefill_client

ROOT = Path(__file__).resolve().parents[1]
STAGE, SITE, CONFIG = ROOT / ".docs/pages", ROOT / ".docs/site", ROOT / "docs/mkdocs.yml"
API = """# API of the client

Import these names from `prefill_client` itself. [The client](prefill.md) shows how to use them.

"""


def stage() -> None:
    """Copy pages, pictures and the files that pages link to, and write the page of the API."""
    shutil.rmtree(STAGE, ignore_errors=True)
    pages = [*ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.md")]
    for page in pages:
        links = re.findall(r"\]\((?!https?:)([^)#\s]+)", page.read_text())
        for file in (page, *((page.parent / link).resolve() for link in links)):
            if file.is_file():
                copy = STAGE / file.relative_to(ROOT)
                copy.parent.mkdir(parents=True, exist_ok=True)
                shutil.copy(file, copy)
    (STAGE / "docs/api.md").write_text(api_page((ROOT / "docs/prefill.md").read_text()))


def api_page(client_page: str) -> str:
    """Return the page of the API: the names of prefill_client, grouped as the table of `client_page` groups them."""
    table = client_page.split("## What `prefill_client` exports", 1)[1].split("\n## ", 1)[0]
    groups = re.findall(r"^\| (?:\[(.+?)\]\(.*?\)|(.+?)) \| (.+) \|$", table, re.MULTILINE)
    parts = [API]
    shown: set[str] = set()
    for linked, plain, text in groups:
        names = [name for name in re.findall(r"`(\w+)[`(]", text) if name in prefill_client.__all__]
        names = [name for name in dict.fromkeys(names) if name not in shown and not name.startswith("__")]
        shown.update(names)
        if names:
            heading = linked or plain
            parts.append(f"## {heading[0].upper()}{heading[1:]}\n")
            parts += [f"::: prefill_client.{name}\n{_options(name)}{_value(name)}" for name in names]
    return "\n".join(parts)


def _options(name: str) -> str:
    """Return the options of a class that callers do not construct: its constructor is not shown."""
    value = getattr(prefill_client, name)
    is_made_by_callers = dataclasses.is_dataclass(value) or (
        inspect.isclass(value) and value.__init__.__doc__
    )
    if not inspect.isclass(value) or is_made_by_callers or issubclass(value, Exception):
        return ""
    return "    options: {merge_init_into_class: false}\n"


def _value(name: str) -> str:
    """Return the line that shows the value of a constant; nothing for classes and functions."""
    value = getattr(prefill_client, name)
    return f"\nIts value is `{value!r}`.\n" if isinstance(value, str | int | float | tuple) else ""


def build() -> subprocess.CompletedProcess[str]:
    """Make the site of what is staged."""
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--config-file", str(CONFIG)]
    quiet = {**os.environ, "NO_MKDOCS_2_WARNING": "1"}  # an advertisement
    return subprocess.run(command, cwd=ROOT, env=quiet, stderr=subprocess.PIPE, text=True, check=False)


def main() -> int:
    """Build the site; return the exit code of mkdocs."""
    stage()
    built = build()
    if built.returncode:
        sys.stderr.write(built.stderr)
    return built.returncode


if __name__ == "__main__":
    sys.exit(main())
