"""Whether this process was forked from one that had a client: its calls would hang, for it lacks gRPC's threads."""

import os

from encoder_contract.errors import InvalidRequestError

_has_clients = False
_is_forked = False


def client_opens() -> None:
    """Note that this process has a client. Raises as `check_process` does."""
    global _has_clients
    check_process()
    _has_clients = True


def check_process() -> None:
    """Raise `InvalidRequestError` in a process that was forked from one that had a client."""
    if _is_forked:
        raise InvalidRequestError(
            "this process was forked from one that had a client: fork before the first client connects, or start "
            "processes by spawn"
        )


def is_forked() -> bool:
    """Return whether this process was forked from one that had a client."""
    return _is_forked


def _after_fork() -> None:
    global _is_forked
    _is_forked = _has_clients


os.register_at_fork(after_in_child=_after_fork)
