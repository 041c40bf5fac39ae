"""The server's command, and the settings that these tests use."""

import os
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
SERVICE = Path(os.environ.get("ENCODER_SERVICE", ROOT / ".venv/bin/encoder-service"))
"""The command in the server's own environment."""
# No limit on the seconds of the queue: on a slow machine, the refusal of a burst is right.
SETTINGS = {"devices": "cpu", "dtype": "float32", "store_host_gib": 0.25, "max_queue_s": 3600}
