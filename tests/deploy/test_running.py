"""Starts the services of the compose file without Docker: they answer a chat, and PromQL reads their metrics."""

import base64
import json
import shutil
import socket
import subprocess
import sys
import time
import urllib.parse
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from encoder_service.metrics import scrape
from testing.photos import photo
from testing.processes import free_port
from testing.redis_servers import redis_binary
from tests.deploy.test_deploy import MAIN, SERVICES
from tests.deploy.test_prometheus import EXPRESSIONS
from tests.deployed_engine import DEPLOY
from tests.small_store import STORE_GIB
from tests.waiting import PATIENCE_S

# Enough for a very busy machine. A service that exits is noticed at once.
START_S = 300.0


class Started:
    """The services of the compose file: the same commands and environments, on free ports of this host."""

    def __init__(self, model: Path, folder: Path) -> None:
        self._folder = folder
        self._processes: dict[str, subprocess.Popen[bytes]] = {}
        self.ports = {name: free_port() for name in ("6379", "50051", "50052", "9464", "8000", "9090")}
        # Values in a container and on this host, longest first.
        self._here = [
            ("http://127.0.0.1:9464", f"http://127.0.0.1:{self.ports['9464']}"),
            ("http://127.0.0.1:8000", f"http://127.0.0.1:{self.ports['8000']}"),
            ("0.0.0.0:50051", f"127.0.0.1:{self.ports['50051']}"),
            ("0.0.0.0:50052", f"127.0.0.1:{self.ports['50052']}"),
            ("0.0.0.0:9464", f"127.0.0.1:{self.ports['9464']}"),
            ("0.0.0.0:8000", f"127.0.0.1:{self.ports['8000']}"),
            ("encoder:50051", f"127.0.0.1:{self.ports['50051']}"),
            ("redis:6379", f"127.0.0.1:{self.ports['6379']}"),
            ("/etc/prometheus", str(folder)),
            ("/model", str(model)),
            ("/prometheus", str(folder / "data")),
        ]

    def here(self, value: str) -> str:
        """Return a value of the compose file as it is on this host."""
        value = MAIN.filled(value, STORE_HOST_GIB=str(STORE_GIB))
        for there, here in self._here:
            if there in value:
                return value.replace(there, here)
        return value

    def start(self, service: str, program: str, *extra: str) -> None:
        """Start a service: its entry point, its command, its environment; then wait for its health check."""
        command = [self.here(part) for part in SERVICES[service].get("command", [])]
        # Where the image has no entry point, the command names the program.
        if command[:1] == [service + "-server"]:
            command = command[1:]
        environment = {k: self.here(v) for k, v in SERVICES[service].get("environment", {}).items()}
        with (self._folder / f"{service}.log").open("w") as file:
            self._processes[service] = subprocess.Popen(
                [program, *command, *extra], env={**BARE, **environment}, stdout=file, stderr=file
            )
        deadline = time.monotonic() + START_S
        while not self._healthy(service):
            assert self._processes[service].poll() is None, self.output(service)
            assert time.monotonic() < deadline, self.output(service)
            time.sleep(0.5)  # each health check starts a process

    def _healthy(self, service: str) -> bool:
        """Run the service's own health check, with the tools of this host."""
        program, *arguments = (self.here(part) for part in SERVICES[service]["healthcheck"]["test"][1:])
        if program == "python":
            return subprocess.run([sys.executable, *arguments], capture_output=True).returncode == 0
        port = self.ports["6379" if program == "redis-cli" else "9090"]
        try:
            with socket.create_connection(("127.0.0.1", port), timeout=10):
                return True
        except OSError:
            return False

    def prometheus_files(self) -> None:
        """Write the configuration with the addresses of this host instead of the network's names."""
        config = yaml.safe_load((DEPLOY / "prometheus/prometheus.yml").read_text())
        config["global"] = {"scrape_interval": "1s", "evaluation_interval": "1s"}
        del config["alerting"]  # test_alertmanager.py starts one
        for job in config["scrape_configs"]:
            (found,) = job.pop("dns_sd_configs")
            job["static_configs"] = [{"targets": [f"127.0.0.1:{self.ports[str(found['port'])]}"]}]
        (self._folder / "prometheus.yml").write_text(yaml.safe_dump(config))
        for rules in config["rule_files"]:
            shutil.copy(DEPLOY / "prometheus" / rules, self._folder)

    def output(self, service: str) -> str:
        """Return the output of a service."""
        return (self._folder / f"{service}.log").read_text()

    def stop(self) -> dict[str, int]:
        """Stop all services, the last first; return their exit codes."""
        codes = {}
        for service, process in reversed(self._processes.items()):
            process.terminate()
            try:
                codes[service] = process.wait(PATIENCE_S)
            except subprocess.TimeoutExpired:
                process.kill()
                codes[service] = process.wait()
        return codes


# The environment of the image, without that of this shell.
BARE = {
    "PATH": f"{Path(sys.executable).parent}:/usr/bin:/bin",
    "HOME": "/nonexistent",
    "PYTHONUNBUFFERED": "1",
    "OMP_NUM_THREADS": "2",
}


