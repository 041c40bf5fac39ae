"""The shared-memory file of the host tier. The server maps it for writing, and its clients map it read-only.

Layout, in bytes. A client needs only the first field and a handle:

    0      16  random id of this segment
    16      8  b"ENCROWS1"
    4096    8n for each host page, the generation of the entry that begins there, or 0: uint64, little-endian
    then    8m the same for each page of the device tier, whose memory is not in this file
    then       n pages of rows, from a multiple of 4096

The running server owns the file. A server that starts removes files whose owners have ended. It checks the size first:
an error names the setting to change.
"""

import ctypes
import logging
import mmap
import os
import secrets
import time
from collections.abc import Iterator
from pathlib import Path

from encoder_contract.handle import GENERATION_BYTES, SEGMENT_ID_BYTES
from encoder_contract.segment_file import MAGIC, create_owned, remove_ownerless

log = logging.getLogger(__name__)

_PREFIX = "encoder-service-"
_HEADER_BYTES = 4096
_ALIGNMENT = 4096  # of the rows
_POPULATE_WRITE = 23  # MADV_POPULATE_WRITE, Linux 5.14
_PREFAULT_BYTES = 32 << 20


class Segment:
    """A file of `pages` pages, which `close` removes. If the process dies first, the next server removes it."""

    def __init__(self, folder: Path, pages: int, page_bytes: int, device_pages: int = 0) -> None:
        """Create, reserve and map the file. Raises `StoreSizeError` if the folder or the memory is too small."""
        slots = pages + device_pages
        self.data_offset = _round_up(_HEADER_BYTES + slots * GENERATION_BYTES)
        self.size_bytes = self.data_offset + pages * page_bytes
        require_room(folder, self.size_bytes)
        self.path, self._file = create_owned(folder, _PREFIX)
        try:
            self._reserve()
            self._map = mmap.mmap(self._file, self.size_bytes)
        except BaseException:  # Ctrl-C too: the file would outlive the process
            self.close()
            raise
        self.segment_id = secrets.token_bytes(SEGMENT_ID_BYTES)
        self._map[: SEGMENT_ID_BYTES + len(MAGIC)] = self.segment_id + MAGIC
        self.view = memoryview(self._map)
        generations = self.view[_HEADER_BYTES:][: slots * GENERATION_BYTES].cast("Q")
        self.generations, self.device_generations = generations[:pages], generations[pages:]

    def generation_offset(self, page: int, *, on_device: bool = False) -> int:
        """Return the file offset of the generation of the entry that begins at page `page` of a tier."""
        slot = page + len(self.generations) if on_device else page
        return _HEADER_BYTES + slot * GENERATION_BYTES

    def prefault(self) -> Iterator[int]:
        """Touch every page, so that later copies cause no page faults. Takes seconds per GiB: run it in a thread.

        Yields the bytes of each piece, which takes 0.1 s at worst.
        """
        libc = ctypes.CDLL(None, use_errno=True)
        base = ctypes.addressof(ctypes.c_char.from_buffer(self._map))
        began = reported = time.monotonic()
        for offset in range(0, self.size_bytes, _PREFAULT_BYTES):
            length = min(_PREFAULT_BYTES, self.size_bytes - offset)
            if libc.madvise(ctypes.c_void_p(base + offset), ctypes.c_size_t(length), _POPULATE_WRITE):
                log.info(
                    "store: no prefault (%s); the first writes will be slower",
                    os.strerror(ctypes.get_errno()),
                )
                return
            if time.monotonic() - reported > 10:
                reported = time.monotonic()
                log.info("store: %.1f of %.1f GiB prefaulted", offset / GIB, self.size_bytes / GIB)
            yield length
        log.info("store: %.1f GiB prefaulted in %.1f s", self.size_bytes / GIB, time.monotonic() - began)

    def close(self) -> None:
        """Unlink and unlock the file. Views and the clients' mappings stay readable."""
        self.path.unlink(missing_ok=True)
        if self._file >= 0:
            os.close(self._file)
            self._file = -1

    def _reserve(self) -> None:
        """Allocate memory for the whole file. A later write into a hole could raise SIGBUS."""
        try:
            os.posix_fallocate(self._file, 0, self.size_bytes)
        except OSError as error:
            raise StoreSizeError(
                f"cannot reserve {self.size_bytes / GIB:.2f} GiB for the host store in {self.path.parent} "
                f"({error.strerror}): lower --store-host-gib, or enlarge that folder (shm_size; emptyDir with medium "
                "Memory)"
            ) from error


