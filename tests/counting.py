"""Counts the calls of our functions, so that tests compare work without a clock."""

import sys
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType
from typing import Any

import pytest

import encoder_service
from encoder_contract import arena, extents, turns
from encoder_service import http
from encoder_service.devices import dispatcher, messages

# The last three are mechanisms of the service that its clients share.
OURS = str(Path(encoder_service.__file__).parent), turns.__file__, extents.__file__, arena.__file__


def stop_timers(patched: pytest.MonkeyPatch) -> None:
    """Keep servers that start later from work by the second: of that, slow machines do more."""
    for module, interval in ((messages, "REPORT_S"), (dispatcher, "TICK_S"), (http, "PERIOD_S")):
        patched.setattr(module, interval, 3600.0)


@contextmanager
def counted() -> Iterator[Counter[str]]:
    """Count the calls of our functions on this thread, by function; comprehensions and lambdas do not count."""
    calls: Counter[str] = Counter()

    def note(frame: FrameType, event: str, _: Any) -> None:
        code = frame.f_code
        if event == "call" and code.co_filename.startswith(OURS) and "<" not in code.co_name:
            calls[f"{Path(code.co_filename).name}:{code.co_qualname}"] += 1

    sys.setprofile(note)
    try:
        yield calls
    finally:
        sys.setprofile(None)
