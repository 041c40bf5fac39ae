"""Starts `encoder-sglang-gateway` as a process on a free port."""

import sys
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager

from encoder_contract.settings import flag
from testing.processes import LoggedProcess

PATIENCE_S = 240.0
# Not the console script: where SGLang is installed, there may be none.
COMMAND = "import sys; from prefill_client.sglang_gateway.cli import main; sys.exit(main())"


class GatewayProcess(LoggedProcess):
    """A gateway process. `url` is set once `wait_until_it_listens` has returned."""

    def __init__(self, encoder: str, **settings: object) -> None:
        command = [sys.executable, "-c", COMMAND]
        for name, value in {"encoder": encoder, "listen": "127.0.0.1:0", **settings}.items():
            command += [flag(name), str(value)]
        super().__init__(command, {})
        self.url = ""

    def wait_until_it_listens(self) -> None:
        """Wait until it listens. Raises `StartError` if it does not start."""
        self.url = f"http://{self.wait_for_settings()['listening']}"

    def count(self, name: str, label: str = "") -> float:
        """Return the sum of a counter over its labels, or over those that contain `label`."""
        with urllib.request.urlopen(f"{self.url}/metrics", timeout=PATIENCE_S) as answer:
            lines = answer.read().decode().splitlines()
        return sum(
            float(line.rpartition(" ")[2])
            for line in lines
            if line.startswith(f"sglang_gateway_{name}_total") and label in line
        )


@contextmanager
def running_gateway(encoder: str, **settings: object) -> Iterator[GatewayProcess]:
    """Run a gateway for the length of a `with` block."""
    gateway = GatewayProcess(encoder, **settings)
    try:
        gateway.wait_until_it_listens()
        yield gateway
    finally:
        gateway.kill()
