"""Shared memory: rows stay in the host tier's segment, and a handle says where. For processes of our user and host."""

from hmac import compare_digest

from encoder_contract.v1 import encoder_pb2 as pb
from encoder_service.store import Pin, Store
from encoder_service.transport.transport import Sender


class SharedMemorySender(Sender):
    """Sends handles. By the segment's first bytes a caller proves that it can read it, and so runs as our user."""

    transport = pb.TRANSPORT_SHM
    holds = True
    is_local = True

    def __init__(self, store: Store) -> None:
        """Send handles into the segment of `store`."""
        self._segment = store.segment

    def describe(self, description: pb.DescribeResponse) -> None:
        """Add the path of the segment."""
        description.shm_segment = str(self._segment.path)

    def accepts(self, request: pb.FetchRequest) -> bool:
        """Whether the caller could read the segment."""
        return compare_digest(request.shm_proof, self._segment.segment_id)

    async def prepare(self, ready: pb.ImageReady, pin: Pin) -> None:
        """Add the handle."""
        ready.handle.CopyFrom(pin.handle(ready.row_begin, ready.row_end).to_message())

    def frames(self, _ready: pb.ImageReady, _pin: Pin) -> tuple[bytes, ...]:
        """Return no messages."""
        return ()
