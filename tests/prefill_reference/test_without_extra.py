"""The command of the reference service without its extra, `encoder-service[reference]`."""

import subprocess
from pathlib import Path

from tests.processes import run

ABSENT = ("torch", "transformers", "fastapi", "uvicorn", "prometheus_client")


def prefill_reference(*words: str | Path) -> subprocess.CompletedProcess[str]:
    absent = f"import sys; sys.modules.update(dict.fromkeys({ABSENT}))"
    code = f"{absent}; from prefill_reference.cli import main; sys.exit(main())"
    return run("python", "-c", code, *words)


def test_serve_names_what_is_missing_and_the_extra_that_installs_it(checkpoint: Path) -> None:
    result = prefill_reference("--model", checkpoint, "--listen", "127.0.0.1:0")
    assert (result.returncode, result.stderr.count("\n")) == (2, 1), result.stderr
    assert "uvicorn" in result.stderr, "the first that is imported"
    assert "pip install '.[reference]'" in result.stderr


def test_serve_lists_its_settings_without_the_extra() -> None:
    result = prefill_reference("--help")
    assert result.returncode == 0, result.stderr
    assert "--chunk-tokens" in result.stdout
