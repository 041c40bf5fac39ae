"""Runs fleets of real replicas, each with its own loopback address."""

from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from encoder_service.metrics import Scrape
from testing.processes import free_port
from testing.server_process import ServerProcess

# All replicas of a fleet share a small machine: with one thread each they do not compete for cores. The index gets more
# time than in production, since a busy machine delays it.
SETTINGS = {"threads": 1, "decode_threads": 1, "index_timeout_ms": 500, "drain_s": 15, "store_host_gib": 0.25}


class ReplicaProcess:
    """A replica with its own address, as if on its own machine. `start` starts it, also after it has ended."""

    def __init__(self, model: Path, number: int, **settings: Any) -> None:
        self.endpoint = f"127.0.0.{number + 2}:{free_port()}"
        self._model = model
        self._settings = settings
        self._server: ServerProcess | None = None

    @property
    def port(self) -> int:
        """The port on which it listens."""
        return int(self.endpoint.rpartition(":")[2])

    @property
    def process(self) -> ServerProcess:
        """Its current process."""
        assert self._server is not None, "it was never started"
        return self._server

    @property
    def is_alive(self) -> bool:
        """Whether its process is running."""
        return self._server is not None and self._server.process.poll() is None

    def start(self, **settings: Any) -> None:
        """Start it and wait until it listens. `settings` override those of the constructor."""
        ports = {"listen": self.endpoint, "rows_listen": f"{self.endpoint.rpartition(':')[0]}:0"}
        merged = {**SETTINGS, **ports, **self._settings, **settings}
        self._server = ServerProcess(self._model, **merged)
        self._server.wait_until_it_listens()

    def kill(self) -> None:
        """Send SIGKILL."""
        if self._server is not None:
            self._server.kill()

    def metrics(self) -> Scrape:
        """Read its metrics now."""
        return self.process.metrics()

    def encodes(self) -> int:
        """Return how many images its current process has encoded and kept."""
        return self.process.encodes()


def start_all(replicas: Sequence[ReplicaProcess]) -> None:
    """Start the replicas that are not running, in parallel."""
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
