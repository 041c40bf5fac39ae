"""The server's command, and the settings that these tests use."""

import os
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
SERVICE = Path(os.environ.get("ENCODER_SERVICE", ROOT / ".venv/bin/encoder-service"))
"""The command in the server's own environment."""
# No limit on the seconds of the queue: on a slow machine, the refusal of a burst is right.
SETTINGS = {"devices": "cpu", "dtype": "float32", "store_host_gib": 0.25, "max_queue_s": 3600}


def patient(folder: Path) -> Path:
    """Write a command of the server that waits for a device that tests have stopped; the usual one kills it."""
    command = folder / "patient-encoder-service"
    command.write_text(PROGRAM.format(python=SERVICE.with_name("python").absolute()))
    command.chmod(0o700)
    return command


PROGRAM = """#!{python}
import sys
from encoder_service.cli import main
from encoder_service.devices import device_link

if __name__ == "__main__":
    device_link.QUIET_TICKS = device_link.SILENT_TICKS = 1_000_000
    sys.exit(main())
"""
