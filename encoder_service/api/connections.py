"""Limits on the connections of each host, so that one host cannot keep new clients out.

gRPC accepts at most `max_allowed_incoming_connections`, but its Python API does not expose connections. So this module
finds them among the sockets of the process, and shuts down those that exceed a host's share.
"""

import asyncio
import logging
import os
import socket
from collections import defaultdict
from collections.abc import Sequence
from contextlib import ExitStack, suppress

from encoder_service.api.caller import host_of

log = logging.getLogger(__name__)

# Up to this part of the limit, hosts may open as many connections as they like. The rest is reserved for new clients.
UNRESTRICTED_PART = 0.75
CHECK_EVERY_S = 1.0


async def limit_connections(port: int, limit: int) -> None:
    """Keep the TCP connections to `port` below `UNRESTRICTED_PART` of `limit`, until cancelled.

    Shuts down the newest connections of the hosts that have the most. Unix sockets do not count.
    """
    room = int(limit * UNRESTRICTED_PART)
    while True:
        await asyncio.sleep(CHECK_EVERY_S)
        try:
            closed = await asyncio.to_thread(shut_down_excess, port, room)
        except OSError as error:  # no file descriptor is free to list the others
            log.warning("gRPC connections cannot be counted: %s", error)
            continue
        for host, count in closed.items():
            log.warning(
                "%s had too many of the %d gRPC connections that this server accepts: closed its newest %d",
                *(host, limit, count),
            )


def shut_down_excess(port: int, room: int) -> dict[str, int]:
    """Shut down connections to `port` until `room` are left; return how many were shut down, by host."""
    descriptors = sorted(int(name) for name in os.listdir("/proc/self/fd"))
    if len(descriptors) <= room:
        return {}
    with ExitStack() as stack:
        hosts: defaultdict[str, list[socket.socket]] = defaultdict(list)
        for descriptor in descriptors:
            connection = _socket_of(descriptor)
            if connection is not None:
                stack.enter_context(connection)
                with suppress(OSError, IndexError):  # not connected, or a Unix socket
                    if connection.getsockname()[1] == port:
                        hosts[_host(connection)].append(connection)
        most = fair_share([len(connections) for connections in hosts.values()], room)
        for connections in hosts.values():
            for connection in connections[most:]:  # high descriptors are mostly the newest
                with suppress(OSError):  # the peer has just reset it
                    connection.shutdown(socket.SHUT_RDWR)
    return {host: len(connections) - most for host, connections in hosts.items() if len(connections) > most}


def fair_share(counts: Sequence[int], room: int) -> int:
    """Return the largest limit per host with which hosts that have `counts` connections fit into `room`."""
    for nth, count in enumerate(sorted(counts)):
        sharing = len(counts) - nth
        if count * sharing > room:
            return room // sharing
        room -= count
    return max(counts, default=0)


def _socket_of(descriptor: int) -> socket.socket | None:
    """Return a duplicate of a socket; None if the descriptor is closed or not a socket.

    The duplicate stays on this connection even if gRPC closes the descriptor and another file gets its number.
    """
    try:
        duplicate = os.dup(descriptor)
    except OSError:
        return None
    try:
        return socket.socket(fileno=duplicate)
    except OSError:
        os.close(duplicate)
        return None


def _host(connection: socket.socket) -> str:
    address, port = connection.getpeername()[:2]
    return host_of(f"ipv6:[{address}]:{port}" if ":" in address else f"ipv4:{address}:{port}")
