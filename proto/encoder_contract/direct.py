"""HTTP requests that use no proxy to reach this host, whatever the environment names."""

import re
import ssl
from http.client import HTTPResponse
from urllib.request import HTTPSHandler, ProxyHandler, Request, build_opener

from encoder_contract.endpoint import is_local

NO_PROXY = (("grpc.enable_http_proxy", 0),)
"""The option of gRPC channels to this host. A proxy would see the token and the proof of shared memory."""


def channel_options(endpoint: str) -> tuple[tuple[str, int], ...]:
    """Return the options of a gRPC channel to `endpoint`."""
    return NO_PROXY if is_local(endpoint) else ()


def is_local_url(url: str) -> bool:
    """Whether a direct request to this http:// or https:// URL ends at this host."""
    host = Request(url).host  # noqa: S310 - nothing is opened
    return is_local(host if re.search(r":\d+$", host) else f"{host}:80")


def open_url(request: Request, timeout_s: float, context: ssl.SSLContext | None = None) -> HTTPResponse:
    """Send a request; return the answer. Raises `OSError`, also for a status of 400 or more."""
    handlers = [ProxyHandler({})] if is_local_url(request.full_url) else []
    opener = build_opener(*handlers, *([HTTPSHandler(context=context)] if context else []))
    answer: HTTPResponse = opener.open(request, timeout=timeout_s)
    return answer
