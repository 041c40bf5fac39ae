"""The disk tier: embeddings that memory has no room for, one file each, named by address, rows and grid.

A restart finds them by their names. Nothing is synced: a file that is torn, damaged or not what its name says is a
miss, and is removed and counted. A disk that is full or fails turns the tier off. `move` alone reads and writes
rows: with direct I/O between the store's pages and the file where row size and file system allow it.
"""

import errno
import fcntl
import logging
import mmap
import os
import re
import struct
import threading
from collections import OrderedDict
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TypeAlias, TypeVar

from encoder_contract.framing import checksum
from encoder_contract.geometry import Grid

log = logging.getLogger(__name__)
T = TypeVar("T")

HEADER_BYTES = 4096
"""Before the rows. A file ends with its rows."""
THREADS = 4
"""That move pieces, for all files together."""
PIECE_BYTES = 4 << 20
_HEADER = struct.Struct(
    "<8s32sIIIIQQ"
)  # magic, address, tokens, t, h, w, bytes of the rows, XXH3-64 of the rows
_MAGIC = b"ENCDISK1"
_NAME = re.compile(r"([0-9a-f]{64})-(\d{1,9})-(\d{1,6})-(\d{1,6})-(\d{1,6})")
_UNFINISHED = ".tmp"
_IN_MEMORY = ("tmpfs", "ramfs")
Transfer: TypeAlias = Callable[[int, list[memoryview], int], int]
"""`os.preadv` or `os.pwritev`: (file, buffers, offset) -> bytes moved."""


class DiskError(Exception):
    """The folder cannot be used. The message says why and what to change."""


class _DamagedError(Exception):
    """A file is not what its name says."""


@dataclass(frozen=True, slots=True)
class DiskFile:
    """The file of an embedding."""

    address: bytes
    tokens: int
    grid: Grid
    row_bytes: int

    @property
    def name(self) -> str:
        """The file's name, below the folder of its first byte."""
        return f"{self.address.hex()}-{self.tokens}-{self.grid.t}-{self.grid.h}-{self.grid.w}"

    @property
    def rows_bytes(self) -> int:
        """Bytes of all rows."""
        return self.tokens * self.row_bytes

    @property
    def size_bytes(self) -> int:
        """Bytes of the file."""
        return HEADER_BYTES + self.rows_bytes

    def header(self, checksum: int) -> bytes:
        """Return the header of a file whose rows have this checksum."""
        return _HEADER.pack(_MAGIC, self.address, self.tokens, *self.grid, self.rows_bytes, checksum)


