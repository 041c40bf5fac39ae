"""Logging: one line per event on standard error, for people or as JSON."""

import json
import logging
import sys
from datetime import UTC, datetime


class JsonFormatter(logging.Formatter):
    """One JSON object per line; what a caller passes as `extra={"fields": {...}}` is merged in."""

    def format(self, record: logging.LogRecord) -> str:
        """Return the line of `record`."""
        line = {
            "time": datetime.fromtimestamp(record.created, UTC).isoformat(timespec="milliseconds"),
            "level": record.levelname.lower(),
            "logger": record.name,
            "message": record.getMessage(),
            **getattr(record, "fields", {}),
        }
        if record.exc_info:
            line["exception"] = self.formatException(record.exc_info)
        return json.dumps(line, default=str)


def _word(value: object) -> str:
    """Return `value` as one word: a caller's text must not look like another field or line."""
    text = str(value)
    return text if text.isprintable() and " " not in text and "=" not in text else repr(text)


def _line(text: str) -> str:
    """Return `text` as one line: text of a peer or Redis must not look like a log line, or move the cursor."""
    return "".join(c if c.isprintable() else c.encode("unicode_escape").decode() for c in text)


class ConsoleFormatter(logging.Formatter):
    """Time, level, message, then the fields as key=value; the lines of a traceback are indented."""

    def format(self, record: logging.LogRecord) -> str:
        """Return the line of `record`, and those of its traceback."""
        record.message, record.asctime = record.getMessage(), self.formatTime(record)
        fields = "".join(f" {key}={_word(value)}" for key, value in getattr(record, "fields", {}).items())
        traceback = self.formatException(record.exc_info).split("\n") if record.exc_info else ()
        return "\n".join(
            [_line(self.formatMessage(record)) + fields, *(f"    {_line(x)}" for x in traceback)]
        )


def set_up_logging(level: str, style: str) -> None:
    """Send the log to standard error; `style` is console or json."""
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(
        JsonFormatter() if style == "json" else ConsoleFormatter("%(asctime)s %(levelname)-7s %(message)s")
    )
    logging.basicConfig(level=level.upper(), handlers=[handler], force=True)


def toggle_debug(level: str) -> None:
    """Switch a running server to debug level, or back to `level` (SIGUSR1)."""
    root = logging.getLogger()
    debugging = root.level == logging.DEBUG and level != "debug"
    root.setLevel(level.upper() if debugging else logging.DEBUG)
    root.log(root.level, "log level is now %s", logging.getLevelName(root.level).lower())
