"""Stands in for Grafana: reads what compose mounts, writes to its volume, and answers /api/health."""

import json
import os
import signal
import sys
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path


class Handler(BaseHTTPRequestHandler):
    """Answers every request as Grafana answers /api/health."""

    def do_GET(self) -> None:
        """Answer."""
        self.send_response(200)
        self.end_headers()
        self.wfile.write(b'{"database": "ok"}')


if __name__ == "__main__":
    signal.signal(signal.SIGTERM, lambda *_: sys.exit())  # process 1 ignores signals without a handler
    json.loads(Path(os.environ["GF_DASHBOARDS_DEFAULT_HOME_DASHBOARD_PATH"]).read_text())
    if not [*Path("/etc/grafana/provisioning").rglob("*.yml")]:
        raise SystemExit("nothing is provisioned")
    Path("/var/lib/grafana/grafana.db").write_text("x")
    ThreadingHTTPServer(("0.0.0.0", 3000), Handler).serve_forever()
