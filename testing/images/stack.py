"""The services of deploy/docker-compose.yml, run by the engine of `testing.images.engine`."""

import base64
import json
import subprocess
import time
import urllib.parse
import urllib.request
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from uuid import uuid4

from testing.images import build, engine
from testing.processes import free_port

COMPOSE = build.DEPLOY / "docker-compose.yml"
PROJECT = "encoder-service"
UP_S = 300.0
CHECK_S = 1.0

# torch spins while it waits, which takes a small machine's cores from the other containers.
ON_A_SMALL_MACHINE = """
services:
  encoder-cpu: {environment: {OMP_NUM_THREADS: "1"}}
  prefill: {environment: {OMP_NUM_THREADS: "1"}}
"""


def wait_until(holds: Callable[[], bool], what: str, within_s: float = UP_S) -> float:
    """Wait until something holds; return the seconds it took. Raises `TimeoutError`, which says `what`."""
    began = time.monotonic()
    while not holds():
        if time.monotonic() - began > within_s:
            raise TimeoutError(f"not within {within_s:.0f} s: {what}")
        time.sleep(CHECK_S)
    return time.monotonic() - began


class Stack:
    """A compose file with settings of its own. The main one gets what a small machine needs."""

    def __init__(self, model: Path, folder: Path, replicas: int = 3, *files: Path, **settings: str) -> None:
        """`files` are further compose files, `settings` replace variables of `.env`."""
        first = free_port(*range(1, replicas))
        services = ("PREFILL", "PROMETHEUS", "ALERTMANAGER", "GRAFANA")
        self.ports = {f"{name}_PORT": free_port() for name in services}
        self.settings = {
            "MODEL": str(model),
            "COMPOSE_PROFILES": "cpu",
            "STORE_HOST_GIB": "0.25",
            "SHM_SIZE": "384m",
            "ENCODER_MEMORY": "3g",
            "PREFILL_MEMORY": "3g",
            "GRAFANA_PASSWORD": "of this test",
            "ENCODER_PORT": f"{first}-{first + replicas - 1}",
            **{name: str(port) for name, port in self.ports.items()},
            **settings,
        }
        small = folder / "small.yml"
        small.write_text(ON_A_SMALL_MACHINE)
        self.files = [COMPOSE, *files, small]

    def compose(self, *arguments: str, limit_s: float = UP_S) -> str:
        """Run `docker compose`. Raises `CalledProcessError`."""
        files = [part for file in self.files for part in ("-f", str(file))]
        return engine.run("compose", *files, *arguments, more=self.settings, limit_s=limit_s)

    def up(self, *services: str, replicas: int = 1) -> None:
        """Start services, by default all, and wait until they are healthy."""
        scale = ("--scale", f"encoder-cpu={replicas}")
        self.compose("up", "--detach", "--wait", "--no-build", "--no-recreate", *scale, *services)

    def roll(self, service: str) -> None:
        """Replace the replicas of a service one by one, with deploy/roll. Raises `RuntimeError` with its output."""
        files = [part for file in self.files[1:] for part in ("-f", str(file))]  # the script has the main one
        path = f"{Path(engine.docker()).parent}:/usr/bin:/bin"
        done = subprocess.run(
            [build.DEPLOY / "roll", service, *files],
            env=engine.environment() | self.settings | {"PATH": path},
            capture_output=True,
            text=True,
        )
        if done.returncode:
            raise RuntimeError(done.stdout + done.stderr)

    def down(self) -> None:
        """Remove all containers, networks and volumes."""
        self.compose("down", "--volumes", "--timeout", "60")

    def containers(self, service: str) -> list[str]:
        """Return the ids of a service's running containers."""
        return self.compose("ps", "--quiet", service).split()

    def exec(self, container: str, *command: str) -> str:
        """Run a command in a container."""
        return engine.run("exec", container, *command)

    def log(self, service: str) -> str:
        """Return what a service has printed."""
        return self.compose("logs", "--no-color", "--no-log-prefix", service)

    def chat(self, *images: bytes) -> str:
        """Ask the reference service about images."""
        urls = [f"data:image/jpeg;base64,{base64.b64encode(image).decode()}" for image in images]
        parts: list[dict[str, Any]] = [{"type": "image_url", "image_url": {"url": url}} for url in urls]
        message = {"role": "user", "content": [*parts, {"type": "text", "text": "What is to be seen?"}]}
        body = {"model": "chat", "max_tokens": 4, "messages": [message]}
        request = urllib.request.Request(
            f"http://127.0.0.1:{self.ports['PREFILL_PORT']}/v1/chat/completions",
            json.dumps(body).encode(),
            {"Content-Type": "application/json"},
        )
        with urllib.request.urlopen(request, timeout=120) as answer:
            return str(json.load(answer)["choices"][0]["message"]["content"])

    def prometheus(self, path: str, **query: object) -> Any:
        """Return the data of an answer of Prometheus. Raises `HTTPError` for a query that it refuses."""
        url = (
            f"http://127.0.0.1:{self.ports['PROMETHEUS_PORT']}/api/v1/{path}?{urllib.parse.urlencode(query)}"
        )
        with urllib.request.urlopen(url, timeout=60) as answer:
            return json.load(answer)["data"]

    def value(self, expression: str) -> float | None:
        """Return the value of an expression with one series; None without a series."""
        result = self.prometheus("query", query=expression)["result"]
        return float(result[0]["value"][1]) if result else None

    def alerts(self, state: str = "firing") -> set[str]:
        """Return the names of the alerts in a state."""
        return {
            each["labels"]["alertname"]
            for each in self.prometheus("alerts")["alerts"]
            if each["state"] == state
        }

    @contextmanager
    def calls(self) -> Iterator[dict[str, Any]]:
        """Call all replicas from a container meanwhile; the dictionary then has the number of calls and the errors."""
        name = f"loop-{uuid4().hex[:8]}"
        command = ["run", "--interactive", "--rm", "--name", name, "--network", f"{PROJECT}_default"]
        command += ["--entrypoint", "python", build.TARGETS["encoder"], "-"]
        with (build.ROOT / "testing/images/loop.py").open() as program:
            process = subprocess.Popen(
                [engine.docker(), *command],
                env=engine.environment(),
                stdin=program,
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                text=True,
            )
        found: dict[str, Any] = {}

        def has_started() -> bool:
            if process.poll() is not None:
                raise RuntimeError(process.communicate()[1])
            try:
                engine.run("exec", name, "test", "-e", "/tmp/started")
            except subprocess.CalledProcessError:
                return False
            return True

        wait_until(has_started, "the client has connected", 120)
        try:
            yield found
        finally:
            engine.run("exec", name, "touch", "/tmp/stop")
            said, errors = process.communicate(timeout=180)
            if process.returncode:
                raise RuntimeError(errors)
            found.update(json.loads(said))


def failure_of(stack: Stack, services: Sequence[str]) -> str:
    """Start services that cannot start; return the last lines of compose and of the last service's log."""
    try:
        stack.up(*services)
    except subprocess.CalledProcessError as error:
        lines = stack.log(services[-1]).strip().splitlines()
        return "\n".join([error.stderr.strip().splitlines()[-1], *lines[-3:]])
    finally:
        stack.down()
    raise AssertionError(f"{services} started")
