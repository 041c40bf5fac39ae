"""Behaviour of all our commands: errors in one line, and a quiet end if the reader of the output has closed it."""

import argparse
import atexit
import errno
import logging
import os
import signal
import sys
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from difflib import get_close_matches
from functools import wraps
from math import inf
from typing import Any, NoReturn, TypeVar, cast

from encoder_contract.endpoint import Endpoint
from encoder_contract.errors import EncoderError

FAILED, BAD_USAGE = 1, 2


class CommandLine(argparse.ArgumentParser):
    """A parser that reports errors in one line. It accepts no abbreviated flags, so new flags break no script."""

    def __init__(self, **settings: Any) -> None:
        super().__init__(**settings, allow_abbrev=False)

    def parse_known_args(  # type: ignore[override]  # the base class has overloads, for other namespaces
        self, args: Sequence[str] | None = None, namespace: argparse.Namespace | None = None
    ) -> tuple[argparse.Namespace, list[str]]:
        """Parse the arguments. At an unknown one, end the program with a suggestion."""
        given = list(sys.argv[1:] if args is None else args)
        # Before the values: the one after an unknown flag would be taken for a positional argument, or for a command.
        for argument in given:
            if argument == "--" or (self._subparsers and argument[:1] != "-"):
                break  # what follows is a value, or a command's
            if argument.startswith("--") and argument.partition("=")[0] not in self._option_string_actions:
                self._refuse(argument)
        found, left = super().parse_known_args(given, namespace)
        if left:
            self._refuse(left[0])
        return found, left

    def _refuse(self, argument: str) -> NoReturn:
        word = argument.partition("=")[0]
        self.error(f"unknown argument {word}{did_you_mean(word, self._option_string_actions)}")

    def error(self, message: str) -> NoReturn:
        """End the program with a one-line message."""
        self.exit(BAD_USAGE, f"{self.prog}: {message}; see {self.prog} --help\n")


def endpoint(text: str) -> str:
    """Check that an argument is the address of a server, and return it."""
    try:
        Endpoint.of_server(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error)) from error
    return text


def seconds(text: str) -> float:
    """Parse an argument as a positive, finite number of seconds."""
    if not 0 < (value := float(text)) < inf:
        raise argparse.ArgumentTypeError(f"{text} must be positive and finite")
    return value


def did_you_mean(word: str, known: Iterable[str]) -> str:
    """Return a suggestion with the known word most similar to `word`; empty if none is similar."""
    names = {name.lstrip("-"): name for name in known}  # dashes alone make no flag similar
    near = get_close_matches(word.lstrip("-"), names, n=1)
    return f" (did you mean {names[near[0]]}?)" if near else ""


def install(extra: str) -> str:
    """Return the command that installs an extra. It also works for commits that are in no package index."""
    return f"in a clone of the repository: pip install '.[{extra}]'"


def reported(program: str, run: Callable[[], int], *, extra: str = "") -> int:
    """Run a command and return its exit code; print its error, if any, in one line.

    A package that is missing is one of `extra`; without an extra, its error is raised.
    """
    try:
        return run()
    except ImportError as error:
        if not extra:
            raise
        return _failed(program, f"{error}; {install(extra)}", BAD_USAGE)
    except EncoderError as error:
        return _failed(program, f"{type(error).__name__}: {error}", FAILED)
    except OSError as error:
        reason = f"{error.filename}: {error.strerror}" if error.filename and error.strerror else str(error)
        return _failed(program, reason, BAD_USAGE)
    except ValueError as error:
        return _failed(program, str(error), BAD_USAGE)


def _failed(program: str, why: str, code: int) -> int:
    print(f"{program}: {why}", file=sys.stderr)  # noqa: T201
    return code


@contextmanager
def output() -> Iterator[None]:
    """Flush what the block prints. End quietly if the reader has closed the output, in one line if the disk is full."""
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
    """Print a message of a server, in one write. A server keeps serving if standard output is on a full disk."""
    try:
        print(f"{text}\n", end="", flush=True)  # noqa: T201 - one write: no log line can come in between
    except OSError:
        _discard_output()


def _discard_output() -> None:
    """Discard all further output, and what is still buffered: Python would retry to write it at exit, and fail."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


Main = TypeVar("Main", bound=Callable[..., int])
"""The function of a command: arguments -> exit code. Without arguments, those of the process."""


def command(main: Main) -> Main:
    """Make `main()` a whole process, from the handling of signals to its end."""

    @wraps(main)
    def run(arguments: Sequence[str] | None = None) -> int:
        if arguments is not None:
            return main(arguments)
        begin()
        _end(main())

    return cast(Main, run)


def begin() -> None:
    """Prepare a process for a command: signals end it without a traceback, and the gRPC library prints nothing.

    Call it before gRPC is imported, which reads `GRPC_VERBOSITY` then. A server sets its own handlers later. Our errors
    include what gRPC's C++ core would print. `GRPC_VERBOSITY` in the environment turns gRPC's output on.
    """
    if os.getpid() == 1:  # in a container: the kernel ignores every default signal action for process 1
        for number in (signal.SIGINT, signal.SIGTERM):
            signal.signal(number, lambda number, _: os._exit(128 + number))
    elif signal.getsignal(signal.SIGINT) is signal.default_int_handler:  # unless the shell ignores it
        signal.signal(signal.SIGINT, signal.SIG_DFL)
    os.environ.setdefault("GRPC_VERBOSITY", "NONE")


def _end(code: int) -> NoReturn:
    """End the process in order, except that the interpreter does not take its modules apart.

    With torch and `transformers`, those are 400 000 objects: a second, or a minute where memory is short.
    """
    threading._shutdown()  # type: ignore[attr-defined]  # waits for threads, as the interpreter does
    atexit._run_exitfuncs()
    logging.shutdown()
    for stream in (sys.stdout, sys.stderr):
        with suppress(OSError, ValueError):
            stream.flush()
    os._exit(code)
