"""A child process: how it starts, speaks or hangs, and ends. Devices and decoders run in such processes.

`Child` is the server's side, `become_child` that of the process. The kernel ends a child with the thread that started
it.
"""

import ctypes
import math
import os
import select
import signal
import socket
import subprocess
import sys
import time
import weakref
from collections.abc import Mapping, Sequence
from contextlib import suppress
from typing import Any

from encoder_service.signals import leave_to_the_server

LOOK_S = 0.5
"""Time between two looks at a child. They are counted, not seconds: a server that was stopped has heard nothing."""
# A child hangs if it uses less CPU time than this in this many seconds: even the busiest machine gives it more.
_HANGING_CPU_S, _HANGING_S = 0.01, 5.0
_CPU_CLOCK = 2  # CPUCLOCK_SCHED of a process, from <linux/posix-timers.h>
# How long the end of a child is waited for that nobody has ended. One that the kernel cannot end ends with the server.
_LAST_S = 5.0
_PROGRAM = (
    "import gc, sys; sys.path[:] = {path!r}; "
    "gc.disable(); from {module} import main; gc.enable(); "  # as `without_collections` does, without an import
    "main({descriptors!r}, **{settings!r})"
)


class Child:
    """A process that runs the `main` of a module. It is killed when this object is garbage-collected."""

    def __init__(
        self,
        module: str,
        descriptors: Sequence[int],
        settings: Mapping[str, Any],
        env: Mapping[str, str],
        *,
        stdout: int = subprocess.DEVNULL,
        stderr: int | None = None,
    ) -> None:
        """Call `main(descriptors, parent=our pid, **settings)` in a new process with these descriptors.

        Raises `OSError` if memory, processes or descriptors are short.
        """
        program = _PROGRAM.format(
            path=sys.path,
            module=module,
            descriptors=[*descriptors],
            settings={"parent": os.getpid(), **settings},
        )
        self._process = subprocess.Popen(  # noqa: S603 - our own interpreter and module
            [sys.executable, "-c", program],
            pass_fds=descriptors,
            stdin=subprocess.DEVNULL,
            stdout=stdout,
            stderr=stderr,
            env=env,
            # Ctrl-C in the terminal is for the server alone. In a session of its own, it would get a share of the cores
            # apart from ours (sched_autogroup).
            process_group=0,
        )
        self.pid = self._process.pid
        weakref.finalize(self, _end, self._process)

    @property
    def returncode(self) -> int | None:
        """Its exit status, negative for a signal; None before somebody has waited for its end."""
        return self._process.returncode

    def await_message(self, channel: socket.socket, within_s: float, *, works: bool = False) -> None:
        """Wait until `channel` has something to read: a message of the child, or its end.

        Raises `TimeoutError` if the child says nothing for `within_s`, or hangs: one that `works` until it says
        something hangs if it uses no CPU time. Raises `ProcessLookupError` if it is gone.
        """
        watch, waiting = IdleWatch(self.pid) if works else None, select.poll()
        waiting.register(channel, select.POLLIN)
        for _ in range(math.ceil(within_s / LOOK_S)):
            if waiting.poll(1000 * min(LOOK_S, within_s)):
                return
            if watch is not None and watch.is_hanging(LOOK_S):
                break
        raise TimeoutError

    def kill(self) -> None:
        """Have the kernel end it, whatever it does. Does not wait."""
        self._process.kill()

    def wait(self, within_s: float | None = None) -> int | None:
        """Wait until it has ended; return its exit status, or None if it runs on."""
        with suppress(subprocess.TimeoutExpired):
            return self._process.wait(within_s)
        return None

    def end(self) -> int:
        """Kill it if it still runs, and wait for its end. Return its exit status, negative for a signal."""
        self.kill()
        return self._process.wait()


def _end(process: "subprocess.Popen[bytes]") -> None:
    process.kill()
    with suppress(subprocess.TimeoutExpired):
        process.wait(_LAST_S)


def why_ended(status: int) -> str:
    """Return why a child ended: "killed", by another process or by the kernel when memory was short, or "crashed"."""
    return "killed" if status == -signal.SIGKILL else "crashed"


class IdleWatch:
    """Notices that a process hangs: that it uses no CPU time."""

    def __init__(self, pid: int) -> None:
        self._pid = pid
        self._idle_s = 0.0
        self._used_s = used_cpu_s(pid)

    def is_hanging(self, waited_s: float) -> bool:
        """Whether the process hangs. It was waited for since the last call. Raises `ProcessLookupError`."""
        self._idle_s += waited_s
        if (used_s := used_cpu_s(self._pid)) - self._used_s > _HANGING_CPU_S:
            self._idle_s, self._used_s = 0.0, used_s
        return self._idle_s >= _HANGING_S


def used_cpu_s(pid: int) -> float:
    """Return the CPU time that a process has used, seconds. Raises `ProcessLookupError` if it is gone."""
    try:
        return time.clock_gettime(~pid << 3 | _CPU_CLOCK)
    except OSError as error:
        raise ProcessLookupError(f"process {pid} is gone") from error


# From linux/prctl.h.
_PR_SET_PDEATHSIG, _PR_SET_NAME = 1, 15
_libc = ctypes.CDLL(None, use_errno=True)


def become_child(name: str, parent: int) -> None:
    """Have the kernel kill this process when the thread of `parent` that started it ends; `ps` shows it as `name`.

    Signals are left to the server, which ends its children itself.
    """
    leave_to_the_server()
    prctl(_PR_SET_NAME, name.encode())
    prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:  # the parent ended before the kernel knew
        os._exit(1)


def prctl(option: int, value: int | bytes) -> None:
    """Change what the kernel does with this process. Raises `OSError`."""
    if _libc.prctl(option, value, 0, 0, 0) != 0:
        raise OSError(ctypes.get_errno(), f"prctl {option}: {os.strerror(ctypes.get_errno())}")
