"""The shared-memory file of the host arena, mapped by the server and, read-only, by its clients.

Layout, in bytes; a client needs only the first field and a handle:

    0      16  random id of this segment
    16      8  b"ENCROWS1"
    4096    8n generation of the entry that begins at this page, 0 for none: uint64, little-endian, per page
    then       n pages of rows, from a multiple of 4096

The owner holds an exclusive `flock` on the file while it runs. The kernel drops the lock however the owner ends, so a
file that can be locked has no owner and is removed at the next start. Process ids would not work between containers
that share a folder.
"""

import ctypes
import fcntl
import logging
import mmap
import os
import secrets
import stat
import threading
import time
from pathlib import Path

from encoder_contract.handle import GENERATION_BYTES, SEGMENT_ID_BYTES
from encoder_contract.segment_file import MAGIC
from encoder_service.store.capacity import GIB, StoreSizeError, check_host

log = logging.getLogger(__name__)

_PREFIX = "encoder-service-"
_HEADER_BYTES = 4096
_PAGE_TABLE_BYTES = 4096
_POPULATE_WRITE = 23  # MADV_POPULATE_WRITE, Linux 5.14
_PREFAULT_BYTES = 32 << 20  # a slice takes ~0.1 s at worst; closing waits for one


class Segment:
    """A file of `pages` pages that exists from construction to `close`, or until this process ends."""

    def __init__(self, folder: Path, pages: int, page_bytes: int) -> None:
        """Create, reserve and map the file. Raises `StoreSizeError` if the folder or memory cannot hold it."""
        self.data_offset = _round_up(_HEADER_BYTES + pages * GENERATION_BYTES)
        self.size_bytes = self.data_offset + pages * page_bytes
        _sweep(folder)
        check_host(folder, self.size_bytes)
        self.path, self._file = _create(folder)
        try:
            self._reserve()
            self._map = mmap.mmap(self._file, self.size_bytes)
        except BaseException:
            self.close()
            raise
        self.segment_id = secrets.token_bytes(SEGMENT_ID_BYTES)
        self._map[: SEGMENT_ID_BYTES + len(MAGIC)] = self.segment_id + MAGIC
        self.view = memoryview(self._map)
        self.generations = self.view[_HEADER_BYTES:][: pages * GENERATION_BYTES].cast("Q")
        self._closed = threading.Event()

    @staticmethod
    def generation_offset(page: int) -> int:
        """Return the file offset of the generation of the entry that begins at `page`."""
        return _HEADER_BYTES + page * GENERATION_BYTES

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


def _create(folder: Path) -> tuple[Path, int]:
    """Create a file that only this user can open, and lock it; retry if a starting server removed it first."""
    while True:
        path = folder / f"{_PREFIX}{os.getpid()}-{secrets.token_hex(6)}.rows"
        file = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            if os.fstat(file).st_nlink:
                return path, file
        except BlockingIOError:
            pass
        os.close(file)


def _sweep(folder: Path) -> None:
    """Remove the segments in `folder` whose owners have ended, so that a crash does not leak memory."""
    for path in folder.glob(f"{_PREFIX}*.rows"):
        try:
            # The folder may hold anything: opening a FIFO without O_NONBLOCK would block until it has a writer.
            file = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK)
        except OSError:
            continue  # belongs to another user, or was removed
        try:
            if stat.S_ISREG(os.fstat(file).st_mode):
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                path.unlink(missing_ok=True)
                log.warning("store: removed %s, which a dead process left behind", path)
        except OSError:
            pass  # its owner is running
        finally:
            os.close(file)


def _round_up(size_bytes: int) -> int:
    return -(-size_bytes // _PAGE_TABLE_BYTES) * _PAGE_TABLE_BYTES
