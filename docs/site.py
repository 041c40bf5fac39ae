"""Builds the documentation site from the Markdown pages of the repository: `make docs`.

The pages link to each other, to pictures and to files of the repository by relative paths. They are copied to a folder
with the same paths, so that all links hold, and so are the files that they link to. The API reference is made of
docstrings. A link or a name that leads nowhere fails the build.
"""

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
    names = sorted(name for name in prefill_client.__all__ if not name.startswith("__"))
    (STAGE / "docs/api.md").write_text(API + "\n".join(f"::: prefill_client.{name}\n" for name in names))


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
