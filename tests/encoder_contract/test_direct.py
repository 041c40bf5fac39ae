"""Requests to this host never pass through a proxy, whatever the environment names."""

import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from urllib.request import Request

import pytest

from encoder_contract.direct import NO_PROXY, channel_options, is_local_url, open_url


class Answer(BaseHTTPRequestHandler):
    def do_GET(self) -> None:
        self.send_response(200)
        self.end_headers()
        # A request line with a whole URL is one to a proxy.
        self.wfile.write(b"proxy" if "://" in self.path else b"direct")


@pytest.mark.parametrize(
    ("url", "is_local"),
    [
        ("http://localhost:9464/metrics", True),
        ("http://127.0.0.2", True),
        ("https://[::1]:1/", True),
        ("https://[::1]/", True),
        ("http://10.0.0.1:9464", False),
        ("http://localhost.example:80", False),
        ("http://user:127.0.0.1@host:80", False),
    ],
)
def test_a_url_of_this_host_is_known_without_a_lookup(url: str, is_local: bool) -> None:
    assert is_local_url(url) == is_local


def test_only_requests_to_other_hosts_use_the_proxy(monkeypatch: pytest.MonkeyPatch) -> None:
    with ThreadingHTTPServer(("127.0.0.1", 0), Answer) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        monkeypatch.setenv("http_proxy", f"http://127.0.0.1:{server.server_port}")
        monkeypatch.delenv("no_proxy", raising=False)
        for host, by in ((f"127.0.0.1:{server.server_port}", b"direct"), ("192.0.2.1:80", b"proxy")):
            with open_url(Request(f"http://{host}/metrics"), 60) as answer:
                assert answer.read() == by
        server.shutdown()
    assert channel_options("127.0.0.1:50051") == NO_PROXY
    assert channel_options("192.0.2.1:50051") == ()
