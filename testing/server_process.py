"""Starts `encoder-service serve` as a process on free ports, and stops it by pid."""

import os
import re
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from encoder_contract.settings import flag
from encoder_service.metrics import Scrape, scrape

# A server that exits while it starts is noticed at once; these limits are for busy machines. A draining server gives
# running calls 30 s.
START_S, DRAIN_S = 240.0, 40.0
CLI = "encoder_service.cli"
SETTING = r'(?:^ +(?=\w+ +\S+\n)|")(listening|metrics)(?:": "| +)([^\s"]+)'  # as text, or as JSON
# The process beside the server gets the other half of the cores. Two that share a core spend its time on spinning.
HALF_THE_CORES = max(1, (os.cpu_count() or 2) // 2)


class ServerStartError(Exception):
    """A server did not start; the message holds its output."""


class ServerProcess:
    """A server process. `settings` are fields of its `Config`; `log` is the file of its output.

    `endpoint` and `metrics_url` are set once `wait_until_it_listens` has returned.
    `executable` is the command of another environment. `threads` is the number of threads of one torch operation;
    0 leaves it to torch.
    With `own_session` the server does not get the Ctrl-C of our terminal; without, it ends with our session.
    """

    def __init__(
        self,
        model: Path,
        *,
        log: Path | None = None,
        own_session: bool = False,
        executable: Path | None = None,
        threads: int = 0,
        **settings: Any,
    ) -> None:
        if log is None:
            self._file = tempfile.NamedTemporaryFile(suffix=".log")  # noqa: SIM115 - deleted with this object
            log = Path(self._file.name)
        self.log = log
        ours = Path(sys.executable).with_name("encoder-service")
        command: list[str | Path] = [executable or ours, "serve"]
        if executable is None and not ours.exists():  # nothing is installed: PYTHONPATH has our sources
            command = [sys.executable, "-c", f"import sys; from {CLI} import main; sys.exit(main())", "serve"]
        free = {"listen": "127.0.0.1:0", "metrics_listen": "127.0.0.1:0"}
        for name, value in {"model": model, **free, **settings}.items():
            command += [flag(name), str(value)]
        environment = {name: value for name, value in os.environ.items() if not name.startswith("ENCSVC_")}
        if threads:
            environment["OMP_NUM_THREADS"] = str(threads)
        with self.log.open("w") as stream:
            self.process = subprocess.Popen(
                command,
                stdout=stream,
                stderr=subprocess.STDOUT,
                start_new_session=own_session,
                env=environment,
            )
        self.endpoint = self.metrics_url = ""

    def wait_until_it_listens(self, within_s: float = START_S) -> None:
        """Wait until it listens. A server that does not start is killed, and `ServerStartError` is raised."""
        deadline = time.monotonic() + within_s
        while time.monotonic() < deadline and self.process.poll() is None:
            printed = dict(re.findall(SETTING, self.log.read_text(), re.MULTILINE))
            if "listening" in printed:  # the last setting that the server prints
                self.endpoint, self.metrics_url = printed["listening"], printed["metrics"]
                return
            time.sleep(0.02)
        self.kill()
        raise ServerStartError(f"the server did not start:\n{self.log.read_text()}")

    @property
    def http_endpoint(self) -> str:
        """The host and port of its metrics."""
        return self.metrics_url.removeprefix("http://").partition("/")[0]

    @property
    def lines(self) -> list[str]:
        """Its output so far: settings, then log lines."""
        return self.log.read_text().splitlines()

    def metrics(self) -> Scrape:
        """Read its metrics now."""
        return scrape(self.metrics_url, timeout_s=20)

    def encodes(self) -> int:
        """Return how many images it has encoded and kept."""
        return int(self.metrics().total("encoded_images_total", outcome="kept"))

    def terminate(self, timeout_s: float = DRAIN_S) -> int:
        """Let it drain, kill it if it does not end in time, and return its exit code."""
        self.process.terminate()
        try:
            return self.process.wait(timeout_s)
        except subprocess.TimeoutExpired:
            return self.kill()

    def kill(self) -> int:
        """Send SIGKILL and return the exit code."""
        self.process.kill()
        return self.process.wait()


@contextmanager
def running(
    model: Path,
    *,
    log: Path | None = None,
    own_session: bool = False,
    within_s: float = START_S,
    **settings: Any,
) -> Iterator[ServerProcess]:
    """Run a server for the length of a `with` block; it drains at the end."""
    server = ServerProcess(model, log=log, own_session=own_session, **settings)
    try:
        server.wait_until_it_listens(within_s)
        yield server
    finally:
        server.terminate()
