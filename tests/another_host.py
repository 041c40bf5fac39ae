"""A second host on this machine: a network namespace, joined by a virtual cable (Linux, root, iproute2)."""

import itertools
import os
import shutil
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from testing.server_process import ServerProcess

numbers = itertools.count(os.getpid() % 90_000)  # names and networks of their own, also beside another run


@dataclass(frozen=True, slots=True)
class Host:
    """A network namespace; `address` is its end of the cable."""

    name: str
    address: str

    def run(self, *command: str) -> None:
        """Run a command there."""
        _run("ip", "netns", "exec", self.name, *command)

    @contextmanager
    def serving(
        self, model: Path, program: Path, executable: Path, **settings: Any
    ) -> Iterator[ServerProcess]:
        """Run a server there, with a rows port, for the length of a `with` block. Writes its start to `program`."""
        program.write_text(f'#!/bin/sh\nexec ip netns exec {self.name} {executable} "$@"\n')
        program.chmod(0o700)
        port = f"{self.address}:0"
        ports = {"listen": port, "metrics_listen": port, "rows_listen": port, "listen_unprotected": "yes"}
        server = ServerProcess(model, executable=program, threads=1, **ports, **settings)
        try:
            server.wait_until_it_listens()
            yield server
        finally:
            server.kill()


def _run(*command: str) -> None:
    subprocess.run(command, check=True, capture_output=True, text=True)


@contextmanager
def another_host() -> Iterator[Host]:
    """Make a namespace and a cable to it, for the length of a `with` block. Skips the test where it cannot."""
    if os.getuid() or shutil.which("ip") is None:
        pytest.skip("network namespaces need root and iproute2")
    number = next(numbers)
    name, here, there = f"host-{number}", f"here{number}", f"there{number}"
    network = f"10.{100 + number % 100}.{number // 100 % 250}"
    host = Host(name, f"{network}.2")
    try:
        _run("ip", "netns", "add", name)
        _run("ip", "link", "add", here, "type", "veth", "peer", "name", there, "netns", name)
    except subprocess.CalledProcessError as error:
        subprocess.run(["ip", "netns", "delete", name], check=False, capture_output=True)
        pytest.skip(f"this machine makes no network namespaces: {error.stderr.strip()}")
    try:
        _run("ip", "address", "add", f"{network}.1/24", "dev", here)
        _run("ip", "link", "set", here, "up")
        host.run("ip", "address", "add", f"{host.address}/24", "dev", there)
        for device in (there, "lo"):
            host.run("ip", "link", "set", device, "up")
        yield host
    finally:
        _run("ip", "netns", "delete", name)
