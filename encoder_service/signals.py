"""The signals that a server gets beside SIGTERM and SIGINT: none ends it without a drain.

SIGHUP reads certificates and tenants again, SIGUSR1 switches the log to debug and back, SIGUSR2 writes the stacks of
all threads to standard error, and SIGQUIT does that and drains.
"""

import faulthandler
import signal
from collections.abc import Callable
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from asyncio import AbstractEventLoop

# They mean something to a server that serves. Before that, and to the processes of its devices, they mean nothing.
_WHILE_SERVING = (signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2)
# Sent by timers and descriptors that the server does not use.
_NEVER_MEANT = (signal.SIGALRM, signal.SIGVTALRM, signal.SIGPROF, signal.SIGIO)


def ignore_until_serving() -> None:
    """Let no signal that means nothing to a starting server end it."""
    for number in (*_WHILE_SERVING, *_NEVER_MEANT):
        signal.signal(number, signal.SIG_IGN)


def leave_to_the_server() -> None:
    """Ignore every signal in a process that the server ends itself. A terminal or a supervisor may send it to all."""
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGQUIT, *_WHILE_SERVING, *_NEVER_MEANT):
        signal.signal(number, signal.SIG_IGN)


def handle(
    loop: "AbstractEventLoop",
    *,
    drain: Callable[[], None],
    interrupt: Callable[[], None],
    reload: Callable[[], None],
    toggle_debug: Callable[[], None],
) -> None:
    """Handle the signals of a server that serves on `loop`."""
    loop.add_signal_handler(signal.SIGTERM, drain)
    loop.add_signal_handler(signal.SIGINT, interrupt)
    loop.add_signal_handler(signal.SIGQUIT, drain)
    loop.add_signal_handler(signal.SIGHUP, reload)
    loop.add_signal_handler(signal.SIGUSR1, toggle_debug)
    # Their handlers are in C, so they also work while the event loop is stuck.
    faulthandler.register(signal.SIGQUIT, all_threads=True, chain=True)
    faulthandler.register(signal.SIGUSR2, all_threads=True)
