"""Starts `encoder-service serve` as a process on free ports."""

import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from encoder_contract.settings import flag
from encoder_service.metrics import Scrape, scrape
from testing.processes import START_S, LoggedProcess

# The process beside the server gets the other half of the cores. Two that share a core spend its time on spinning.
HALF_THE_CORES = max(1, (os.cpu_count() or 2) // 2)


class ServerProcess(LoggedProcess):
    """A server process. `settings` are fields of its `Config`.

    `endpoint` and `metrics_url` are set once `wait_until_it_listens` has returned.
    `executable` is the command of another environment. `threads` is the number of threads of one torch operation;
    0 leaves it to torch.
    """

    def __init__(
        self,
        model: Path,
        *,
        log: Path | None = None,
        own_group: bool = False,
        executable: Path | None = None,
        threads: int = 0,
        **settings: Any,
    ) -> None:
        installed = Path(sys.executable).with_name("encoder-service")
        command: list[str | Path] = [executable or installed, "serve"]
        if executable is None and not installed.exists():  # PYTHONPATH has our sources
            code = "import sys; from encoder_service.cli import main; sys.exit(main())"
            command = [sys.executable, "-c", code, "serve"]
        free_ports = {"listen": "127.0.0.1:0", "metrics_listen": "127.0.0.1:0"}
        for name, value in {"model": model, **free_ports, **settings}.items():
            command += [flag(name), str(value)]
        environment = {"OMP_NUM_THREADS": str(threads)} if threads else {}
        super().__init__(command, environment, log=log, own_group=own_group)
        self.endpoint = self.metrics_url = ""

    def wait_until_it_listens(self, within_s: float = START_S) -> None:
        """Wait until it listens. Raises `StartError` if it does not start."""
        settings = self.wait_for_settings(within_s)
        self.endpoint, self.metrics_url = settings["listening"], settings["metrics"]

    @property
    def http_endpoint(self) -> str:
        """The host and port of its metrics."""
        return self.metrics_url.removeprefix("http://").partition("/")[0]

    def metrics(self) -> Scrape:
        """Read its metrics now."""
        return scrape(self.metrics_url, timeout_s=60)

    def encodes(self) -> int:
        """Return how many images it has encoded and kept."""
        return int(self.metrics().total("encoded_images_total", outcome="kept"))


@contextmanager
def running(model: Path, *, within_s: float = START_S, **options: Any) -> Iterator[ServerProcess]:
    """Run a server for the length of a `with` block; it drains at the end."""
    server = ServerProcess(model, **options)
    try:
        server.wait_until_it_listens(within_s)
        yield server
    finally:
        server.terminate()
