"""The log: each event is one line, even with text from untrusted callers."""

import io
import json
import logging

import pytest

from encoder_service.logs import ConsoleFormatter, JsonFormatter

FORGED = "gone\n2026-11-21 10:00:00,000 INFO    fetch client=bank status=OK\x1b[2K\r\u202e"


@pytest.fixture
def written() -> tuple[logging.Logger, io.StringIO]:
    """A logger that writes as the server does, to the console."""
    text, log = io.StringIO(), logging.Logger("test")
    handler = logging.StreamHandler(text)
    handler.setFormatter(ConsoleFormatter("%(asctime)s %(levelname)-7s %(message)s"))
    log.addHandler(handler)
    return log, text


def test_a_message_is_a_line_without_control_characters(written: tuple[logging.Logger, io.StringIO]) -> None:
    log, text = written
    log.info("peer %s did not give rows", FORGED, extra={"fields": {"client": FORGED}})
    assert text.getvalue().count("\n") == 1
    assert text.getvalue().rstrip("\n").isprintable()
    assert "gone\\n2026" in text.getvalue()


def test_a_traceback_cannot_be_mistaken_for_events(written: tuple[logging.Logger, io.StringIO]) -> None:
    log, text = written
    try:
        raise ValueError(FORGED)
    except ValueError:
        log.exception("internal error %s", "abc", extra={"fields": {"call": "fetch"}})
    first, *others = text.getvalue().rstrip("\n").split("\n")
    assert first.endswith("internal error abc call=fetch")
    assert "Traceback" in others[0]
    assert "raise ValueError(FORGED)" in "".join(others)
    assert all(line.startswith("    ") and line.isprintable() for line in others)


def test_an_event_in_json_is_one_line_too() -> None:
    record = logging.LogRecord("x", logging.INFO, "", 0, FORGED, None, None)
    line = JsonFormatter().format(record)
    assert "\n" not in line
    assert line.isprintable()
    assert json.loads(line)["message"] == FORGED
