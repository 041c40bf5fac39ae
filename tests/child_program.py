"""The program of a child process of tests: it loads, says so, and then echoes what it hears."""

import os
import signal
import socket
import sys
from collections.abc import Sequence

from encoder_service.child import become_child


def main(descriptors: Sequence[int], *, parent: int, does: str) -> None:
    """Say "ready" and echo, unless it `does` something else: refuse, sleep, work, or stop itself."""
    become_child("test-child", parent)
    with socket.socket(fileno=descriptors[0]) as server:
        if does == "refuse":
            sys.exit(3)
        if does == "stop":
            os.kill(os.getpid(), signal.SIGSTOP)
        while does == "work":
            pass
        if does == "sleep":
            server.recv(1)
        server.send(b"ready")
        while heard := server.recv(100):
            server.send(heard)
