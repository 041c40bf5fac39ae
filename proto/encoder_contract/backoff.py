"""How long to wait before trying again what keeps failing."""


def backoff_s(retries: int, first_s: float, last_s: float) -> float:
    """Return the pause after this number of failed retries: `first_s`, twice as long after each, up to `last_s`."""
    return min(last_s, first_s * 2.0 ** min(retries, 30))
