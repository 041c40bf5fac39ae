"""Callers for tests of shares."""

from encoder_service.limits import Caller


def caller(*holders: str) -> Caller:
    """Return a caller whose shares count against `holders`: its client, or its client and its host."""
    return Caller("a host", holders)
