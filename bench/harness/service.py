"""The service beside engines whose environment runs the benchmark."""

import os
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

from testing.server_process import ServerProcess, running


def service_for_engines(model: Path, **settings: Any) -> AbstractContextManager[ServerProcess]:
    """Run the server that the variable ENCODER_SERVICE names, on the CPU, for the length of a `with` block."""
    return running(
        model,
        executable=Path(os.environ["ENCODER_SERVICE"]),
        devices="cpu",
        dtype="float32",
        store_host_gib=0.5,
        device_peak_tflops=0.1,
        **settings,
    )
