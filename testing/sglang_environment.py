"""Where SGLang is installed, in an environment of its own."""

import os
from pathlib import Path

FOLDER = Path(os.environ.get("SGLANG_ENVIRONMENT", Path(__file__).resolve().parents[1] / ".venv-sglang"))
"""What `make test-sglang` makes: beside the oldest release, `newest` has the newest, and `wheels` those between."""
PYTHON = FOLDER / "bin" / "python"
"""The interpreter that has the oldest release."""
