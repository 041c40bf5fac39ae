"""`prefill-client sglang-gateway` as a process of its own: started on a free port, ended by pid."""

import re
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory

from encoder_contract.settings import flag

# On a machine that does ten other things too.
START_S, PATIENCE_S = 100.0, 30.0
# Not the console script: where SGLang is installed, there may be none.
COMMAND = "import sys; from prefill_client.cli import main; sys.exit(main())"


class GatewayProcess:
    """A gateway, started. All it says is in `log`; `url` is where it answers, once `wait` has returned."""

    def __init__(self, encoder: str, log: Path, **settings: object) -> None:
        command = [sys.executable, "-c", COMMAND, "sglang-gateway"]
        for name, value in {"encoder": encoder, "listen": "127.0.0.1:0", **settings}.items():
            command += [flag(name), str(value)]
        self.log = log
        self.url = ""
        with log.open("w") as stream:
            self.process = subprocess.Popen(command, stdout=stream, stderr=subprocess.STDOUT)

    def wait(self) -> None:
        """Return when it answers."""
        deadline = time.monotonic() + START_S
        while time.monotonic() < deadline and self.process.poll() is None:
            if found := re.search(r"^ +listening +(\S+)$", self.log.read_text(), re.MULTILINE):
                self.url = f"http://{found[1]}"
                return
            time.sleep(0.02)
        raise AssertionError(f"the gateway did not start:\n{self.log.read_text()}")

    def terminate(self) -> int:
        """End it as an orchestrator does, and return its exit code."""
        self.process.terminate()
        return self.process.wait(PATIENCE_S)

    def count(self, name: str, label: str = "") -> float:
        """Return the sum of a counter over its labels, or over those that contain `label`."""
        with urllib.request.urlopen(f"{self.url}/metrics", timeout=PATIENCE_S) as answer:
            lines = answer.read().decode().splitlines()
        return sum(
            float(line.rpartition(" ")[2])
            for line in lines
            if line.startswith(f"sglang_gateway_{name}_total") and label in line
        )

    def kill(self) -> None:
        self.process.kill()
        self.process.wait()


@contextmanager
def running_gateway(encoder: str, **settings: object) -> Iterator[GatewayProcess]:
    """Run a gateway for the length of a `with` block."""
    with TemporaryDirectory() as folder:
        gateway = GatewayProcess(encoder, Path(folder) / "log", **settings)
        try:
            gateway.wait()
            yield gateway
        finally:
            gateway.kill()
