"""Whether an address can be listened on, checked before anything slow; apart from the listener, which imports gRPC."""

import errno
import os
import socket
from pathlib import Path

from encoder_contract.endpoint import Endpoint
from encoder_service.config import ConfigError, flag

# Errors of addresses of `localhost` that this machine may lack; gRPC skips those as well.
ABSENT = (errno.EADDRNOTAVAIL, errno.EAFNOSUPPORT)


def require_free(name: str, address: str) -> None:
    """Raise `ConfigError` if the setting `name` is an address that cannot be listened on.

    The address is released again; if another process takes it before we listen, listening fails.
    """
    endpoint = Endpoint.parse(address)
    try:
        if endpoint.path:
            _bind_path(Path(endpoint.path))
        else:
            _bind(endpoint)
    except OSError as error:
        why = "the address is taken" if error.errno == errno.EADDRINUSE else error.strerror
        raise ConfigError(f"{flag(name)} {address}: {why}") from error


def _bind(endpoint: Endpoint) -> None:
    absent: OSError | None = None
    bound = False
    for family, kind, protocol, _, where in socket.getaddrinfo(
        endpoint.host, endpoint.port, type=socket.SOCK_STREAM
    ):
        try:
            with socket.socket(family, kind, protocol) as probe:
                # As gRPC does: closed connections of an earlier server do not count.
                probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
                probe.bind(where)
                bound = True
        except OSError as error:
            if error.errno not in ABSENT:
                raise
            absent = error
    if absent is not None and not bound:
        raise absent


def _bind_path(path: Path) -> None:
    """Check what gRPC does not: it replaces any file at the path, even the socket of a running server."""
    if path.is_socket():
        with socket.socket(socket.AF_UNIX) as probe:
            if probe.connect_ex(str(path)) == 0:
                raise OSError(errno.EADDRINUSE, os.strerror(errno.EADDRINUSE))
    elif path.exists():
        raise OSError(errno.EEXIST, os.strerror(errno.EEXIST))
    if not path.parent.is_dir():
        raise OSError(errno.ENOENT, os.strerror(errno.ENOENT))
    if not os.access(path.parent, os.W_OK | os.X_OK):
        raise OSError(errno.EACCES, os.strerror(errno.EACCES))
