"""Monitoring of a running server: its event loop lag, and the HTTP port if one is configured."""

from collections.abc import Iterator, Mapping
from typing import Protocol

from encoder_contract.certificates import Certificates
from encoder_service.config import ConfigError, flag
from encoder_service.observability.http_port import HttpPort, Readers
from encoder_service.observability.loop_lag import LoopLag
from encoder_service.observability.metrics import Metrics
from encoder_service.observability.readings import Reading


class Monitored(Protocol):
    """The server, as its monitoring sees it. Both are read on any thread."""

    @property
    def draining(self) -> bool:
        """Whether new calls are refused."""

    def readings(self) -> Iterator[Reading]:
        """Yield the state of the components at this moment."""


class Watch:
    """Measures the event loop and serves the HTTP port; `endpoint` is its address, empty without a port."""

    def __init__(
        self,
        listen: str,
        metrics: Metrics,
        server: Monitored,
        *,
        title: str,
        facts: Mapping[str, str],
        certificates: Certificates | None = None,
        readers: Readers | None = None,
    ) -> None:
        """Bind the port, if one is configured; see `HttpPort`. Raises `ConfigError` if it is unavailable."""
        self._lag = LoopLag(metrics.loop_lag)
        metrics.read_from(server.readings)
        self._port: HttpPort | None = None
        if listen:
            try:
                self._port = HttpPort(
                    listen,
                    title=title,
                    facts=facts,
                    metrics=metrics.wsgi(),
                    last_tick=lambda: self._lag.last_tick,
                    draining=lambda: server.draining,
                    certificates=certificates,
                    readers=readers,
                )
            except OSError as error:
                raise ConfigError(
                    f"{flag('metrics_listen')} {listen}: the address is taken or not ours ({error.strerror}); "
                    "port 0 takes a free one"
                ) from error
        self.endpoint = self._port.endpoint if self._port else ""
        self.url = f"{'https' if certificates else 'http'}://{self.endpoint}/" if self._port else ""

    def start(self) -> None:
        """Start, on the running event loop."""
        self._lag.start()
        if self._port is not None:
            self._port.start()

    def stop(self) -> None:
        """Stop. Takes up to half a second: do not call it on the event loop."""
        self._lag.stop()
        if self._port is not None:
            self._port.stop()
