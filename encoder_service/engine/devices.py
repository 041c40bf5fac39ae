"""The device processes of a server: start one for each device, notice its end, start it again.

This module does not import torch, so that the processes load while the server imports it.
"""

from __future__ import annotations

import logging
import os
import signal
import subprocess
import sys
import threading
from collections import Counter
from contextlib import suppress
from dataclasses import replace
from multiprocessing.connection import Connection, Pipe
from typing import TYPE_CHECKING

from encoder_contract.errors import EncoderError, UnavailableError
from encoder_contract.geometry import Grid
from encoder_service.config import Config, ConfigError, flag
from encoder_service.engine import EXIT_LOST, EXIT_STUCK
from encoder_service.engine.environment import device_environment

if TYPE_CHECKING:
    from encoder_service.engine.model import MemoryPlan
    from encoder_service.engine.process import DeviceState, Loaded

log = logging.getLogger(__name__)

ENDS = ("crashed", "killed", "lost", "stuck")
"""Why processes ended. "killed": by another process, or by the kernel when memory was short."""
# Connections of a process, one for each thread: prepare, vit and copy-out, and the threads that decode single images.
_OTHER_THREADS, _MOST_DECODE_THREADS = 3, 8
_PROGRAM = (
    "import sys; sys.path[:] = {path!r}; from {module} import main; main({descriptors!r}, parent={parent})"
)
_MODULE = "encoder_service.engine.process"


class DeviceProcess:
    """The process of one device, and its successor after it has ended.

    `state` is its last report. The kernel ends a process with the thread that started it.
    """

    def __init__(self, config: Config, number: int, processes: int) -> None:
        """Start the first process; `loaded` waits for it."""
        self.number, self.name = number, config.device_names[number]
        device_gib = 0.0 if number else config.store_device_gib  # the first has the store's device tier
        # Without the index: its URL may have a password.
        self._config = replace(config, devices=self.name, store_device_gib=device_gib, index="memory")
        self._processes = processes
        self.plan: MemoryPlan | None = None  # once it has loaded
        self.state: DeviceState | None = None
        self._counts: Counter[str] = Counter()  # of earlier processes
        self.is_up = False
        self.restarts = dict.fromkeys(ENDS, 0)
        self.failures = 0
        """How many processes have ended in a row without a completed batch."""
        self._counting_lock = threading.Lock()
        self.start()

    def start(self) -> None:
        """Start a process."""
        threads = _OTHER_THREADS + (self._config.decode_threads or _MOST_DECODE_THREADS)
        pairs = [Pipe() for _ in range(2 + threads)]
        descriptors = [end.fileno() for _, end in pairs]
        program = _PROGRAM.format(path=sys.path, module=_MODULE, descriptors=descriptors, parent=os.getpid())
        self.process = subprocess.Popen(  # noqa: S603 - our own interpreter and module
            [sys.executable, "-c", program],
            pass_fds=descriptors,
            stdin=subprocess.DEVNULL,
            stdout=2,  # what libraries print goes to the log
            env=device_environment(),
            start_new_session=True,  # Ctrl-C in our terminal is for the server alone
        )
        for _, end in pairs:
            end.close()
        self.control: Connection
        self._counting: Connection
        self.control, self._counting, *self.connections = (end for end, _ in pairs)
        with suppress(OSError):  # the process has ended: `loaded` reports it
            self.control.send((self._config, self.number, self._processes))

    def loaded(self) -> Loaded:
        """Wait until the process has loaded; return its report. Raises `ConfigError` if it cannot load."""
        try:
            report: Loaded | ConfigError = self.control.recv()
        except (EOFError, OSError):
            status = self.process.wait()
            report = ConfigError(
                f"{flag('devices')} {self.name}: its process ended with status {status} while it loaded"
            )
        if isinstance(report, ConfigError):
            self.end()
            raise report
        return report

    def ended(self) -> str:
        """Wait until the process has ended; return the reason, one of `ENDS`, and count it."""
        self.is_up = False
        self._counts, self.state = self.counts, None
        status = self.process.wait()
        self.end()
        reasons = {EXIT_LOST: "lost", EXIT_STUCK: "stuck", -signal.SIGKILL: "killed"}
        why = reasons.get(status, "crashed")
        self.restarts[why] += 1
        return why

    def end(self) -> None:
        """End the process, if it still runs."""
        self.process.kill()
        self.process.wait()
        for connection in (self.control, self._counting, *self.connections):
            connection.close()

    @property
    def counts(self) -> Counter[str]:
        """The counters of all processes of the device; see `DeviceState`."""
        return self._counts + self.state.counts if self.state is not None else self._counts

    def counted(self, width: int, height: int) -> Grid | str:
        """Return the grid of an image of this size, or why there is none, as `CountedRows.counted`.

        Raises `EncoderError`.
        """
        try:
            with self._counting_lock:
                self._counting.send((width, height))
                answer: Grid | str | EncoderError = self._counting.recv()
        except (EOFError, OSError) as error:
            raise UnavailableError(f"the process of {self.name} is being restarted: retry") from error
        if isinstance(answer, EncoderError):
            raise answer
        return answer


def start_devices(config: Config) -> list[DeviceProcess]:
    """Start a process for each device."""
    count = len(config.device_names)
    return [DeviceProcess(config, number, count) for number in range(count)]
