"""Starts a real OpenTelemetry collector, Rotel of PyPI, and reads the spans in the file that it writes."""

import re
import socket
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from importlib.util import find_spec
from pathlib import Path

from encoder_contract.spans import ENDPOINTS
from testing.processes import LoggedProcess, StartError, free_port

START_S = 60.0  # for a busy machine; it takes 0.1 s

# The lines of the collector's file that begin a resource or a span, and those with a value of it.
RESOURCE, SPAN = re.compile(r"ResourceSpans #\d+"), re.compile(r"Span #\d+")
VALUE = re.compile(r"(?: {4})?([A-Z][\w ]+?) *: ?(.*)")
LAST_VALUE = "Status message"
ATTRIBUTE = re.compile(r" {5}-> ([\w.]+): \w+\((.*)\)")


@dataclass
class CollectedSpan:
    """A span as the collector wrote it. `resource` says who made it; times are nanoseconds since 1970."""

    resource: dict[str, str]
    values: dict[str, str] = field(default_factory=dict)
    attributes: dict[str, str] = field(default_factory=dict)

    @property
    def name(self) -> str:
        """Its name: one of `SpanName`."""
        return self.values["Name"]

    @property
    def trace_id(self) -> str:
        """The trace that it belongs to."""
        return self.values["Trace ID"]

    @property
    def span_id(self) -> str:
        """Its own id."""
        return self.values["ID"]

    @property
    def parent_id(self) -> str:
        """The id of the span that caused it."""
        return self.values["Parent ID"]

    @property
    def began_ns(self) -> int:
        """When it began."""
        return int(self.values["Start time"])

    @property
    def ended_ns(self) -> int:
        """When it ended."""
        return int(self.values["End time"])


class Collector(LoggedProcess):
    """A collector that receives spans over OTLP at `url`, and writes them to the file `log`.

    Raises `StartError` if the package is not installed.
    """

    def __init__(self, log: Path | None = None) -> None:
        package = find_spec("rotel")
        if package is None or package.origin is None:
            raise StartError("the collector needs the package rotel, which is for Linux")
        self._ports = free_port(), free_port()
        grpc, http = (f"127.0.0.1:{port}" for port in self._ports)
        self.url = f"http://{grpc}"
        command: list[str | Path] = [Path(package.origin).with_name("rotel-agent"), "start"]
        command += ["--otlp-grpc-endpoint", grpc, "--otlp-http-endpoint", http, "--exporter", "blackhole"]
        command += ["--debug-log", "traces", "--debug-log-verbosity", "detailed"]
        super().__init__(command, {}, log=log)

    @property
    def environment(self) -> dict[str, str]:
        """What a process that exports its spans to this collector has in its environment."""
        return {ENDPOINTS[0]: self.url}

    def wait_until_it_listens(self) -> None:
        """Wait until it receives spans. Raises `StartError` if it does not start."""
        deadline = time.monotonic() + START_S
        while time.monotonic() < deadline and self.process.poll() is None:
            with suppress(OSError), socket.create_connection(("127.0.0.1", self._ports[0]), timeout=5):
                return
            time.sleep(0.02)
        self.kill()
        raise self._start_error()

    def spans(self) -> list[CollectedSpan]:
        """Return the spans in its file so far, without one that it has not written completely."""
        resource: dict[str, str] = {}
        attributes, values = resource, dict[str, str]()
        found: list[CollectedSpan] = []
        for line in self.lines:
            if RESOURCE.fullmatch(line):
                attributes = resource = {}
            elif SPAN.fullmatch(line):
                found.append(span := CollectedSpan(resource))
                attributes, values = span.attributes, span.values
            elif attribute := ATTRIBUTE.fullmatch(line):
                attributes[attribute[1]] = attribute[2]
            elif value := VALUE.fullmatch(line):
                values[value[1]] = value[2]
        return [span for span in found if LAST_VALUE in span.values]


@contextmanager
def collecting(log: Path | None = None) -> Iterator[Collector]:
    """Run a collector for the length of a `with` block."""
    collector = Collector(log)
    try:
        collector.wait_until_it_listens()
        yield collector
    finally:
        collector.terminate()
