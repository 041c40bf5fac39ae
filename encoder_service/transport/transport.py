"""The server's side of a transport: how the rows of an image leave for the caller of a Fetch."""

import asyncio
from abc import ABC, abstractmethod
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from typing import ClassVar

from encoder_contract.v1 import encoder_pb2 as pb
from encoder_service.store import Pin, Store

# Threads of their own: a copy that waits for space must not keep the event loop's threads from hashing uploads.
_copies = ThreadPoolExecutor(8, "to-host")


class Sender(ABC):
    """One transport of a server; the client's `Receiver` is its counterpart. One instance serves all calls.

    Who holds what, and until when: the Fetch call pins an image before `prepare` and releases it. With `holds`, that is
    when the call ends, which is when the caller says so, dies or falls silent; without, when the last of `frames` was
    sent. A sender itself keeps nothing of a call.

    What is checked: before any row is sent, that the caller may use the transport (`accepts`). The window lies inside
    the image when `prepare` is called. Whether the rows arrived whole and are still the image's is for the receiver to
    check, by what `prepare` put into the message.

    What is always safe: to end a call at any point, as there is nothing to undo; and to ask for any transport, as a
    caller that may not use it gets the rows inline. Everything runs on the event loop and must not block it.
    """

    transport: ClassVar[pb.Transport.ValueType]
    holds: ClassVar[bool]
    """Whether the caller reads the rows where they are pinned, so that they stay so until the call ends."""
    is_local: ClassVar[bool]
    """Whether it works only within one host."""

    @abstractmethod
    def __init__(self, store: Store) -> None:
        """Send rows of `store`."""

    @property
    def offered(self) -> bool:
        """Whether this server has what the transport needs."""
        return True

    def describe(self, description: pb.DescribeResponse) -> None:  # noqa: B027 - nothing is the default
        """Add what a caller has to know before it can use this transport."""

    def accepts(self, request: pb.FetchRequest) -> bool:  # noqa: ARG002
        """Whether the caller, who is on this host if the transport needs that, may use it."""
        return True

    async def reach(self, pin: Pin) -> None:
        """Bring the rows to a tier that this transport reads. Raises `OverloadedError` when it is full of pins."""
        if pin.tier != "host":
            await asyncio.get_running_loop().run_in_executor(_copies, pin.to_host)

    def sent_by(self, pin: Pin) -> pb.Transport.ValueType:  # noqa: ARG002
        """Return the transport by which these rows leave: this one, or a lesser one that its callers understand."""
        return self.transport

    @abstractmethod
    async def prepare(self, ready: pb.ImageReady, pin: Pin) -> None:
        """Complete the message that announces rows [row_begin, row_end) of `pin`."""

    @abstractmethod
    def frames(self, ready: pb.ImageReady, pin: Pin) -> Iterable[bytes]:
        """Return the serialised messages that follow it; none when the rows stay where they are."""
