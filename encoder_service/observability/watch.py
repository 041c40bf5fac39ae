"""What an operator sees of a server: its metrics, its loop's lag, and its page."""

from collections.abc import Callable, Mapping

from encoder_service.config import ConfigError, flag
from encoder_service.observability.http_port import Landing
from encoder_service.observability.loop_lag import LoopLag
from encoder_service.observability.metrics import Metrics, Read


class Watch:
    """Measures and shows while the server runs; `endpoint` is where, empty when nothing is shown."""

    def __init__(
        self,
        listen: str,
        metrics: Metrics,
        read: Read,
        *,
        title: str,
        facts: Mapping[str, str],
        draining: Callable[[], bool],
    ) -> None:
        """Take the port, if one is asked for. Raises `ConfigError` when it cannot be had."""
        self._lag = LoopLag(metrics.loop_lag)
        metrics.read_from(read)
        self._landing: Landing | None = None
        if listen:
            try:
                self._landing = Landing(
                    listen,
                    title=title,
                    facts=facts,
                    metrics=metrics.wsgi(),
                    last_tick=lambda: self._lag.last_tick,
                    draining=draining,
                )
            except OSError as error:
                raise ConfigError(
                    f"{flag('metrics_listen')} {listen}: the address is taken or not ours ({error.strerror}); "
                    "port 0 takes a free one"
                ) from error
        self.endpoint = self._landing.endpoint if self._landing else ""

    def start(self) -> None:
        """Start, on the running event loop."""
        self._lag.start()
        if self._landing is not None:
            self._landing.start()

    def stop(self) -> None:
        """Stop. Takes up to half a second: not for the event loop."""
        self._lag.stop()
        if self._landing is not None:
            self._landing.stop()
