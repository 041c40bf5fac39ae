"""The command line that all demos share: the folder of their files, and how they end."""

import argparse
import signal
from collections.abc import Callable
from functools import partial
from pathlib import Path

from testing.processes import StartError

FOLDER = Path(__file__).parents[1] / ".demo"
say = partial(print, flush=True)  # shows progress at once


def command_line(prog: str, description: str | None) -> argparse.ArgumentParser:
    """Return a parser with the option `--folder`."""
    parser = argparse.ArgumentParser(prog=prog, description=description)
    parser.add_argument(
        "--folder", type=Path, default=FOLDER, help="where everything is written (%(default)s)"
    )
    return parser


def ended(demo: Callable[[], int]) -> int:
    """Run a demo; return its exit code. Exits with one line if a server does not start."""
    try:
        return demo()
    except StartError as error:
        raise SystemExit(f"demo: {error}") from error
    except KeyboardInterrupt:
        say("\ndemo: interrupted")
        return 128 + signal.SIGINT