class Disk:
    """The files of one folder, within a number of bytes; the least recently used is dropped first. Thread-safe.

    `in`, `find` and `drop` take microseconds. `read` and `write` take as long as the disk: call them on worker threads.
    """

    def __init__(
        self,
        folder: Path,
        max_bytes: int,
        row_bytes: int,
        *,
        on_drop: Callable[[bytes], None] = lambda _address: None,
    ) -> None:
        """Open the folder, and create it if it is missing. Raises `DiskError`.

        `on_drop(address)` is called, without a lock, when an embedding leaves the disk.
        """
        self.max_bytes = max_bytes
        self.used_bytes = 0
        self.hits = self.evictions = self.writes = self.damaged = 0
        self.is_off = False
        """Whether the disk has failed or is full: the tier then holds nothing until the next start."""
        self._folder = folder
        self._row_bytes = row_bytes
        self._on_drop = on_drop
        self._files: OrderedDict[bytes, DiskFile] = OrderedDict()
        self._lock = threading.Lock()
        self._movers = ThreadPoolExecutor(THREADS, "disk")
        self._lock_file = self._open_folder(folder)
        try:
            self._is_direct = self._can_be_direct()
            self._find_files()
        except OSError as error:
            os.close(self._lock_file)
            raise DiskError(f"--store-disk {folder} cannot be used: {error.strerror}") from error

    @classmethod
    def check(cls, folder: Path) -> None:
        """Raise `DiskError` if the folder cannot be used. Needs no model."""
        os.close(cls._open_folder(folder))

    def __contains__(self, address: bytes) -> bool:
        return address in self._files

    def __len__(self) -> int:
        return len(self._files)

    def find(self, address: bytes) -> DiskFile | None:
        """Return the file of an embedding, None if there is none."""
        return self._files.get(address)

    def files(self) -> list[DiskFile]:
        """Return all files."""
        with self._lock:
            return list(self._files.values())

    def write(self, address: bytes, tokens: int, grid: Grid, rows: Sequence[memoryview], xxh3: int) -> None:
        """Write an embedding, whose rows have the checksum `xxh3`. Drops others for it. Ignores one too large."""
        file = DiskFile(address, tokens, grid, self._row_bytes)
        if self.is_off or address in self._files or file.size_bytes > self.max_bytes:
            return
        self._drop_until(self.max_bytes - file.size_bytes)
        path = self._path(file)
        unfinished = path.with_name(path.name + _UNFINISHED)
        try:
            path.parent.mkdir(mode=0o700, exist_ok=True)
            self._transfer(partial(self._write, unfinished, file.header(xxh3), rows))
            unfinished.rename(path)
        except OSError as error:
            with suppress(OSError):
                unfinished.unlink(missing_ok=True)
            self._fail(error)
            return
        with self._lock:
            self._files[address] = file
            self.used_bytes += file.size_bytes
            self.writes += 1

    def read(self, file: DiskFile, rows: Sequence[memoryview]) -> int | None:
        """Read the rows of an embedding into `rows`; return their checksum, or None if the file is gone or damaged."""
        try:
            found = self._transfer(partial(self._read, file, rows))
        except FileNotFoundError:
            self.drop(file.address)
            return None
        except _DamagedError as error:
            log.warning("store: removed %s: %s", self._path(file), error)
            self.damaged += 1
            self.drop(file.address)
            return None
        except OSError as error:
            self._fail(error)
            return None
        with self._lock:
            if file.address in self._files:
                self._files.move_to_end(file.address)
            self.hits += 1
        return found

    def drop(self, address: bytes) -> bool:
        """Remove the file of an embedding; return whether there was one."""
        with self._lock:
            if (file := self._files.pop(address, None)) is None:
                return False
            self.used_bytes -= file.size_bytes
        with suppress(OSError):  # a file that stays is found again by the next start
            self._path(file).unlink(missing_ok=True)
        self._on_drop(address)
        return True

    def clear(self) -> int:
        """Remove all files; return how many there were."""
        return sum(self.drop(file.address) for file in self.files())

    def close(self) -> None:
        """Let another process use the folder. Do not call `read` and `write` afterwards."""
        self._movers.shutdown()
        os.close(self._lock_file)

    def move(
        self,
        pages: Sequence[memoryview],
        file: int,
        offset: int,
        transfer: Transfer,
    ) -> None:
        """Copy between pages and an open file from `offset` on, by `os.preadv` or `os.pwritev`, on several threads.

        Raises `OSError`, and `_DamagedError` for a file that ends too early.
        """
        moving = [
            self._movers.submit(_move_piece, piece, file, at, transfer)
            for piece, at in _pieces(pages, offset)
        ]
        errors = [
            error for each in moving if (error := each.exception()) is not None
        ]  # waits for all of them
        if errors:
            raise errors[0]

    @property
    def _direct(self) -> int:
        return os.O_DIRECT if self._is_direct else 0

    def _path(self, file: DiskFile) -> Path:
        return self._folder / file.name[:2] / file.name

    def _transfer(self, action: Callable[[], T]) -> T:
        """Run `action`, and once more with buffered I/O if the device refuses direct I/O of these pages."""
        try:
            return action()
        except OSError as error:
            if error.errno != errno.EINVAL or not self._is_direct:
                raise
            log.warning("store: %s takes no direct I/O of rows of %d bytes", self._folder, self._row_bytes)
            self._is_direct = False
            return action()

    def _read(self, file: DiskFile, rows: Sequence[memoryview]) -> int:
        """Read the rows; return their checksum. Raises `_DamagedError` and `OSError`."""
        with _opened(self._path(file), os.O_RDONLY | self._direct) as descriptor:
            if os.fstat(descriptor).st_size != file.size_bytes:
                raise _DamagedError("its length is wrong")
            header = mmap.mmap(-1, HEADER_BYTES)
            self.move([memoryview(header)], descriptor, 0, os.preadv)
            self.move(rows, descriptor, HEADER_BYTES, os.preadv)
        found = checksum(rows)
        if header[: _HEADER.size] != file.header(found):
            raise _DamagedError("header, rows and name do not belong together")
        return found

    def _write(self, path: Path, header: bytes, rows: Sequence[memoryview]) -> None:
        page = mmap.mmap(-1, HEADER_BYTES)  # aligned, as direct I/O demands
        page[: len(header)] = header
        with _opened(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | self._direct) as descriptor:
            self.move([memoryview(page)], descriptor, 0, os.pwritev)
            self.move(rows, descriptor, HEADER_BYTES, os.pwritev)

    @staticmethod
    def _open_folder(folder: Path) -> int:
        """Create and lock the folder. The lock ends with the process. Raises `DiskError`."""
        try:
            folder.mkdir(mode=0o700, parents=True, exist_ok=True)
            if (kind := _file_system(folder)) in _IN_MEMORY:
                raise DiskError(
                    f"--store-disk {folder} is on {kind}, which is memory: name a folder on a disk, or raise "
                    "--store-host-gib"
                )
            lock = os.open(folder / "lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        except OSError as error:
            raise DiskError(f"--store-disk {folder} cannot be used: {error.strerror}") from error
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            os.close(lock)
            raise DiskError(
                f"--store-disk {folder} is in use by another server: name a folder for each server"
            ) from error
        return lock

    def _can_be_direct(self) -> bool:
        """Whether rows of this size can be written and read without the page cache. Raises `OSError`."""
        probe = self._folder / f"probe{_UNFINISHED}"
        unit = next((unit for unit in (HEADER_BYTES, 512) if self._row_bytes % unit == 0), 0)
        pages = mmap.mmap(-1, HEADER_BYTES)
        try:
            for flag in (os.O_DIRECT, 0) if unit else (0,):
                try:
                    with _opened(probe, os.O_RDWR | os.O_CREAT | os.O_TRUNC | flag) as descriptor:
                        os.pwritev(descriptor, [pages], 0)
                        os.pwritev(descriptor, [memoryview(pages)[: unit or 1]], HEADER_BYTES)
                        os.preadv(descriptor, [memoryview(pages)[: unit or 1]], HEADER_BYTES)
                    return bool(flag)
                except OSError as error:
                    if not flag or error.errno != errno.EINVAL:
                        raise
            return False
        finally:
            probe.unlink(missing_ok=True)

    def _find_files(self) -> None:
        """Enter the files that are there, the least recently written first. Removes torn ones, leaves foreign ones."""
        found: list[tuple[int, DiskFile]] = []
        foreign = 0
        for folder in sorted(
            path for path in self._folder.iterdir() if re.fullmatch(r"[0-9a-f]{2}", path.name)
        ):
            with os.scandir(folder) as entries:
                for entry in entries:
                    named = _NAME.fullmatch(entry.name.removesuffix(_UNFINISHED))
                    if named is None:
                        foreign += 1
                        continue
                    address, tokens, *grid = named.groups()
                    file = DiskFile(
                        bytes.fromhex(address), int(tokens), Grid(*map(int, grid)), self._row_bytes
                    )
                    status = entry.stat(follow_symlinks=False)
                    if entry.name != file.name or status.st_size != file.size_bytes or not file.tokens:
                        self.damaged += 1
                        os.unlink(entry.path)
                        continue
                    found.append((status.st_mtime_ns, file))
        found.sort(key=lambda each: each[0])
        self._files.update((file.address, file) for _, file in found)
        self.used_bytes = sum(file.size_bytes for file in self._files.values())
        self._drop_until(self.max_bytes)
        log.info(
            "store: %d embeddings on the disk, %.1f GiB in %s (%s I/O)",
            len(self._files),
            self.used_bytes / (1 << 30),
            self._folder,
            "direct" if self._is_direct else "buffered",
        )
        if self.damaged or foreign:
            log.warning(
                "store: in %s, %d torn files were removed, and %d files are not the store's",
                self._folder,
                self.damaged,
                foreign,
            )

    def _drop_until(self, bytes_left: int) -> None:
        while self.used_bytes > bytes_left and (oldest := next(iter(self._files), None)) is not None:
            if self.drop(oldest):
                self.evictions += 1

    def _fail(self, error: OSError) -> None:
        """Turn the tier off. Its files stay for the next start."""
        with self._lock:
            if self.is_off:
                return
            self.is_off = True
            dropped, self.used_bytes = list(self._files), 0
            self._files.clear()
        log.warning(
            "store: the disk tier is off until the next start, %s: %s", self._folder, error.strerror or error
        )
        for address in dropped:
            self._on_drop(address)


def _pieces(pages: Sequence[memoryview], offset: int) -> Iterator[tuple[memoryview, int]]:
    """Yield pieces of the pages, and where in the file each lies."""
    for page in pages:
        for begin in range(0, len(page), PIECE_BYTES):
            piece = page[begin : begin + PIECE_BYTES]
            yield piece, offset
            offset += len(piece)


def _move_piece(piece: memoryview, file: int, offset: int, transfer: Transfer) -> None:
    while piece:
        count = transfer(file, [piece], offset)
        if not count:
            raise _DamagedError("it ends too early")
        piece, offset = piece[count:], offset + count


@contextmanager
def _opened(path: Path, flags: int) -> Iterator[int]:
    descriptor = os.open(path, flags | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
    try:
        yield descriptor
    finally:
        os.close(descriptor)


def _file_system(folder: Path) -> str:
    """Return the type of a folder's file system, "" if it is unknown."""
    device = os.stat(folder).st_dev
    number = f"{os.major(device)}:{os.minor(device)}"
    for line in Path("/proc/self/mountinfo").read_text().splitlines():
        fields, _, kind = line.partition(" - ")
        if fields.split()[2] == number:
            return kind.split()[0]
    return ""
