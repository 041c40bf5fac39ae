"""Device memory: rows stay on the GPU, and a handle says where. For processes of our user and host that read there."""

from encoder_contract.v1 import encoder_pb2 as pb
from encoder_service.store import Pin, Store
from encoder_service.transport.shared_memory import SharedMemorySender


class DeviceSender(SharedMemorySender):
    """Sends handles, as shared memory does and to the same callers: of the device's copy where there is one.

    A handle needs no event for order: rows are seen by nobody before the device has written them (`copy_bytes` waits).
    """

    transport = pb.TRANSPORT_DEVICE

    def __init__(self, store: Store) -> None:
        """Send handles into the device tier of `store`, if it has one."""
        super().__init__(store)
        self._store = store

    @property
    def offered(self) -> bool:
        """Whether there is a device tier."""
        return self._store.has_device

    async def reach(self, pin: Pin) -> None:
        """Take the device's copy if there is one, else leave the rows on the host."""
        self._store.to_device(pin)

    def sent_by(self, pin: Pin) -> pb.Transport.ValueType:
        """Return shared memory for rows that are not on the device."""
        return self.transport if pin.tier == "device" else super().transport
