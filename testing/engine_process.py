"""An LLM engine behind HTTP, as a process of its own."""

import os
import signal
import subprocess
import tempfile
import time
import urllib.request
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path

START_S = 300.0  # on a machine that does much else


class EngineProcess:
    """An engine that was started at `url`; what it says is in `log`."""

    def __init__(self, url: str, command: Sequence[str | Path], environment: Mapping[str, str]) -> None:
        self.url = url
        self._file = tempfile.NamedTemporaryFile(suffix=".log")  # noqa: SIM115 - gone with this object
        self.log = Path(self._file.name)
        with self.log.open("w") as stream:
            self.process = subprocess.Popen(
                list(map(str, command)), stdout=stream, stderr=subprocess.STDOUT, env={**os.environ, **environment},
                start_new_session=True,
            )  # fmt: skip

    def wait_until_it_answers(self) -> None:
        """Return when it does; one that does not come up raises, with what it said."""
        deadline = time.monotonic() + START_S
        while time.monotonic() < deadline and self.process.poll() is None:
            try:
                with urllib.request.urlopen(self.url + "/health", timeout=5) as answer:
                    if answer.status == 200:
                        return
            except OSError:
                time.sleep(0.2)
        raise AssertionError(f"the engine did not start:\n{self.log.read_text()}")

    def stop(self) -> None:
        """End it and what it started; one that has ended by itself is gone."""
        with suppress(ProcessLookupError):
            os.killpg(self.process.pid, signal.SIGTERM)
        try:
            self.process.wait(30)
        except subprocess.TimeoutExpired:
            os.killpg(self.process.pid, signal.SIGKILL)
            self.process.wait()
