"""A device whose main loop runs on a thread of this process: the same code and messages as in a process of its own."""

import socket
import threading
from dataclasses import replace
from multiprocessing.connection import Pipe
from typing import Any, NoReturn

from encoder_contract.geometry import Grid
from encoder_service.config import Config
from encoder_service.devices import device_main
from encoder_service.devices.device_process import END_S, DeviceProcess
from encoder_service.devices.model import Model, facts_of
from encoder_service.families.counted_rows import CountedRows


class DeviceThread(DeviceProcess):
    """A device on a thread, with a model that this process has loaded."""

    def __init__(
        self, config: Config, model: Model, number: int = 0, processes: int = 1, **facts: Any
    ) -> None:
        """Start the thread. `facts` replace fields of its `ModelFacts`."""
        self._model = model
        self.facts = replace(facts_of(model, config, processes), **facts)
        super().__init__(replace(config, devices=",".join(["cpu"] * processes)), number, processes)
        self.name = model.device.name

    def start(self) -> None:
        """Start a thread with the main loop."""
        self.connection, theirs = socket.socketpair()
        self._counting, _ = Pipe()
        self.is_stuck = False
        self._status: list[int] = []

        def end(status: int) -> NoReturn:
            self._status.append(status)
            theirs.shutdown(socket.SHUT_RDWR)
            raise SystemExit

        def main() -> None:
            try:
                threads = self.facts.decode_threads
                device_main.run(self._model, theirs, self.number, self._processes, threads, end)
                self._status.append(0)
            finally:
                theirs.close()

        self._thread = threading.Thread(target=main, name=f"device-{self.number}", daemon=True)
        self._thread.start()

    def load(self) -> None:
        """Do nothing: the model is loaded."""

    def counted(self, width: int, height: int) -> Grid | str:
        """Ask the model's own rule."""
        rule = self._model.tower.geometry
        assert isinstance(rule, CountedRows), "the server computes other rules itself"
        return rule.counted(width, height)

    def kill(self) -> None:
        """Close the connection: the thread ends when it notices."""
        if self.connection.fileno() >= 0:
            self.connection.shutdown(socket.SHUT_RDWR)

    def wait(self, within_s: float | None = None) -> int | None:
        """Wait until the thread has ended, at most for a while: it may be in the middle of a batch."""
        self._thread.join(END_S if within_s is None else within_s)
        return self._status[0] if self._status else None
