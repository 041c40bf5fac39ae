"""A server at a fixed address that tests kill, stop and restart."""

import os
import signal
from pathlib import Path
from typing import Any

from testing.processes import free_port
from testing.server_process import ServerProcess
from tests.vllm.service import SERVICE, SETTINGS


class Restartable:
    """A server at a fixed address; one process after another may serve it."""

    def __init__(self, model: Path, **settings: Any) -> None:
        self._model = model
        self._settings = {**SETTINGS, **settings}
        self.endpoint = f"127.0.0.1:{free_port()}"
        self.server: ServerProcess | None = None

    def start(self) -> None:
        settings = {**self._settings, "listen": self.endpoint}
        self.server = ServerProcess(self._model, **{"executable": SERVICE, **settings})
        self.server.wait_until_it_listens()

    @property
    def process(self) -> ServerProcess:
        """Its current process, or its last."""
        assert self.server is not None, "it was never started"
        return self.server

    def encodes(self) -> int:
        """How many images its current process has encoded."""
        return self.process.encodes()

    def drain(self) -> None:
        """Send SIGTERM, as a rolling restart does."""
        self.process.terminate()

    def kill(self) -> None:
        self.process.kill()

    def signal(self, number: signal.Signals) -> None:
        os.kill(self.process.process.pid, number)
