"""An alert reaches the receiver of its severity, through a real Alertmanager where one is installed."""

import json
import queue
import shutil
import threading
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest
import yaml

from testing.processes import LoggedProcess, free_port
from tests.deploy.test_prometheus import rules
from tests.deployed_engine import DEPLOY
from tests.waiting import PATIENCE_S, START_S, soon

FILE = DEPLOY / "prometheus/alertmanager.yml"
PROGRAM = shutil.which("prometheus-alertmanager") or shutil.which("alertmanager")


def test_there_is_a_receiver_for_every_severity() -> None:
    config = yaml.safe_load(FILE.read_text())
    severities = {rule["labels"]["severity"] for rule in rules("alert")}  # type: ignore[index]
    assert {each["name"] for each in config["receivers"]} == severities
    assert config["route"]["receiver"] in severities


@contextmanager
def webhook(received: "queue.Queue[dict[str, Any]]") -> Iterator[str]:
    """Serve a webhook that puts what it gets into a queue; yield its address."""

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            received.put(json.loads(self.rfile.read(int(self.headers["Content-Length"]))))
            self.send_response(200)
            self.end_headers()

        def log_message(self, *_: object) -> None:
            """Log nothing."""

    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        try:
            yield f"http://127.0.0.1:{server.server_port}"
        finally:
            server.shutdown()


def answers(url: str) -> bool:
    try:
        urllib.request.urlopen(url, timeout=5).close()
    except OSError:
        return False
    return True


@pytest.mark.skipif(PROGRAM is None, reason="Alertmanager is not installed")
async def test_alerts_reach_the_receiver_of_their_severity_and_single_replicas_are_no_news_without_any(
    tmp_path: Path,
) -> None:
    received: queue.Queue[dict[str, Any]] = queue.Queue()
    with webhook(received) as url:
        config = yaml.safe_load(FILE.read_text())
        for each in config["receivers"]:
            each["webhook_configs"] = [{"url": f"{url}/{each['name']}"}]
        for route in (config["route"], *config["route"]["routes"]):
            route["group_wait"] = "1s"
        (tmp_path / "alertmanager.yml").write_text(yaml.safe_dump(config))
        port = free_port()
        command = [str(PROGRAM), f"--config.file={tmp_path}/alertmanager.yml", f"--storage.path={tmp_path}"]
        command += [f"--web.listen-address=127.0.0.1:{port}", "--cluster.listen-address="]
        process = LoggedProcess(command, {})
        try:
            await soon(lambda: answers(f"http://127.0.0.1:{port}/-/ready"), START_S)
            alerts = [
                {"labels": {"alertname": name, "severity": severity, "job": "encoder"}}
                for name, severity in (
                    ("EncoderNone", "page"),
                    ("EncoderReplicaLost", "ticket"),
                    ("EncoderSlow", "ticket"),
                )
            ]
            body = json.dumps(alerts).encode()
            request = urllib.request.Request(
                f"http://127.0.0.1:{port}/api/v2/alerts", body, {"Content-Type": "application/json"}
            )
            urllib.request.urlopen(request, timeout=PATIENCE_S).close()
            sent = [received.get(timeout=PATIENCE_S) for _ in range(2)]
        finally:
            process.kill()
    assert {
        each["receiver"]: [alert["labels"]["alertname"] for alert in each["alerts"]] for each in sent
    } == {"page": ["EncoderNone"], "ticket": ["EncoderSlow"]}
