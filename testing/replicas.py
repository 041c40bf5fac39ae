"""A fleet of real processes: replicas on addresses and ports of their own, killed, replaced and counted."""

from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from encoder_service.metrics import Scrape
from testing.processes import free_port
from testing.server_process import ServerProcess

# Small machines run all replicas of a fleet: one thread each keeps them from fighting over cores. A busy machine is no
# fault of the index either.
SETTINGS = {
    "threads": 1,
    "decode_threads": 1,
    "index_timeout_ms": 500,
    "drain_s": 15,
    "store_host_gib": 0.25,
}


class ReplicaProcess:
    """One replica, by default on an address of its own, as on a machine of its own; `start` it, also again."""

    def __init__(self, model: Path, number: int, **settings: Any) -> None:
        self.endpoint = f"127.0.0.{number + 2}:{free_port()}"
        self._model = model
        self._settings = settings
        self._server: ServerProcess | None = None

    @property
    def port(self) -> int:
        """The port it listens on."""
        return int(self.endpoint.rpartition(":")[2])

    @property
    def process(self) -> ServerProcess:
        """Its process."""
        assert self._server is not None, "it was not started"
        return self._server

    @property
    def is_alive(self) -> bool:
        """Whether its process runs."""
        return self._server is not None and self._server.process.poll() is None

    def start(self, **settings: Any) -> None:
        """Start it and wait until it listens; `settings` win over those it was made with."""
        given = {**SETTINGS, "listen": self.endpoint, **self._settings, **settings}
        self._server = ServerProcess(self._model, **given)
        self._server.wait_until_it_listens()

    def kill(self) -> None:
        """As kill -9."""
        if self._server is not None:
            self._server.kill()

    def metrics(self) -> Scrape:
        """Read its metrics now."""
        return self.process.metrics()

    def encodes(self) -> int:
        """Images it has encoded and kept since it was started."""
        return self.process.encodes()


def start_all(replicas: Sequence[ReplicaProcess]) -> None:
    """Start those that do not run, side by side."""
    missing = [replica for replica in replicas if not replica.is_alive]
    with ThreadPoolExecutor(len(missing) or 1) as pool:
        list(pool.map(ReplicaProcess.start, missing))


@contextmanager
def fleet_of(replicas: Sequence[ReplicaProcess]) -> Iterator[Sequence[ReplicaProcess]]:
    """Run replicas for the length of a `with` block."""
    try:
        start_all(replicas)
        yield replicas
    finally:
        for replica in replicas:
            replica.kill()
