"""Logging: one line per event on standard error, for people or as JSON; and internal errors, which get an id there."""

import json
import logging
import os
import select
import sys
import threading
from collections import deque
from contextlib import suppress
from datetime import UTC, datetime
from uuid import uuid4

from encoder_contract.errors import EncoderError, InternalError

log = logging.getLogger(__name__)

# Lines that wait to be written: minutes of a busy server's log, or a second of one under attack.
MAX_WAITING_BYTES = 4 << 20
# How long the end of the process waits for lines to be written.
FLUSH_S = 2.0


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


class QueuedHandler(logging.Handler):
    """Writes lines on its own thread, so that an unread log blocks no other thread.

    A line that does not fit into `max_bytes` of waiting lines is dropped and counted in `dropped`. A line that cannot
    be written (a full disk, a closed pipe) is lost.
    """

    def __init__(self, file: int, max_bytes: int = MAX_WAITING_BYTES) -> None:
        """`file` is a file descriptor: a lock of `sys.stderr` would be held while a write waits."""
        super().__init__()
        self.dropped = 0
        self._file = file
        self._max_bytes = max_bytes
        self._lines: deque[bytes] = deque()
        self._waiting_bytes = 0
        self._told = 0
        self._closed = False
        self._changed = threading.Condition()
        # A daemon thread, as it may wait for a reader without end.
        threading.Thread(target=self._write_all, name="log", daemon=True).start()

    def emit(self, record: logging.LogRecord) -> None:
        """Queue the line of `record`, or drop it."""
        try:
            line = self._line(record)
        except Exception:  # noqa: BLE001 - a record that cannot be formatted; its default handling would write, and wait
            line = b""
        with self._changed:
            if not line or self._waiting_bytes + len(line) > self._max_bytes:
                self.dropped += 1
                return
            self._lines.append(line)
            self._waiting_bytes += len(line)
            self._changed.notify_all()

    def flush(self) -> None:
        """Wait until all lines are written, at most `FLUSH_S`."""
        with self._changed:
            self._changed.wait_for(lambda: not self._waiting_bytes, FLUSH_S)

    def close(self) -> None:
        """End the thread once the lines that wait are written."""
        with self._changed:
            self._closed = True
            self._changed.notify_all()
        super().close()

    def _line(self, record: logging.LogRecord) -> bytes:
        return (self.format(record) + "\n").encode(errors="backslashreplace")

    def _write_all(self) -> None:
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._lines or self._closed)
                if not self._lines:
                    return
                line = self._lines.popleft()
            with suppress(OSError):
                _write(self._file, line)
            with self._changed:
                self._waiting_bytes -= len(line)
                told = self.dropped - self._told
                if told and not self._lines:
                    self._told = self.dropped
                    words = "%d log lines were dropped: they were not read in time"
                    record = logging.LogRecord(__name__, logging.WARNING, "", 0, words, (told,), None)
                    self.emit(record)
                self._changed.notify_all()


def _write(file: int, line: bytes) -> None:
    """Write all of a line, to a file that may be set not to block."""
    left = memoryview(line)
    while left:
        try:
            left = left[os.write(file, left) :]
        except BlockingIOError:
            waiting = select.poll()
            waiting.register(file, select.POLLOUT)
            waiting.poll()


def dropped_lines() -> int:
    """Return how many lines of the process's log were dropped."""
    handlers = logging.getLogger().handlers
    return sum(handler.dropped for handler in handlers if isinstance(handler, QueuedHandler))


def set_up_logging(level: str, style: str) -> None:
    """Send the log to standard error; `style` is console or json."""
    handler = QueuedHandler(sys.stderr.fileno())
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


def known_error(error: Exception) -> EncoderError:
    """Return `error` itself if it is an `EncoderError`, else an `InternalError` with the id of a log line.

    Call it where the error ends, to become an answer: it drops the traceback of the error and of those before it. Their
    frames often refer to the error in turn, and such a cycle would keep a call's messages until a garbage collection.
    """
    known = error
    if not isinstance(known, EncoderError):
        incident = uuid4().hex[:12]
        log.error("internal error %s", incident, exc_info=error)
        known = InternalError(f"internal error {incident}; the server's log has the details")
    error.__traceback__ = error.__cause__ = error.__context__ = None
    return known
