"""Retries: whether and when to try an image again after an error."""

import random
from dataclasses import dataclass
from time import monotonic

from encoder_contract.backoff import backoff_s
from encoder_contract.errors import (
    DeadlineError,
    EncoderError,
    InternalError,
    OverloadedError,
    StaleHandleError,
    UnavailableError,
    UnknownImageError,
)

# Failed attempts for reasons other than a full queue. Enough for a fleet that loses a replica during a restart, and few
# enough to give up within seconds if the fleet is broken.
MAX_FAILURES = 6
MAX_INTERNAL = 2
PAUSE_S = 0.1  # after a failure, so that other clients and servers notice it too
# The pause doubles with every refusal up to this: a server that refused several times is likely to refuse again.
MAX_REFUSED_PAUSE_S = 2.0


@dataclass(slots=True)
class Attempts:
    """Counts the failed attempts at one image. `deadline` is in seconds of `time.monotonic`.

    With `kept`, a client keeps the image submitted, so it is tried until the deadline. With `sends`, attempts upload
    the file, and a stalled upload starts again.
    """

    deadline: float
    kept: bool = False
    sends: bool = False
    failures: int = 0
    internal: int = 0
    resubmitted: int = 0
    refused: int = 0
    refusal: OverloadedError | None = None

    def pause_s(self, error: EncoderError, *, can_resubmit: bool) -> float | None:
        """Return how many seconds to wait before the next attempt; None if `error` is final."""
        pause = self._pause_s(error, can_resubmit=can_resubmit)
        return pause if pause is not None and monotonic() + pause < self.deadline else None

    def _pause_s(self, error: EncoderError, *, can_resubmit: bool) -> float | None:
        if isinstance(error, OverloadedError):
            self.refusal = error
            self.refused += 1
            backed_off_s = backoff_s(self.refused - 1, PAUSE_S, MAX_REFUSED_PAUSE_S)
            # No limit but the deadline. The pauses are randomized so that refused callers do not return together.
            return max(error.retry_after_ms / 1000, backed_off_s) * random.uniform(1.0, 1.5)  # noqa: S311 - not a secret
        if self.kept and isinstance(error, (UnavailableError, UnknownImageError)):
            self.failures += 1
            return PAUSE_S * min(self.failures, 10)
        if isinstance(error, UnknownImageError) and can_resubmit:
            self.resubmitted += 1
            return 0.0 if self.resubmitted <= MAX_FAILURES else None
        if isinstance(error, InternalError):
            self.internal += 1
            return PAUSE_S if self.internal < MAX_INTERNAL else None
        stalled = self.sends and isinstance(error, DeadlineError)
        if stalled or isinstance(error, (UnavailableError, StaleHandleError)):
            self.failures += 1
            return PAUSE_S * self.failures if self.failures <= MAX_FAILURES else None
        return None

    def outcome(self, error: EncoderError) -> EncoderError:
        """Return the error to report: the last refusal instead of a deadline error, if queues were full until then."""
        return self.refusal if isinstance(error, DeadlineError) and self.refusal is not None else error

    def left_s(self) -> float:
        """Return the number of seconds until the deadline, at least one millisecond."""
        return max(self.deadline - monotonic(), 0.001)
