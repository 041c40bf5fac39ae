"""Callers, by whom their shares count against."""

from encoder_service.limits import Caller


def caller(*holders: str) -> Caller:
    """A caller whose shares count against these: its client, or its client and its host."""
    return Caller("a host", holders)
