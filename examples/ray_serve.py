"""Runs replicas on Ray Serve, one for each device.

    python examples/ray_serve.py -- --model FOLDER --index redis://HOST --listen-unprotected yes

The replicas listen on the addresses of their nodes: outside of a trusted network, replace the last setting by TLS.
Ray places, starts, checks and replaces the replicas, and scales them by their backlog. No request and no row passes
through it: clients connect to the endpoints that this prints whenever they change. What follows `--` are settings of
`encoder-service serve`. Needs `pip install "ray[serve]"`, and on every node the same Python with this project.
"""

import argparse
import json
import math
import re
import shutil
import signal
import ssl
import subprocess
import sys
import threading
import time
import urllib.request
from typing import Any

import ray
from ray import serve
from ray.exceptions import RayError
from ray.serve.config import AutoscalingConfig, AutoscalingPolicy
from ray.serve.exceptions import RayServeException

BACKLOG_S = 0.2  # how long the demanded images of a replica may wait: autoscale.seconds of the Helm chart
METRIC = re.compile(r'^encsvc_backlog_seconds\{class="demanded"\} (\S+)$', re.MULTILINE)
DRAIN_S = 60.0  # for running calls, before Ray ends the replica
LOOK_S = 2.0
# For the metrics of the child: its certificate is not for 127.0.0.1.
UNVERIFIED = ssl.create_default_context()
UNVERIFIED.check_hostname = False
UNVERIFIED.verify_mode = ssl.CERT_NONE


class Encoder:
    """One replica: `encoder-service serve` as the child of an actor."""

    def __init__(self, command: list[str]) -> None:
        """Start it and wait until it listens."""
        host = ray.util.get_node_ip_address()
        ports = ["--listen", f"{host}:0", "--rows-listen", f"{host}:0", "--metrics-listen", "127.0.0.1:0"]
        self._process = subprocess.Popen(
            [*command, *ports, "--log-format", "json"], stderr=subprocess.PIPE, text=True
        )
        log = self._process.stderr
        assert log is not None
        for line in log:
            sys.stderr.write(line)
            if '"listening": "' in line:
                self._settings = json.loads(line)
                break
        else:
            raise RuntimeError(f"encoder-service ended with status {self._process.wait()}")
        threading.Thread(target=shutil.copyfileobj, args=(log, sys.stderr), daemon=True).start()

    def endpoint(self) -> str:
        """Return where clients and peers connect."""
        return str(self._settings["listening"])

    def check_health(self) -> None:
        """Have Ray replace a replica that has ended."""
        if self._process.poll() is not None:
            raise RuntimeError(f"encoder-service ended with status {self._process.returncode}")

    def record_autoscaling_stats(self) -> dict[str, float]:
        """Return the seconds of demanded work in its queue."""
        url = f"{self._settings['metrics']}metrics"
        with urllib.request.urlopen(url, timeout=5, context=UNVERIFIED) as answer:
            found = METRIC.search(answer.read().decode())
        return {"backlog_s": float(found[1])} if found else {}

    def __del__(self) -> None:
        """Drain: Ray removes this replica."""
        self._process.terminate()
        self._process.wait()


def by_backlog(context: Any) -> tuple[int, dict[str, Any]]:
    """Return as many replicas as bring their mean backlog to `BACKLOG_S`; Ray keeps within the bounds."""
    backlogs = list(context.aggregated_metrics.get("backlog_s", {}).values())
    wanted = math.ceil(sum(backlogs) / BACKLOG_S) if backlogs else context.current_num_replicas
    bounded = max(context.capacity_adjusted_min_replicas, wanted)
    return min(context.capacity_adjusted_max_replicas, bounded), {}


def endpoints_of(handle: Any) -> list[str]:
    """Return where the running replicas listen: nowhere while Ray replaces the only one."""
    try:
        return sorted(handle.broadcast("endpoint").results())
    except (RayError, RayServeException):
        return []


def main() -> None:
    """Run until Ctrl-C or SIGTERM, then drain every replica."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--gpus", type=float, default=1, help="of a replica; 0: it runs on the CPU")
    parser.add_argument("--least", type=int, default=1, help="replicas")
    parser.add_argument("--most", type=int, default=4, help="replicas")
    parser.add_argument("--command", default="encoder-service", help="path of the command on every node")
    parser.add_argument("settings", nargs="+", help="of `encoder-service serve`")
    arguments = parser.parse_args()
    serve.start(proxy_location="Disabled")
    deployment = serve.deployment(
        Encoder,
        name="encoder",
        ray_actor_options={"num_gpus": arguments.gpus, "num_cpus": 1},
        graceful_shutdown_timeout_s=DRAIN_S,
        health_check_period_s=LOOK_S,
        logging_config={"log_level": "WARNING"},  # else it logs each look
        autoscaling_config=AutoscalingConfig(
            min_replicas=arguments.least,
            max_replicas=arguments.most,
            upscale_delay_s=10,
            metrics_interval_s=LOOK_S,
            look_back_period_s=5 * LOOK_S,
            policy=AutoscalingPolicy(policy_function=by_backlog),
        ),
    )
    handle = serve.run(deployment.bind([arguments.command, "serve", *arguments.settings]), route_prefix=None)
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # Ray has set its own, which aborts
    seen: list[str] = []
    try:
        while True:
            endpoints = endpoints_of(handle)
            if endpoints != seen:
                print("endpoints:", *endpoints, flush=True)
                seen = endpoints
            time.sleep(LOOK_S)
    except KeyboardInterrupt:
        serve.shutdown()


if __name__ == "__main__":
    main()