def ask(url: str, body: object = None) -> Any:
    data = None if body is None else json.dumps(body).encode()
    request = urllib.request.Request(url, data, {"Content-Type": "application/json"})
    with urllib.request.urlopen(request, timeout=PATIENCE_S) as answer:
        return json.load(answer)


@pytest.fixture(scope="module")
def started(checkpoint: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Started]:
    """Redis, encoder and prefill, and Prometheus where it is installed."""
    folder = tmp_path_factory.mktemp("compose")
    stack = Started(checkpoint, folder)
    stack.prometheus_files()
    try:
        stack.start("redis", redis_binary(), "--port", str(stack.ports["6379"]), "--dir", str(folder))
        stack.start("encoder-cpu", "encoder-service", "--index-prefix", folder.name)
        stack.start("prefill", "prefill-reference", "--dtype", "float32", "--chunk-tokens", "64")
        if prometheus := shutil.which("prometheus"):
            stack.start("prometheus", prometheus, f"--web.listen-address=127.0.0.1:{stack.ports['9090']}")
        yield stack
    finally:
        codes = stack.stop()
    failed = [service for service, code in codes.items() if code != 0]
    assert not failed, "\n".join(
        f"{service}: {codes[service]}\n{stack.output(service)}" for service in failed
    )


def chat(started: Started, *images: bytes) -> str:
    """Ask about images; return the answer."""
    urls = [f"data:image/jpeg;base64,{base64.b64encode(image).decode()}" for image in images]
    parts: list[dict[str, Any]] = [{"type": "image_url", "image_url": {"url": url}} for url in urls]
    message = {"role": "user", "content": [*parts, {"type": "text", "text": "What is to be seen?"}]}
    url = f"http://127.0.0.1:{started.ports['8000']}/v1/chat/completions"
    answer = ask(
        url,
        {
            "messages": [message],
            "max_tokens": 4,
            "model": SERVICES["prefill"]["environment"]["PREFILLSVC_SERVED_NAME"],
        },
    )
    return str(answer["choices"][0]["message"]["content"])


def test_a_chat_is_counted_and_a_known_image_is_encoded_once(started: Started) -> None:
    known, new = photo(320, 240, 1), photo(200, 300, 2)
    chat(started, known)
    chat(started, known, new)
    chat(started, new, known)
    until = time.monotonic() + PATIENCE_S
    while True:
        now = scrape(f"127.0.0.1:{started.ports['9464']}", PATIENCE_S)
        published = now.total("index_call_seconds_count", call="publish", outcome="ok")
        # Rows are published after the answers. After a call to the index that was late, the replica joins again.
        if published >= 1 and now.total("index_state", state="joined") == 1:
            break
        assert time.monotonic() < until, f"published {published} times, {now.samples['index_state']}"
        time.sleep(0.1)
    assert now.total("encoded_images_total", outcome="kept") == 2
    assert now.total("encoded_images_total", outcome="failed") == 0
    assert now.total("fetched_images_total", outcome="failed") == 0


def query(started: Started, expression: str) -> list[dict[str, Any]]:
    url = f"http://127.0.0.1:{started.ports['9090']}/api/v1/query?"
    answer = ask(url + urllib.parse.urlencode({"query": expression}))
    assert answer["status"] == "success", answer
    return answer["data"]["result"]


@pytest.mark.skipif(shutil.which("prometheus") is None, reason="prometheus is not installed")
def test_the_same_numbers_come_back_through_promql(started: Started) -> None:
    chat(started, photo(128, 128, 3))
    expected = scrape(f"127.0.0.1:{started.ports['9464']}", PATIENCE_S)
    names = {"encsvc_encoded_images_total": "encoded_images_total", "encsvc_store_entries": "store_entries"}
    deadline = time.monotonic() + PATIENCE_S
    for exported, name in names.items():
        value = expected.total(name)
        assert value
        while (found := query(started, f"sum({exported})")) == [] or float(found[0]["value"][1]) != value:
            assert time.monotonic() < deadline, (exported, found, value)
            time.sleep(0.2)
    while {each["metric"]["job"] for each in query(started, "up == 1")} != {"encoder"}:
        assert time.monotonic() < deadline, query(started, "up")
        time.sleep(0.2)


@pytest.mark.skipif(shutil.which("prometheus") is None, reason="prometheus is not installed")
def test_prometheus_evaluates_every_expression_and_no_alert_fires(started: Started) -> None:
    for where, expression in EXPRESSIONS.items():
        assert isinstance(query(started, expression), list), where
    rules = ask(f"http://127.0.0.1:{started.ports['9090']}/api/v1/rules")["data"]["groups"]
    assert [rule for group in rules for rule in group["rules"] if rule["health"] == "err"] == []
    alerts = ask(f"http://127.0.0.1:{started.ports['9090']}/api/v1/alerts")["data"]["alerts"]
    assert [alert["labels"] for alert in alerts if alert["state"] == "firing"] == []
