"""Callers for tests of shares."""

from encoder_service.limits import Caller


def caller(holder: str) -> Caller:
    """Return a caller whose shares count against `holder`."""
    return Caller("a host", holder)
