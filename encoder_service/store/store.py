"""The embedding store: embeddings by address, in a host tier and optional tiers on device and disk."""

import logging
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

from encoder_contract.device_memory import CUDA_SHARED_BYTES, DeviceMemory, DeviceMemoryError, allocate
from encoder_contract.extents import View
from encoder_contract.fleet_key import FleetKey
from encoder_contract.registration import CudaRegistration
from encoder_service.store.disk import Disk
from encoder_service.store.moves import Moves
from encoder_service.store.segment import Segment, StoreSizeError, device_error
from encoder_service.store.stats import StoreStats, disk_stats, tier_stats
from encoder_service.store.tier import AnyTier, Entry, PageLayout, Tier, TierName
from encoder_service.store.tiers import Tiers

log = logging.getLogger(__name__)


PAGE_BYTES = 64 << 10
"""A page holds as many rows as fit into this size, at least one. An embedding wastes half a page on average."""


class Store(Tiers):
    """All tiers of a server: it allocates them, moves embeddings between them, and has statistics. Thread-safe."""

    def __init__(
        self,
        *,
        host_bytes: int,
        row_bytes: int,
        device_bytes: int = 0,
        device: str = "cpu",
        segment_dir: str = "/dev/shm",  # noqa: S108 - memory on every Linux; the segment is created safely
        wait_s: float = 2.0,
        on_evict: Callable[[bytes, AnyTier], None] = lambda _address, _tier: None,
        prefault: bool = False,
        disk_folder: Path | None = None,
        disk_bytes: int = 0,
        disk_key: FleetKey | None = None,
    ) -> None:
        """Allocate all memory. Raises `StoreSizeError`, which names the setting to change, if that fails; `DiskError`.

        A writer waits for up to `wait_s` while everything is pinned. The thread that drops an embedding from a tier
        calls `on_evict(address, tier)`, without the lock. By then another tier may hold the address, or the same tier
        may hold it again: ask `contains`. With `prefault`, `Moves.keep_moving` also touches the host tier's pages. With
        `disk_folder`, embeddings leave the host for files of `disk_bytes` in all, signed with `disk_key`.
        """
        layout = PageLayout(row_bytes, max(1, PAGE_BYTES // row_bytes))
        self.device_probe: DeviceMemory | None = None
        """Memory without rows, which other processes try to open; None without a device tier that they can read."""
        segment, host, on_device = self._allocate(layout, host_bytes, device_bytes, device, Path(segment_dir))
        disk: Disk | None = None
        if disk_folder is not None:
            on_drop = partial(_left_disk, on_evict)
            try:
                disk = Disk(disk_folder, disk_bytes, row_bytes, key=disk_key, on_drop=on_drop)
            except BaseException:
                segment.close()
                raise
        super().__init__(segment, host, on_device, disk, wait_s, on_evict)
        on_gpu = on_device is not None and device.startswith("cuda")
        self._registration = _registration(host, device) if on_gpu else None
        self.moves = Moves(self, prefault=prefault and not on_gpu)

    def _allocate(
        self, layout: PageLayout, host_bytes: int, device_bytes: int, device: str, folder: Path
    ) -> tuple[Segment, Tier, Tier | None]:
        """Allocate the tiers in memory; return the segment, the host tier in it, and the device tier."""
        memory = None
        if device_bytes:
            memory = _allocate(device, _whole_pages(device_bytes, layout, "device"))
        host_pages = _whole_pages(host_bytes, layout, "host") // layout.page_bytes
        segment = Segment(folder, host_pages, layout.page_bytes, device_bytes // layout.page_bytes)
        host = Tier("host", segment.view[segment.data_offset :], layout, segment.generations)
        if memory is None:
            return segment, host, None
        self.device_probe = _probe(memory, device)
        on_device = _in_place(memory, device)
        return segment, host, Tier("device", on_device, layout, segment.device_generations, memory.name)

    @property
    def device_memory(self) -> tuple[bytes, int] | None:
        """The name by which other processes open the device tier, and its size in bytes; None if they cannot."""
        if self.device is None or not self.device.shared_as:
            return None
        return self.device.shared_as, len(self.device.memory)

    def stats(self) -> StoreStats:
        """Return statistics. Takes microseconds, however many embeddings are held."""
        with self.lock:
            self.unpin_collected()
            memory = map(tier_stats, reversed(self.tiers))
            return StoreStats(
                tiers=(*memory, *([] if self.disk is None else [disk_stats(self.disk)])),
                damaged_files=0 if self.disk is None else self.disk.damaged,
                is_disk_off=self.disk is not None and self.disk.is_off,
                pins=sum(tier.pins for tier in self.tiers),
                misses=self.misses,
                waits=self.waits,
                refusals=self.refusals,
                demotions=self.moves.demotions,
                promotions=self.moves.promotions,
            )

    def close(self) -> None:
        """Remove the segment's file and stop the migrator. Views of rows stay valid. Write nothing afterwards."""
        if self.moves.closed:
            return
        self.moves.close()
        if self.disk is not None:
            self.disk.close()
        if self._registration is not None:
            self._registration.close()
        self.segment.close()

    def copy_to_host(self, entry: Entry, wait_s: float) -> Entry:
        """See `EntryStore`."""
        return self.moves.copy_to_host(entry, wait_s)


def _in_place(memory: DeviceMemory, device: str) -> View:
    if isinstance(memory.content, memoryview):
        return memory.content
    from encoder_service.store.tensors import tensor_over  # imports torch

    return tensor_over(memory, device)


def _registration(host: Tier, device: str) -> CudaRegistration[Any]:
    from encoder_service.store.registration import registration_of  # imports torch
    from encoder_service.store.tensors import as_tensor

    return registration_of(as_tensor(host.memory), device)


def _left_disk(on_evict: Callable[[bytes, AnyTier], None], address: bytes) -> None:
    on_evict(address, "disk")


def _whole_pages(size_bytes: int, layout: PageLayout, name: TierName) -> int:
    """Round a tier's size down to whole pages."""
    size_bytes -= size_bytes % layout.page_bytes
    if size_bytes <= 0:
        raise StoreSizeError(
            f"the {name} store is smaller than one page of {layout.page_bytes} bytes: raise --store-{name}-gib"
        )
    return size_bytes


def _probe(memory: DeviceMemory, device: str) -> DeviceMemory | None:
    """Return the probe of a device tier; None if other processes cannot open its memory."""
    if memory.name:
        return _allocate(device, CUDA_SHARED_BYTES)
    log.warning(
        "store: other processes cannot read the device tier, so they get its rows through the host tier: %s",
        memory.private_because,
    )
    return None


def _allocate(device: str, size_bytes: int) -> DeviceMemory:
    try:
        return allocate(device, size_bytes)
    except DeviceMemoryError as error:
        raise device_error(device, size_bytes, str(error)) from error
