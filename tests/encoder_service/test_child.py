"""A child process that starts, refuses to start, hangs, is stopped or killed: each ends in bounded time."""

import os
import signal
import socket
import threading
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager

import psutil
import pytest

from encoder_service.child import Child, IdleWatch, used_cpu_s, why_ended
from tests.waiting import PATIENCE_S, START_S, soon


@contextmanager
def started(does: str = "echo", module: str = "tests.child_program") -> Iterator[tuple[Child, socket.socket]]:
    """Start the child, and end it with the block."""
    with ExitStack() as stack:
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        stack.enter_context(ours)
        with theirs:
            child = Child(module, [theirs.fileno()], {"does": does}, {})
        stack.callback(child.end)
        ours.settimeout(PATIENCE_S)
        yield child, ours


def test_a_child_says_that_it_is_ready_and_ends_with_its_channel() -> None:
    with started() as (child, channel):
        child.await_message(channel, START_S)
        assert channel.recv(100) == b"ready"
        channel.send(b"echo")
        assert channel.recv(100) == b"echo"
        assert psutil.Process(child.pid).name() == "test-child"
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
            os.kill(child.pid, number)  # left to the server
        channel.send(b"still here")
        assert channel.recv(100) == b"still here"
        assert child.wait(0) is None
        assert child.returncode is None
        channel.close()
        assert child.wait(PATIENCE_S) == 0


@pytest.mark.parametrize(("does", "module"), [("refuse", "tests.child_program"), ("", "no.such.module")])
def test_one_that_refuses_to_start_closes_its_channel(does: str, module: str) -> None:
    with started(does, module) as (child, channel):
        child.await_message(channel, START_S, works=True)
        assert channel.recv(100) == b""
        status = child.wait(PATIENCE_S)
        assert status == (3 if does else 1)
        assert why_ended(status) == "crashed"
        assert child.end() == status


def test_one_that_is_killed_closes_its_channel() -> None:
    with started() as (child, channel):
        child.await_message(channel, START_S)
        assert channel.recv(100) == b"ready"
        os.kill(child.pid, signal.SIGKILL)
        child.await_message(channel, PATIENCE_S)
        assert channel.recv(100) == b""
        assert why_ended(child.end()) == "killed"
        assert not psutil.pid_exists(child.pid)


def test_one_that_stops_hangs_and_is_killed() -> None:
    with started("stop") as (child, channel):
        with pytest.raises(TimeoutError):
            child.await_message(channel, 100 * START_S, works=True)  # noticed long before
        assert psutil.Process(child.pid).status() == psutil.STATUS_STOPPED
        assert child.end() == -signal.SIGKILL
        assert child.end() == -signal.SIGKILL, "a second end finds the status of the first"


async def test_one_that_works_does_not_hang_and_one_that_is_stopped_does() -> None:
    with started("work") as (child, _):
        watch, before = IdleWatch(child.pid), used_cpu_s(child.pid)
        await soon(lambda: used_cpu_s(child.pid) > before + 0.1)
        assert not watch.is_hanging(3600.0)
        os.kill(child.pid, signal.SIGSTOP)
        await soon(lambda: psutil.Process(child.pid).status() == psutil.STATUS_STOPPED)
        watch.is_hanging(0.0)  # counts what it used until it was stopped
        assert watch.is_hanging(3600.0)
        child.end()
        with pytest.raises(ProcessLookupError):
            watch.is_hanging(1.0)


def test_one_whose_silence_is_allowed_may_be_idle_until_its_time_is_over() -> None:
    with started("sleep") as (child, channel):
        with pytest.raises(TimeoutError):
            child.await_message(channel, 0.1)
        channel.send(b"x")
        child.await_message(channel, START_S)
        assert channel.recv(100) == b"ready"


def test_one_that_is_forgotten_is_killed() -> None:
    ours, theirs = socket.socketpair()
    with ours, theirs:
        child = Child("tests.child_program", [theirs.fileno()], {"does": "stop"}, {})
        process = psutil.Process(child.pid)
        del child
        assert not process.is_running()


def test_one_ends_with_the_thread_that_started_it() -> None:
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    children: list[Child] = []

    def start() -> None:
        children.append(Child("tests.child_program", [theirs.fileno()], {"does": "echo"}, {}))
        children[0].await_message(ours, START_S)

    with ours, theirs:
        thread = threading.Thread(target=start)
        thread.start()
        thread.join(START_S)
        assert children[0].wait(PATIENCE_S) == -signal.SIGKILL
