"""How our commands behave: one line for an error, and a quiet end if the reader of the output has left."""

import argparse
import errno
import os
import signal
import sys
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from difflib import get_close_matches
from math import inf
from typing import Any, NoReturn

from encoder_contract.endpoint import Endpoint

FAILED, BAD_USAGE = 1, 2


class CommandLine(argparse.ArgumentParser):
    """A parser that reports an error in one line. Flags must be written in full, so that new ones break no script."""

    def __init__(self, **settings: Any) -> None:
        super().__init__(**settings, allow_abbrev=False)

    def parse_known_args(  # type: ignore[override]  # the base class has overloads, for other namespaces
        self, args: Sequence[str] | None = None, namespace: argparse.Namespace | None = None
    ) -> tuple[argparse.Namespace, list[str]]:
        """Parse, and end the program at an unknown argument, with a suggestion."""
        found, left = super().parse_known_args(args, namespace)
        if left:
            word = left[0].partition("=")[0]
            self.error(f"unknown argument {word}{did_you_mean(word, self._option_string_actions)}")
        return found, left

    def error(self, message: str) -> NoReturn:
        """End the program."""
        self.exit(BAD_USAGE, f"{self.prog}: {message}; see {self.prog} --help\n")


def endpoint(text: str) -> str:
    """Return the argument if it is an endpoint."""
    try:
        Endpoint.parse(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error)) from error
    return text


def seconds(text: str) -> float:
    """Return the argument as a positive, finite number of seconds."""
    if not 0 < (value := float(text)) < inf:
        raise argparse.ArgumentTypeError(f"{text} must be positive and finite")
    return value


def did_you_mean(word: str, known: Iterable[str]) -> str:
    """Return a suggestion with the known word nearest to `word`; empty if none is near."""
    near = get_close_matches(word, list(known), n=1)
    return f" (did you mean {near[0]}?)" if near else ""


def install(extra: str) -> str:
    """Return the line that installs an extra. It also works for a commit that no package index has."""
    return f"in a clone of the repository: pip install '.[{extra}]'"


@contextmanager
def output() -> Iterator[None]:
    """Bring what is printed inside to its end. Whose reader has left ends quietly; a full disk is told in one line."""
    try:
        yield
        sys.stdout.flush()
    except OSError as error:
        if error.errno not in (errno.EPIPE, errno.ENOSPC):
            raise
        _discard_output()
        if error.errno == errno.EPIPE:
            raise SystemExit(FAILED) from None
        raise SystemExit(f"standard output: {error.strerror}") from None


def say(text: str) -> None:
    """Print what a server has to say, in one write. Standard output on a full disk is no reason not to serve."""
    try:
        print(f"{text}\n", end="", flush=True)  # noqa: T201 - in one write, or a line of the log could come inside
    except OSError:
        _discard_output()


def _discard_output() -> None:
    """Discard what is printed from now on, and what is still buffered: Python would try it again at exit, and fail."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def begin() -> None:
    """Prepare a process for a command: signals end it without a traceback, and the gRPC library prints nothing.

    A server sets handlers of its own later. Our errors say what gRPC's C++ core would print; `GRPC_VERBOSITY` in the
    environment turns its output on.
    """
    if os.getpid() == 1:  # of a container: the kernel spares it the default of every signal
        for number in (signal.SIGINT, signal.SIGTERM):
            signal.signal(number, lambda number, _: os._exit(128 + number))
    elif signal.getsignal(signal.SIGINT) is signal.default_int_handler:  # not where the shell had it ignored
        signal.signal(signal.SIGINT, signal.SIG_DFL)
    os.environ.setdefault("GRPC_VERBOSITY", "NONE")
