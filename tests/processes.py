"""The command lines as processes: a server with settings that fit a test, and commands that end by themselves."""

import subprocess
import sys
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

from testing import server_process
from testing.server_process import ServerProcess
from tests.small_store import STORE_GIB
from tests.waiting import START_S

SCRIPTS = Path(sys.executable).parent


def running(model: Path, **settings: Any) -> AbstractContextManager[ServerProcess]:
    """Run a server for the length of a `with` block."""
    return server_process.running(model, **{"store_host_gib": STORE_GIB, **settings})


def run(*command: str | Path, timeout_s: float = START_S) -> subprocess.CompletedProcess[str]:
    """Run one of the console commands and return what it printed."""
    return subprocess.run(
        [SCRIPTS / str(command[0]), *command[1:]],
        capture_output=True,
        text=True,
        timeout=timeout_s,
        check=False,
    )
