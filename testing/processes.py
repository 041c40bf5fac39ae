"""Processes that tests, benchmarks and the demo start: their output goes to a file, and they are stopped by pid."""

import contextlib
import os
import random
import re
import shlex
import signal
import socket
import subprocess
import tempfile
import time
import urllib.request
from collections.abc import Mapping, Sequence
from pathlib import Path

# These limits are for busy machines: a process that exits while it starts is noticed at once.
START_S = 300.0
# A draining server gives running calls 30 s.
DRAIN_S = 40.0
# A line of the settings that our commands print when they start, as text or as JSON.
SETTING = r'(?:^ +(?=\w+ +\S+\n)|")(listening|metrics)(?:": "| +)([^\s"]+)'


class StartError(Exception):
    """A process did not start; the message holds its output."""


class LoggedProcess:
    """A process that runs `command`; `log` is the file of its output.

    Its environment is ours and `environment`, without our settings of a server.

    With `own_group` the process does not get the Ctrl-C of our terminal. In a session of its own, it would get a
    share of the cores apart from that of others (sched_autogroup).
    """

    def __init__(
        self,
        command: Sequence[str | Path],
        environment: Mapping[str, str],
        *,
        log: Path | None = None,
        own_group: bool = False,
    ) -> None:
        if log is None:
            self._file = tempfile.NamedTemporaryFile(suffix=".log")  # noqa: SIM115 - deleted with this object
            log = Path(self._file.name)
        self.log = log
        self._command = list(map(str, command))
        ours = {name: value for name, value in os.environ.items() if not name.startswith("ENCSVC_")}
        with self.log.open("w") as stream:
            self.process = subprocess.Popen(
                self._command,
                stdout=stream,
                stderr=subprocess.STDOUT,
                process_group=0 if own_group else None,
                env={**ours, **environment},
            )

    @property
    def lines(self) -> list[str]:
        """Its output so far: settings, then log lines."""
        return self.log.read_text().splitlines()

    def wait_for_settings(self, within_s: float = START_S) -> dict[str, str]:
        """Wait until it listens, and return the addresses that it has printed: `listening` and perhaps `metrics`.

        A process that does not start is killed, and `StartError` is raised.
        """
        deadline = time.monotonic() + within_s
        while time.monotonic() < deadline and self.process.poll() is None:
            settings = dict(re.findall(SETTING, self.log.read_text(), re.MULTILINE))
            if "listening" in settings:  # the last setting that is printed
                return settings
            time.sleep(0.02)
        self.kill()
        raise self._start_error()

    def _start_error(self) -> StartError:
        return StartError(f"{shlex.join(self._command)} did not start:\n{self.log.read_text()}")

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


class EngineProcess(LoggedProcess):
    """An LLM engine that serves HTTP at `url`, in its own process group."""

    def __init__(self, url: str, command: Sequence[str | Path], environment: Mapping[str, str]) -> None:
        super().__init__(command, environment, own_group=True)
        self.url = url

    def wait_until_it_answers(self) -> None:
        """Wait until it is healthy. Raises `StartError` if it does not start."""
        deadline = time.monotonic() + START_S
        while time.monotonic() < deadline and self.process.poll() is None:
            try:
                with urllib.request.urlopen(self.url + "/health", timeout=5) as answer:
                    if answer.status == 200:
                        return
            except OSError:
                time.sleep(0.2)
        raise self._start_error()

    def stop(self) -> None:
        """End it and the processes that it started, if it still runs."""
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.process.pid, signal.SIGTERM)
        try:
            self.process.wait(30)
        except subprocess.TimeoutExpired:
            os.killpg(self.process.pid, signal.SIGKILL)
            self.process.wait()


def free_port(*offsets: int) -> int:
    """Return a port of 127.0.0.1 that is free, as are those `offsets` above it.

    No other call returns one of them while this process runs, in no process of this machine: a server that is started
    later, or again, finds its port free. All are below the ephemeral ports: the system does not give them away, and
    SGLang does not meet its own sockets there.
    """
    while True:
        port = random.randint(20000, 32000 - max(offsets, default=0))
        with contextlib.suppress(OSError), contextlib.ExitStack() as taken:
            for each in (port, *(port + offset for offset in offsets)):
                with socket.socket() as tried:
                    tried.bind(("127.0.0.1", each))
                taken.enter_context(socket.socket(socket.AF_UNIX)).bind(f"\0port {each} of encoder-service")
            _TAKEN.append(taken.pop_all())
            return port


# Sockets whose names stand for ports. The names belong to the network namespace, as the ports do, and end with us.
_TAKEN: list[contextlib.ExitStack] = []