def _round_up(size_bytes: int) -> int:
    return -(-size_bytes // _ALIGNMENT) * _ALIGNMENT


GIB = 1 << 30

_CGROUP = Path("/sys/fs/cgroup")


class StoreSizeError(ValueError):
    """The store cannot start at the requested size. The message names the setting to change."""


def require_room(folder: Path, size_bytes: int) -> None:
    """Raise `StoreSizeError` if `folder` or this process's memory limit has no space for `size_bytes` more.

    First remove the files of servers that died.
    """
    for path in remove_ownerless(folder, _PREFIX):
        log.warning("store: removed %s, left behind by a dead process", path)
    if not os.access(folder, os.W_OK | os.X_OK):
        raise StoreSizeError(f"--store-segment-dir {folder} does not exist or cannot be written to")
    files = os.statvfs(folder)
    free_bytes = files.f_bavail * files.f_frsize
    if size_bytes > free_bytes:
        raise StoreSizeError(_too_small(folder, size_bytes, free_bytes, files.f_blocks * files.f_frsize))
    memory_bytes = unused_memory_bytes()
    if size_bytes > memory_bytes:
        raise StoreSizeError(
            f"a host store of {_gib(size_bytes)} does not fit into the {_gib(memory_bytes)} of memory that this "
            "process may still allocate (shared memory counts against the container's memory limit): lower "
            "--store-host-gib or raise the limit"
        )


def device_error(device: str, size_bytes: int, reason: str) -> StoreSizeError:
    """Return the error for a device without the memory for its tier."""
    return StoreSizeError(
        f"a device store of {_gib(size_bytes)} does not fit on {device}: lower --store-device-gib "
        f"(0 turns it off). The device says: {reason}"
    )


def _too_small(folder: Path, size_bytes: int, free_bytes: int, total_bytes: int) -> str:
    return (
        f"a host store of {_gib(size_bytes)} does not fit into {folder}, which has {_gib(free_bytes)} free of "
        f"{_gib(total_bytes)}: lower --store-host-gib, or enlarge {folder} (Docker and Compose: shm_size; "
        "Kubernetes: an emptyDir with medium Memory mounted there)"
    )


def unused_memory_bytes() -> int:
    """Return the memory available on the machine, or what is left of the control group's limit if that is less."""
    meminfo = dict(line.split(":", 1) for line in Path("/proc/meminfo").read_text().splitlines())
    unused = int(meminfo["MemAvailable"].split()[0]) * 1024
    for limit, usage in (
        ("memory.max", "memory.stat"),  # cgroup v2, as seen from inside a container
        ("memory/memory.limit_in_bytes", "memory/memory.stat"),  # v1
    ):
        try:
            allowed = (_CGROUP / limit).read_text().strip()
            used = _unreclaimable_bytes((_CGROUP / usage).read_text())
        except OSError:
            continue
        if allowed != "max":
            unused = min(unused, int(allowed) - used)
    return max(unused, 0)


def _unreclaimable_bytes(memory_stat: str) -> int:
    """Return the anonymous and shared memory of a control group. The page cache does not count: it is reclaimable."""
    fields = dict(line.split() for line in memory_stat.splitlines())
    if "anon" in fields:
        return int(fields["anon"]) + int(fields["shmem"])
    return int(fields.get("total_rss", 0)) + int(fields.get("total_shmem", 0))


def _gib(size_bytes: int) -> str:
    return f"{size_bytes / GIB:.2f} GiB"
