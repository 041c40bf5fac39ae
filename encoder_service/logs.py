"""Logging: one line per event on standard error, as text or JSON. Internal errors are logged with an id."""

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

# Most bytes of lines that wait to be written: minutes of a busy server's log, or one second of a server under attack.
MAX_WAITING_BYTES = 4 << 20
# Records that wait to be formatted by the thread that writes. A busy server logs fewer in `TOGETHER_S`.
MAX_UNFORMATTED = 512
# How long lines wait for others, to be written with them.
TOGETHER_S = 0.05
# How long a process that ends waits for its last lines to be written.
FLUSH_S = 2.0


class JsonFormatter(logging.Formatter):
    """Writes one JSON object per line, with the fields that a caller passes as `extra={"fields": {...}}`."""

    def format(self, record: logging.LogRecord) -> str:
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
    """Return `value` as one word, so that text from a caller cannot look like another field or line."""
    text = str(value)
    return text if text.isprintable() and " " not in text and "=" not in text else repr(text)


def _line(text: str) -> str:
    """Return `text` as one line, so that text from a peer or Redis cannot fake a log line or move the cursor."""
    return "".join(c if c.isprintable() else c.encode("unicode_escape").decode() for c in text)


class ConsoleFormatter(logging.Formatter):
    """Writes time, level, message and the fields as key=value. The lines of a traceback are indented."""

    def format(self, record: logging.LogRecord) -> str:
        record.message, record.asctime = record.getMessage(), self.formatTime(record)
        fields = "".join(f" {key}={_word(value)}" for key, value in getattr(record, "fields", {}).items())
        traceback = self.formatException(record.exc_info).split("\n") if record.exc_info else ()
        return "\n".join(
            [_line(self.formatMessage(record)) + fields, *(f"    {_line(x)}" for x in traceback)]
        )


class QueuedHandler(logging.Handler):
    """Formats and writes lines on its own thread, so that a log that is not read blocks no other thread.

    The thread is woken once for all lines of `TOGETHER_S`. While `max_bytes` of lines wait, further lines are dropped
    and counted in `dropped`. A line that cannot be written (full disk, closed pipe) is lost.
    """

    def __init__(self, file: int, max_bytes: int = MAX_WAITING_BYTES) -> None:
        """`file` is a file descriptor, because `sys.stderr` would hold its lock while a write waits."""
        super().__init__()
        self.dropped = 0
        self._file = file
        self._max_bytes = max_bytes
        self._waiting: deque[logging.LogRecord | bytes] = deque()
        self._waiting_bytes = 0  # of formatted lines
        self._reported = 0
        self._closed = False
        self._is_idle = False  # the thread waits to be woken
        self._is_written = True
        self._changed = threading.Condition()
        self._hurry = threading.Event()  # do not wait for more lines
        # A daemon thread, because it may wait for a reader forever.
        threading.Thread(target=self._write_all, name="log", daemon=True).start()

    def emit(self, record: logging.LogRecord) -> None:
        """Queue `record`, or drop it.

        A record with an exception is formatted at once, because its traceback keeps the frames of a call. So is one
        that finds many others before it: the thread is waiting for a reader.
        """
        line: bytes | None = None
        if record.exc_info or len(self._waiting) >= MAX_UNFORMATTED:
            line = self._line(record)
        with self._changed:
            if line is not None and (not line or self._waiting_bytes + len(line) > self._max_bytes):
                self.dropped += 1
                return
            self._waiting.append(record if line is None else line)
            self._waiting_bytes += len(line or b"")
            self._is_written = False
            if self._is_idle:
                self._is_idle = False
                self._changed.notify_all()

    def flush(self) -> None:
        """Wait until all lines are written, but at most `FLUSH_S`."""
        self._hurry.set()
        with self._changed:
            self._changed.wait_for(lambda: self._is_written, FLUSH_S)
        self._hurry.clear()

    def close(self) -> None:
        """End the thread once the waiting lines are written."""
        self._hurry.set()
        with self._changed:
            self._closed = True
            self._changed.notify_all()
        super().close()

    def _line(self, record: logging.LogRecord) -> bytes:
        """Return the line; empty if it cannot be formatted: logging's own handler would then write, and block."""
        try:
            return (self.format(record) + "\n").encode(errors="backslashreplace")
        except Exception:  # noqa: BLE001 - see above
            return b""

    def _write_all(self) -> None:
        while self._wait():
            self._hurry.wait(TOGETHER_S)
            with self._changed:
                waiting, self._waiting = self._waiting, deque()
                written_bytes = self._waiting_bytes
            lines = [each if isinstance(each, bytes) else self._line(each) for each in waiting]
            with suppress(OSError):
                _write(self._file, b"".join(lines))
            with self._changed:
                self.dropped += lines.count(b"")
                self._waiting_bytes -= written_bytes
                dropped = self.dropped - self._reported
                if dropped and not self._waiting:
                    self._reported = self.dropped
                    text = "%d log lines were dropped: they were not read in time"
                    record = logging.LogRecord(__name__, logging.WARNING, "", 0, text, (dropped,), None)
                    self._waiting.append(record)
                if not self._waiting:
                    self._is_written = True
                    self._changed.notify_all()

    def _wait(self) -> bool:
        """Wait for records. Return False if there will be none."""
        with self._changed:
            self._is_idle = not self._waiting
            self._changed.wait_for(lambda: self._waiting or self._closed)
            return bool(self._waiting)


def _write(file: int, line: bytes) -> None:
    """Write a whole line, even to a non-blocking file."""
    unwritten = memoryview(line)
    while unwritten:
        try:
            unwritten = unwritten[os.write(file, unwritten) :]
        except BlockingIOError:
            writable = select.poll()
            writable.register(file, select.POLLOUT)
            writable.poll()


def dropped_lines() -> int:
    """Return how many log lines this process has dropped."""
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
    """Return `error` itself if it is an `EncoderError`, else log it and return an `InternalError` with the log's id.

    Call it where the error becomes an answer: it drops the tracebacks of the error and of its causes. Their frames
    often refer back to the error, and such a cycle would keep a call's messages alive until a garbage collection.
    """
    known = error
    if not isinstance(known, EncoderError):
        error_id = uuid4().hex[:12]
        log.error("internal error %s", error_id, exc_info=error)
        known = InternalError(f"internal error {error_id}; the server's log has the details")
    error.__traceback__ = error.__cause__ = error.__context__ = None
    return known
