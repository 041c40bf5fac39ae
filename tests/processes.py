"""Real server processes for tests: started on free ports, stopped by pid."""

import os
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

SCRIPTS = Path(sys.executable).parent


class ServerProcess:
    """`encoder-service serve` as its own process; `endpoint` is where it listens."""

    def __init__(self, model: Path, *flags: str) -> None:
        listen = [] if "--listen" in flags else ["--listen", "127.0.0.1:0"]
        self.process = subprocess.Popen(
            [
                SCRIPTS / "encoder-service",
                "serve",
                "--model",
                model,
                "--store-host-gib",
                "0.25",
                "--store-prefault",
                "no",
                *listen,
                *flags,
            ],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            env={name: value for name, value in os.environ.items() if not name.startswith("ENCSVC_")},
        )
        self.lines: list[str] = []
        self.log: list[str] = []
        assert self.process.stdout
        assert self.process.stderr
        self._log_reader = threading.Thread(target=self.log.extend, args=(self.process.stderr,), daemon=True)
        self._log_reader.start()
        self.endpoint = ""
        for line in self.process.stdout:
            self.lines.append(line.rstrip())
            if line.split()[:1] == ["listening"]:
                self.endpoint = line.split()[1]
                return
        self._log_reader.join()
        raise AssertionError(f"the server did not start: {self.lines} {self.log}")

    def terminate(self, timeout_s: float = 20) -> int:
        """Send SIGTERM and return the exit code."""
        self.process.send_signal(signal.SIGTERM)
        return self.process.wait(timeout_s)

    def kill(self) -> None:
        """Kill it if it still runs."""
        if self.process.poll() is None:
            self.process.kill()
        self.process.wait()


@contextmanager
def running(model: Path, *flags: str) -> Iterator[ServerProcess]:
    """Run a server for the length of a `with` block."""
    server = ServerProcess(model, *flags)
    try:
        yield server
    finally:
        server.kill()


def run(*command: str | Path, timeout_s: float = 60) -> subprocess.CompletedProcess[str]:
    """Run one of the console commands and return what it printed."""
    return subprocess.run(
        [SCRIPTS / str(command[0]), *command[1:]],
        capture_output=True,
        text=True,
        timeout=timeout_s,
        check=False,
    )
