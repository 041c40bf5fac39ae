"""The shared-memory file of the host arena, mapped by the server and, read-only, by its clients.

Layout, in bytes; a client needs only the first field and a handle:

    0      16  random id of this segment
    16      8  b"ENCROWS1"
    4096    8n generation of the entry that begins at this page, 0 for none: uint64, little-endian, per page
    then    8m the same of the device tier's pages, which lie elsewhere
    then       n pages of rows, from a multiple of 4096

It belongs to the server while that runs; the next one that starts removes those whose owners have ended.
"""

import ctypes
import logging
import mmap
import os
import secrets
import threading
import time
from pathlib import Path

from encoder_contract.handle import GENERATION_BYTES, SEGMENT_ID_BYTES
from encoder_contract.owned_file import create_owned, remove_ownerless
from encoder_contract.segment_file import CALLERS_PREFIX, MAGIC
from encoder_service.store.capacity import GIB, StoreSizeError, check_host

log = logging.getLogger(__name__)

_PREFIX = "encoder-service-"
_HEADER_BYTES = 4096
_PAGE_TABLE_BYTES = 4096
_POPULATE_WRITE = 23  # MADV_POPULATE_WRITE, Linux 5.14
_PREFAULT_BYTES = 32 << 20  # a slice takes ~0.1 s at worst; closing waits for one


class Segment:
    """A file of `pages` pages, from construction to `close`; if the process dies before, the next server removes it."""

    def __init__(self, folder: Path, pages: int, page_bytes: int, device_pages: int = 0) -> None:
        """Create, reserve and map the file. Raises `StoreSizeError` if the folder or memory cannot hold it."""
        slots = pages + device_pages
        self.data_offset = _round_up(_HEADER_BYTES + slots * GENERATION_BYTES)
        self.size_bytes = self.data_offset + pages * page_bytes
        _sweep(folder)
        check_host(folder, self.size_bytes)
        self.path, self._file = create_owned(folder, _PREFIX)
        try:
            self._reserve()
            self._map = mmap.mmap(self._file, self.size_bytes)
        except BaseException:  # Ctrl-C too: its file would outlive the process
            self.close()
            raise
        self.segment_id = secrets.token_bytes(SEGMENT_ID_BYTES)
        self._map[: SEGMENT_ID_BYTES + len(MAGIC)] = self.segment_id + MAGIC
        self.view = memoryview(self._map)
        generations = self.view[_HEADER_BYTES:][: slots * GENERATION_BYTES].cast("Q")
        self.generations, self.device_generations = generations[:pages], generations[pages:]
        self._closed = threading.Event()

    def generation_offset(self, page: int, *, on_device: bool = False) -> int:
        """Return the file offset of the generation of the entry that begins at `page` of a tier."""
        slot = page + len(self.generations) if on_device else page
        return _HEADER_BYTES + slot * GENERATION_BYTES

    def prefault(self) -> None:
        """Touch every page, so that later copies cause no page faults: takes seconds per GiB; run it in a thread."""
        libc = ctypes.CDLL(None, use_errno=True)
        base = ctypes.addressof(ctypes.c_char.from_buffer(self._map))
        began = reported = time.monotonic()
        for offset in range(0, self.size_bytes, _PREFAULT_BYTES):
            if self._closed.is_set():
                return
            length = min(_PREFAULT_BYTES, self.size_bytes - offset)
            if libc.madvise(ctypes.c_void_p(base + offset), ctypes.c_size_t(length), _POPULATE_WRITE):
                log.info(
                    "store: no prefault (%s); first writes will be slower", os.strerror(ctypes.get_errno())
                )
                return
            if time.monotonic() - reported > 10:
                reported = time.monotonic()
                log.info("store: %.1f of %.1f GiB prefaulted", offset / GIB, self.size_bytes / GIB)
        log.info("store: %.1f GiB prefaulted in %.1f s", self.size_bytes / GIB, time.monotonic() - began)

    def close(self) -> None:
        """Unlink and unlock the file. Views and the clients' mappings stay readable."""
        if hasattr(self, "_closed"):
            self._closed.set()
        self.path.unlink(missing_ok=True)
        if self._file >= 0:
            os.close(self._file)
            self._file = -1

    def _reserve(self) -> None:
        """Allocate memory for the whole file: a hole could raise SIGBUS at a later write."""
        try:
            os.posix_fallocate(self._file, 0, self.size_bytes)
        except OSError as error:
            raise StoreSizeError(
                f"{self.path.parent} did not give the {self.size_bytes / GIB:.2f} GiB of the host store "
                f"({error.strerror}): lower --store-host-gib or enlarge it (shm_size; emptyDir with medium Memory)"
            ) from error


def _sweep(folder: Path) -> None:
    """Remove what dead servers left behind, and callers that were killed while they opened a Put call."""
    for prefix in (_PREFIX, CALLERS_PREFIX):
        for path in remove_ownerless(folder, prefix):
            log.warning("store: removed %s, which a dead process left behind", path)


def _round_up(size_bytes: int) -> int:
    return -(-size_bytes // _PAGE_TABLE_BYTES) * _PAGE_TABLE_BYTES
