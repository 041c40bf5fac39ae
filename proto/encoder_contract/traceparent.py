"""The W3C trace context in a call's metadata: `traceparent`, as OpenTelemetry writes it."""

import re

TRACEPARENT = "traceparent"
_FORMAT = re.compile(r"[0-9a-f]{2}-([0-9a-f]{32})-[0-9a-f]{16}-([0-9a-f]{2})")


def trace_id(traceparent: str) -> str:
    """Return the trace id (32 hexadecimal digits) in a `traceparent`; empty if `traceparent` is invalid."""
    found = _FORMAT.fullmatch(traceparent)
    return found[1] if found and found[1].strip("0") else ""


def is_sampled(traceparent: str) -> bool:
    """Return whether a `traceparent` is valid, and its caller records the request."""
    found = _FORMAT.fullmatch(traceparent) if traceparent else None
    return found is not None and bool(found[1].strip("0")) and bool(int(found[2], 16) & 1)
