"""The process of a device: start it, wait until it has loaded, learn why it ended, start it again."""

import socket
import threading
from collections import Counter
from contextlib import suppress
from dataclasses import replace
from multiprocessing.connection import Pipe
from pathlib import Path

from encoder_contract.errors import EncoderError, UnavailableError
from encoder_contract.geometry import Grid
from encoder_service.child import Child, why_ended
from encoder_service.config import Config, ConfigError, flag
from encoder_service.devices import EXIT_LOST, EXIT_STUCK
from encoder_service.devices.device_reports import DeviceState, ModelFacts
from encoder_service.devices.environment import device_environment
from encoder_service.devices.messages import Load, Report, receive, send

ENDS = ("crashed", "killed", "lost", "stuck")
"""Why processes ended. "killed": by another process, or by the kernel when memory was short."""
END_S = 5.0
"""How long a process that has closed its socket may take to end."""
START_SILENCE_S = 300.0
"""How long a process may take until its first report, while Python imports torch, maybe from a slow disk."""
LOAD_SILENCE_S = 60.0
"""How long it may then say nothing: no report is sent while a large library or the driver is loaded."""
CHANGED = "the checkpoint has changed since it was loaded: load it with `encoder-service reload`, or restart the server"
_MODULE = "encoder_service.devices.device_main"


class DeviceProcess:
    """The process of one device, and its successor after it has ended.

    The kernel ends a process with the thread that started it.
    """

    facts: ModelFacts
    """What the process has loaded; set by `load`."""
    connection: socket.socket
    """The server's end of the socket of `messages`; blocking until a `Link` takes it over."""

    def __init__(self, config: Config, number: int, processes: int, beside_bytes: int = 0) -> None:
        """Start the first process; `load` waits for it. `beside_bytes` as in `messages.Load`."""
        self.number, self.name = number, config.device_names[number]
        device_gib = 0.0 if number else config.store_device_gib  # the first has the store's device tier
        # Without the index: its URL may have a password.
        self._config = replace(config, devices=self.name, store_device_gib=device_gib, index="memory")
        self._processes, self._beside_bytes = processes, beside_bytes
        self.state: DeviceState | None = None
        """Its last report."""
        self._counts: Counter[str] = Counter()  # of earlier processes
        self.is_up = False
        self.is_stuck = False
        """Whether it was killed because it did not answer."""
        self.restarts = dict.fromkeys(ENDS, 0)
        self.failures = 0
        """How many processes have ended in a row without a completed batch.

        Those that one image ended count twice: when it is first suspected, and when it is found to be the cause.
        """
        self._counting_lock = threading.Lock()
        self.start()

    def start(self) -> None:
        """Start a process."""
        self.connection, theirs = socket.socketpair()
        self._counting, their_counting = Pipe()
        self.is_stuck = False
        with theirs, their_counting:
            self.process = Child(
                _MODULE,
                [theirs.fileno(), their_counting.fileno()],
                {},
                device_environment(),
                stdout=2,  # what libraries print goes to the log
            )
        with suppress(OSError):  # the process has ended: `load` reports it
            send(self.connection, Load(self._config, self.number, self._processes, self._beside_bytes))
        self._beside_bytes = 0  # a successor takes the place of this one

    def load(self) -> None:
        """Wait until the process has loaded. Raises `ConfigError` if it cannot load, or hangs.

        A successor must load the same weights: rows of others would get the addresses of these.
        """
        report: Report | ModelFacts | ConfigError
        silence_s = START_SILENCE_S
        try:
            while isinstance(report := self._heard(silence_s), Report):
                silence_s = LOAD_SILENCE_S
        except TimeoutError:
            report = ConfigError(
                f"{flag('devices')} {self.name}: its process said nothing for {silence_s:g} s while it loaded"
            )
        except OSError:
            status = self.process.wait()
            report = ConfigError(
                f"{flag('devices')} {self.name}: its process ended with status {status} while it loaded"
            )
        if not isinstance(report, ConfigError) and report.recipe != getattr(self, "facts", report).recipe:
            report = ConfigError(f"{flag('model')} {self._config.model}: {CHANGED}")
        if isinstance(report, ConfigError):
            self.end()
            raise report
        self.facts = report

    def _heard(self, within_s: float) -> Report | ModelFacts | ConfigError:
        """Return the next message of a process that loads. Raises `TimeoutError`, and `OSError` if it has ended."""
        self.process.await_message(self.connection, within_s)
        self.connection.settimeout(within_s)  # it may stop in the middle of a message
        message: Report | ModelFacts | ConfigError = receive(self.connection)
        self.connection.settimeout(None)
        return message

    def load_from(self, folder: Path) -> None:
        """Have processes that start later load the model from another folder, which has the same weights."""
        self._config = replace(self._config, model=folder)

    def kill(self) -> None:
        """Have the kernel end the process, whatever it does. Does not wait."""
        self.process.kill()

    def wait(self, within_s: float | None = None) -> int | None:
        """Wait until the process has ended; return its status, or None if it runs on."""
        return self.process.wait(within_s)

    def ended(self) -> str:
        """Wait until the process has ended; return the reason, one of `ENDS`, and count it.

        A process whose socket is closed has ended, or is about to. It is killed if it takes too long.
        """
        self._counts, self.state = self.counts, None
        self.wait(END_S)
        status = self.end()
        reasons = {EXIT_LOST: "lost", EXIT_STUCK: "stuck"}
        why = "stuck" if self.is_stuck else reasons.get(status or 0) or why_ended(status or 0)
        self.restarts[why] += 1
        return why

    def end(self) -> int | None:
        """End the process, if it still runs, and wait for its end. Return its status."""
        self.is_up = False
        self.kill()
        status = self.wait()
        self.connection.close()
        self._counting.close()
        return status

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


def start_devices(config: Config, beside_bytes: int = 0) -> list[DeviceProcess]:
    """Start a process for each device. `beside_bytes` as in `messages.Load`.

    If the model's folder is a link, later processes load what it names now.
    """
    config = replace(config, model=config.model.resolve())
    count = len(config.device_names)
    return [DeviceProcess(config, number, count, beside_bytes) for number in range(count)]
