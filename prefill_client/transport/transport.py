"""The client's side of a transport: how rows arrive from a server, and where they then lie."""

from abc import ABC, abstractmethod
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING, ClassVar, Self

import numpy as np
from numpy.typing import NDArray

from encoder_contract.errors import InternalError
from encoder_contract.handle import Handle
from encoder_contract.v1 import encoder_pb2 as pb
from prefill_client.transport.elements import tensor_view

if TYPE_CHECKING:
    import torch


class Rows(ABC):
    """Rows of one image, [rows, width]; bfloat16 as its bits, uint16."""

    shape: tuple[int, ...]
    handle: Handle | None = None
    """Names the rows to other processes of this host, if they are shared."""

    @property
    def lost(self) -> bool:
        """Whether the rows can no longer be read."""
        return False

    @abstractmethod
    def reading(self) -> AbstractContextManager[NDArray[np.generic]]:
        """Lend the rows where they are, read-only; what was read counts once the block is left.

        Raises `StaleHandleError` on entering and on leaving.
        """

    @abstractmethod
    def copy(self) -> NDArray[np.generic]:
        """Return the rows to keep, however long the Fetch lasts, on the host. Raises `StaleHandleError`."""

    def tensor(self, dtype: str) -> "torch.Tensor":
        """Return the rows to keep, as a tensor: on the GPU if they come from one. Raises `StaleHandleError`."""
        return tensor_view(self.copy(), dtype)

    @abstractmethod
    def lent(self) -> "AbstractContextManager[Rows]":
        """Lend the rows as rows that nobody can take away, as `reading` does."""

    @abstractmethod
    def own(self) -> "Rows":
        """Return the rows to keep, on the GPU if they come from one. Raises `StaleHandleError`."""


class Arrival(ABC):
    """The rows of one image on their way."""

    @property
    def complete(self) -> bool:
        """Whether nothing more is to come."""
        return True

    def add(self, data: memoryview) -> None:  # noqa: ARG002
        """Take the next bytes of the rows."""
        raise InternalError("the server sent bytes of rows that stay in its memory")

    @abstractmethod
    def rows(self) -> Rows:
        """Return the rows, once complete. Raises `InternalError` if they are damaged, `StaleHandleError` if gone."""


class Receiver(ABC):
    """One transport from one server; the server's `Sender` is its counterpart. One instance serves all calls.

    Who holds what, and until when: the server holds rows until it has sent them or, with `holds`, until the Fetch call
    ends. Such a call is kept open until the caller closes its stream; what the caller wants longer, it copies.

    What is checked: by `rows` or by reading them, that these are all the bytes of the image asked for: a checksum over
    bytes that travelled, before and after each use of bytes that are shared. No check is left to the caller.

    What is always safe: to end a call at any point, and to read rows after it: they are right, or a `StaleHandleError`.
    Nothing here blocks for longer than mapping memory takes.
    """

    transport: ClassVar[pb.Transport.ValueType]
    holds: ClassVar[bool]
    """Whether the rows stay at the server, so that the call must stay open while they are read."""
    by_default: ClassVar[bool] = True
    """Whether rows come by it to callers who do not name it."""

    @classmethod
    @abstractmethod
    def from_server(cls, endpoint: str, description: pb.DescribeResponse) -> Self | None:
        """Return what receives rows from that server, None if it does not offer this transport or we cannot use it."""

    @staticmethod
    @abstractmethod
    def announced(ready: pb.ImageReady) -> bool:
        """Whether the rows that this message announces come by this transport."""

    def ask(self, request: pb.FetchRequest) -> None:
        """Add the transport to a request, and what shows that we may use it."""
        request.transports.append(self.transport)

    @abstractmethod
    def receive(self, ready: pb.ImageReady, is_open: Callable[[], bool]) -> Arrival:
        """Return the rows that are announced. `is_open` says whether the call is known to be open."""
