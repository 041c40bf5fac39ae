"""`encoder-service` under a wall clock that jumps: an hour forward at `FORWARD`, an hour back at `BACK`.

Run it as a program in place of the command. It replaces the clock of Python code only, so it needs no right to set the
machine's clock. Two parties keep the true clock: libraries in C, such as OpenSSL when it checks the dates of a
certificate; and gRPC, whose Python half passes times to its C half, so that both must have the same clock.
"""

import datetime
import signal
import sys
import time
from functools import partial

HOUR_S = 3600
# The service handles no real-time signals itself.
FORWARD, BACK = signal.SIGRTMIN, signal.SIGRTMIN + 1
_TRUE = "grpc"


class WallClock:
    """The true time plus `off_s`, a whole number of seconds."""

    def __init__(self) -> None:
        self._time, self._time_ns = time.time, time.time_ns
        self.off_s = 0

    def time(self) -> float:
        """As `time.time`."""
        return self._time() + self._seen_s()

    def time_ns(self) -> int:
        """As `time.time_ns`."""
        return self._time_ns() + self._seen_s() * 1_000_000_000

    def jump(self, seconds: int, *_: object) -> None:
        """Set the clock forward, or back."""
        self.off_s += seconds

    def install(self) -> None:
        """Replace the clock of every module that is imported from now on."""
        clock = self

        class Shifted(datetime.datetime):
            @classmethod
            def now(cls, tz: datetime.tzinfo | None = None) -> "Shifted":
                return cls.fromtimestamp(clock.time(), tz)

        time.time, time.time_ns = self.time, self.time_ns
        datetime.datetime = Shifted  # type: ignore[misc]

    def _seen_s(self) -> int:
        caller = sys._getframe(2).f_globals.get("__name__", "")
        return 0 if caller.partition(".")[0] == _TRUE else self.off_s


def main(patience: float = 1.0) -> int:
    """Run the command line of the service under such a clock. For `patience`, see `Server`."""
    clock = WallClock()
    clock.install()
    signal.signal(FORWARD, partial(clock.jump, HOUR_S))
    signal.signal(BACK, partial(clock.jump, -HOUR_S))
    from encoder_service import app
    from encoder_service.cli import main as serve

    app.Server = partial(app.Server, patience=patience)  # type: ignore[assignment, misc]
    return serve()


if __name__ == "__main__":
    sys.exit(main())
