"""A process that was forked from one with a client gets a typed error: it neither crashes nor hangs."""

import asyncio
import textwrap

import pytest

from encoder_service.app import Server
from tests.processes import run
from tests.waiting import PATIENCE_S

PROGRAM = """
    import asyncio, os, signal, sys, threading, time
    from prefill_client import BlockingClient, EncoderClient, EncoderError, RowRequest

    endpoint, what = sys.argv[1:]
    client = BlockingClient.connect(endpoint)
    other = asyncio.new_event_loop()
    waiting = other.run_until_complete(EncoderClient.connect(endpoint))

    def new_client():
        try:
            BlockingClient.connect(endpoint)
        finally:
            assert threading.active_count() == 1

    calls = {
        "nothing": lambda: time.sleep(0.3),  # threads of gRPC used to crash meanwhile
        "submit": lambda: client.submit([b"no image"]),
        "fetch": lambda: list(client.fetch([RowRequest(bytes(32))])),
        "submit of the asynchronous client": lambda: asyncio.run(waiting.submit([b"no image"])),
        "fetch of the asynchronous client": lambda: waiting.fetch([RowRequest(bytes(32))]),
        "new client": new_client,
        "close": lambda: (client.close(), asyncio.run(waiting.close())),
    }
    if (child := os.fork()) == 0:
        signal.alarm(PATIENCE)  # a call that hangs ends by a signal
        try:
            calls[what]()
            print("no error", flush=True)
        except EncoderError as error:
            print(f"{type(error).__name__}: {error}", flush=True)
        os._exit(0)
    print("ended with", os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]), flush=True)
    print(client.submit([b"no image"])[0].error.status.name, flush=True)  # the parent's client still works
    client.close()
"""
REFUSED = "InvalidRequestError: this process was forked from one that had a client"


@pytest.mark.parametrize(
    ("what", "expected"),
    [
        ("nothing", "no error"),
        ("submit", REFUSED),
        ("fetch", REFUSED),
        ("submit of the asynchronous client", REFUSED),
        ("fetch of the asynchronous client", REFUSED),
        ("new client", REFUSED),
        ("close", "no error"),
    ],
)
async def test_a_client_in_a_forked_process_is_refused(server: Server, what: str, expected: str) -> None:
    program = textwrap.dedent(PROGRAM).replace("PATIENCE", str(int(PATIENCE_S / 2)))
    ran = await asyncio.to_thread(run, "python", "-c", program, server.endpoint, what)
    outcome, *rest = ran.stdout.splitlines()
    assert outcome.startswith(expected), ran.stderr
    assert rest == ["ended with 0", "INVALID_ARGUMENT"], ran.stderr
