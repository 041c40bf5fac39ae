"""Reads one Fetch, for clients and for replicas: puts what arrives where it belongs. Does no I/O.

`framing.py` parses the messages.
"""

from collections.abc import Callable
from typing import Generic, Protocol, TypeVar

from encoder_contract.errors import InternalError
from encoder_contract.v1 import encoder_pb2 as pb


class Destination(Protocol):
    """Where the rows of one window go."""

    @property
    def complete(self) -> bool:
        """Whether the call has no more bytes for it."""

    def add(self, data: memoryview) -> None:
        """Append the next bytes of the rows. Raises `InternalError` if there are too many."""


D = TypeVar("D", bound=Destination)


class RowReader(Generic[D]):
    """Puts the rows of one Fetch together: announcements, and the bytes inside them or after them."""

    def __init__(self, destination: Callable[[pb.ImageReady], D]) -> None:
        """`destination` returns where the rows of an announced window go."""
        self._destination = destination
        self._arriving: dict[int, tuple[pb.ImageReady, D]] = {}

    def read(self, message: pb.FetchResponse | tuple[int, memoryview]) -> list[tuple[pb.ImageReady, D]]:
        """Read the next message of the call, but not its errors. Return the windows that it completes.

        Raises `InternalError` for bytes of a window that was not announced, and for one that is announced again.
        """
        if not isinstance(message, tuple):
            return [arriving for ready in message.ready for arriving in self._announced(ready)]
        index, data = message
        if index not in self._arriving:
            raise InternalError(f"rows of window {index} arrived, which was not announced")
        self._arriving[index][1].add(data)
        return self._completed(index)

    def _announced(self, ready: pb.ImageReady) -> list[tuple[pb.ImageReady, D]]:
        if ready.index in self._arriving:
            raise InternalError(f"window {ready.index} was announced again before its rows were complete")
        self._arriving[ready.index] = ready, self._destination(ready)
        if ready.rows:
            self._arriving[ready.index][1].add(memoryview(ready.rows))
            ready.ClearField("rows")
        return self._completed(ready.index)

    def _completed(self, index: int) -> list[tuple[pb.ImageReady, D]]:
        return [self._arriving.pop(index)] if self._arriving[index][1].complete else []


def check_rows(ready: pb.ImageReady, checksum: int) -> None:
    """Raise `InternalError` if the announced rows have another checksum."""
    if checksum != ready.checksum:
        raise InternalError(f"the rows of the image at address {ready.address.hex()} arrived damaged")
