"""Replicas that share the memory of one interpreter: each is forked from a process that has imported everything.

A replica is `encoder-service serve` with its device on a thread, so it is one process and its idle decoders: 20 fit
into 4 GiB. `bench.edge_parts.null_tower` must be installed before the first one starts.
"""

import multiprocessing
import os
import re
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from encoder_contract.settings import flag
from encoder_service.metrics import Scrape, scrape
from testing.processes import DRAIN_S, SETTING, START_S, StartError, free_port

_FORKS = multiprocessing.get_context("forkserver")
_FORKS.set_forkserver_preload(
    ["bench.scale_parts.forked", "testing.device_thread", "encoder_service.app", "transformers"]
)
SETTINGS: dict[str, Any] = {
    "devices": "cpu",
    "decode_threads": 1,
    "store_host_gib": 0.03,
    "source_gib": 0.02,
    "max_queued_gib": 0.0625,
    "index_timeout_ms": 2000,  # a stall of a busy machine is not an outage
    "drain_s": 15,
    "log_level": "warning",
    "metrics_listen": "127.0.0.1:0",
}


def _serve(arguments: Sequence[str], log: Path) -> None:
    """Run the server's command line in a forked process."""
    import torch

    from encoder_service import cli
    from encoder_service.config import Config
    from encoder_service.devices.device_process import DeviceProcess
    from encoder_service.devices.model import load_model
    from testing.device_thread import DeviceThread

    def start_devices(config: Config) -> list[DeviceProcess]:
        return [DeviceThread(config, load_model(config))]

    with log.open("w") as stream:
        os.dup2(stream.fileno(), 1)
        os.dup2(stream.fileno(), 2)
    torch.set_num_threads(1)
    cli.start_devices = start_devices  # type: ignore[attr-defined, assignment]
    sys.exit(cli.main(["serve", *arguments]))


class ForkedReplica:
    """A replica with its own loopback address, as if on its own machine."""

    def __init__(self, model: Path, number: int, **settings: Any) -> None:
        self.endpoint = f"127.0.0.{number + 2}:{free_port()}"
        rows = f"127.0.0.{number + 2}:0"
        all_settings = {"model": model, "listen": self.endpoint, "rows_listen": rows, **SETTINGS, **settings}
        self._arguments = [text for name, value in all_settings.items() for text in (flag(name), str(value))]
        self._log = Path(tempfile.mkstemp(prefix="replica-", suffix=".log")[1])
        self._metrics_url = ""

    def start(self) -> None:
        """Fork it; `wait` waits until it listens."""
        self._log.write_text("")
        self.process = _FORKS.Process(target=_serve, args=(self._arguments, self._log), daemon=True)
        self.process.start()

    def wait(self) -> None:
        """Wait until it listens. Raises `StartError` if it does not start."""
        deadline = time.monotonic() + START_S
        while time.monotonic() < deadline and self.process.is_alive():
            found = dict(re.findall(SETTING, self._log.read_text(), re.MULTILINE))
            if "listening" in found:
                self._metrics_url = found["metrics"]
                return
            time.sleep(0.05)
        raise StartError(f"a forked replica did not start:\n{self._log.read_text()}")

    def kill(self) -> None:
        """Send SIGKILL."""
        self.process.kill()
        self.process.join()

    def drain(self) -> bool:
        """Let it drain; return whether it ended by itself, with success."""
        self.process.terminate()
        self.process.join(DRAIN_S)
        if self.process.exitcode is None:
            self.kill()
        return self.process.exitcode == 0

    def close(self) -> None:
        """Kill it and delete its log."""
        if self.process.is_alive():
            self.kill()
        self._log.unlink()

    @property
    def log(self) -> str:
        """Its output since its last start."""
        return self._log.read_text()

    def metrics(self) -> Scrape:
        """Read its metrics now."""
        return scrape(self._metrics_url, timeout_s=20)
