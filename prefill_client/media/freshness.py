"""How long a response of a web server may be used again (RFC 9111, as a cache that many requests share)."""

from collections.abc import Mapping
from datetime import UTC, datetime
from email.utils import parsedate_to_datetime

# A server that says "for ever" may still have been wrong.
MAX_FRESH_S = 7 * 24 * 3600.0


def fresh_s(headers: Mapping[str, str], unsaid_s: float) -> float | None:
    """Return for how many seconds, from now, a response is fresh; None: it must not be kept at all.

    `headers` has lower-case names. `unsaid_s` is for responses that say nothing of it.
    """
    control = _directives(headers.get("cache-control", ""))
    if control.keys() & {"no-store", "private"} or headers.get("vary", "").strip() == "*":
        return None
    if "no-cache" in control:
        return 0.0
    for name in ("s-maxage", "max-age"):
        if name in control:
            return _bounded(_seconds(control[name]) - _seconds(headers.get("age", "0")))
    if "expires" in headers:
        return _bounded(_until(headers["expires"], headers.get("date")))
    return unsaid_s


def _directives(header: str) -> dict[str, str]:
    pairs = (part.strip().lower().partition("=") for part in header.split(","))
    return {name.strip(): value.strip().strip('"') for name, _, value in pairs if name}


def _seconds(text: str) -> float:
    """Return a count of seconds; 0, which is stale, for what is none."""
    text = text.strip()
    return float(text) if text.isascii() and text.isdigit() and len(text) < 12 else 0.0


def _until(expires: str, date: str | None) -> float:
    try:
        now = parsedate_to_datetime(date) if date else datetime.now(UTC)
        return (parsedate_to_datetime(expires) - now).total_seconds()
    except (ValueError, TypeError):  # no date; one without a time zone beside one with
        return 0.0


def _bounded(seconds: float) -> float:
    return min(max(seconds, 0.0), MAX_FRESH_S)
