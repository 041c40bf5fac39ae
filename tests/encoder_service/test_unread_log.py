"""A log that is not read: the server continues, drops lines and counts them."""

import asyncio
import fcntl
import logging
import os
import re
import subprocess
import threading
import time
import weakref
from collections.abc import Iterator
from pathlib import Path
from urllib.request import urlopen

import grpc
import pytest

from encoder_service import logs
from encoder_service.logs import MAX_UNFORMATTED, ConsoleFormatter, QueuedHandler
from testing.attacks import FETCH
from tests.processes import SCRIPTS
from tests.small_store import STORE_GIB
from tests.waiting import PATIENCE_S, START_S, soon

PIPE_BYTES = 4096  # the smallest that Linux makes
LINES, TOGETHER = 200, 10


@pytest.fixture
def pipe() -> Iterator[tuple[int, int]]:
    """The read end and the write end of a small pipe."""
    reads, writes = os.pipe()
    fcntl.fcntl(writes, fcntl.F_SETPIPE_SZ, PIPE_BYTES)
    yield reads, writes
    for file in (reads, writes):
        os.close(file)


@pytest.fixture(autouse=True)
def _patient(monkeypatch: pytest.MonkeyPatch) -> None:
    """`flush` returns when all lines are written, however long that takes here, and not because its time is over."""
    monkeypatch.setattr("encoder_service.logs.FLUSH_S", PATIENCE_S)


def writing_to(
    file: int, formatter: type[ConsoleFormatter] = ConsoleFormatter, **options: int
) -> QueuedHandler:
    """Return a handler that writes bare messages to a file."""
    handler = QueuedHandler(file, **options)
    handler.setFormatter(formatter("%(message)s"))
    return handler


def new_file(path: Path) -> int:
    return os.open(path, os.O_WRONLY | os.O_CREAT)


def record(text: str) -> logging.LogRecord:
    return logging.LogRecord("test", logging.INFO, "", 0, text, (), None)


async def test_an_unread_log_drops_and_counts_lines_and_keeps_order(pipe: tuple[int, int]) -> None:
    reads, writes = pipe
    handler = writing_to(os.dup(writes), max_bytes=2 * PIPE_BYTES)
    # The thread may take lines before the pipe is full, and once more as it fills it.
    count = 3 * MAX_UNFORMATTED + LINES
    for number in range(count):
        handler.handle(record(f"{number:04} {'x' * 94}"))
    kept = count - handler.dropped
    assert MAX_UNFORMATTED <= kept < count
    written = b""
    with os.fdopen(os.dup(reads), "rb", buffering=0) as file:
        os.set_blocking(reads, False)

        def complete() -> bool:
            nonlocal written
            written += file.read(1 << 16) or b""
            return b"dropped" in written and written.endswith(b"\n")

        await soon(complete)
    *lines, notice = written.decode().splitlines()
    numbers = [int(line[:4]) for line in lines]
    assert len(numbers) == kept
    assert numbers == sorted(numbers)
    assert notice.startswith(f"{count - kept} log lines were dropped")
    handler.close()


def test_a_process_that_ends_writes_its_waiting_lines(tmp_path: Path) -> None:
    path = tmp_path / "log"
    handler = writing_to(new_file(path))
    for number in range(LINES):
        handler.handle(record(str(number)))
    handler.flush()
    assert path.read_text().split() == [str(number) for number in range(LINES)]
    handler.close()


class FaultError(Exception):
    """An exception to which weak references are possible."""


def test_lines_are_formatted_and_written_together_on_the_logs_own_thread(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    threads: list[int] = []
    written: list[int] = []

    class Formatter(ConsoleFormatter):
        def format(self, record: logging.LogRecord) -> str:
            threads.append(threading.get_ident())
            return super().format(record)

    def write(file: int, lines: bytes) -> None:
        written.append(lines.count(b"\n"))
        os.write(file, lines)

    monkeypatch.setattr(logs, "TOGETHER_S", PATIENCE_S)  # on a busy machine, lines may come one by one
    monkeypatch.setattr(logs, "_write", write)
    handler = writing_to(new_file(tmp_path / "log"), Formatter)
    for number in range(LINES):
        handler.handle(record(str(number)))
    handler.flush()
    assert len(threads) == LINES
    assert {*threads} & {threading.get_ident()} == set()
    assert written == [LINES], "lines that come together are written at once"
    handler.close()


def test_a_line_with_an_exception_is_formatted_at_once_and_is_written_at_a_crash(tmp_path: Path) -> None:
    path, kept = tmp_path / "log", []
    handler = writing_to(new_file(path))
    try:
        raise FaultError("the reason")
    except FaultError as error:
        failed = record("failed")
        failed.exc_info = (type(error), error, error.__traceback__)
        kept.append(weakref.ref(error))
        handler.handle(failed)
    del failed
    assert kept[0]() is None, "the queue keeps no traceback"
    began = time.monotonic()
    handler.flush()  # as `logging.shutdown` does in a process that ends
    assert time.monotonic() - began < PATIENCE_S
    assert "FaultError: the reason" in path.read_text()
    handler.close()


def test_a_record_that_cannot_be_formatted_is_counted(pipe: tuple[int, int]) -> None:
    handler = QueuedHandler(os.dup(pipe[1]))
    handler.handle(logging.LogRecord("test", logging.INFO, "", 0, "%d", ("no number",), None))
    handler.flush()
    assert handler.dropped == 1
    handler.close()


@pytest.mark.attack("a log that no process reads")
async def test_a_server_with_an_unread_log_answers_probes_and_ends_at_sigterm(
    checkpoint: Path, tmp_path: Path, pipe: tuple[int, int]
) -> None:
    flags = ["--model", checkpoint, "--devices", "cpu", "--store-host-gib", STORE_GIB]
    flags += ["--listen", "127.0.0.1:0", "--metrics-listen", "127.0.0.1:0"]
    command = [str(word) for word in (SCRIPTS / "encoder-service", "serve", *flags)]
    said = tmp_path / "said"
    with said.open("w") as stream:
        process = subprocess.Popen(command, stdout=stream, stderr=pipe[1])
    try:
        await soon(lambda: " listening " in said.read_text(), START_S)
        where = dict(re.findall(r"^ +(listening|metrics) +(\S+)\n", said.read_text(), re.MULTILINE))
        async with grpc.aio.insecure_channel(where["listening"]) as channel:

            async def refused() -> None:
                call = channel.stream_stream(FETCH)(iter([b"\xff"]), timeout=PATIENCE_S)
                assert await call.code() is grpc.StatusCode.INVALID_ARGUMENT

            for _ in range(LINES // TOGETHER):  # a line each: more than the pipe holds
                await asyncio.gather(*(refused() for _ in range(TOGETHER)))  # each refusal is delayed
        with urlopen(f"{where['metrics']}healthz", timeout=PATIENCE_S) as answer:
            assert answer.status == 200
        with urlopen(f"{where['metrics']}metrics", timeout=PATIENCE_S) as answer:
            assert b"encsvc_log_dropped_total 0.0" in answer.read()
    finally:
        process.terminate()
        try:
            assert process.wait(PATIENCE_S) == 0
        finally:
            process.kill()
