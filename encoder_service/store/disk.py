"""The disk tier: embeddings that memory has no room for, one file each, named by address, rows, grid and holder.

A restart finds them by their names. Nothing is synced: a file that is torn, damaged or not what its name says is a
miss, and is removed and counted. A disk that is full or fails turns the tier off; a single file does not. `move` alone
reads and writes rows: with direct I/O between the store's pages and the file where row size and file system allow it.

Only this user may write the folder, and it stays open, so no name leads out of it. Only regular files of this user are
opened, without following links. With a key, rows are signed as those of a replica are.
"""

import errno
import fcntl
import logging
import mmap
import os
import re
import secrets
import stat
import struct
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from functools import partial
from pathlib import Path
from typing import TypeAlias, TypeVar

from blake3 import blake3

from encoder_contract.extents import cut, move_all
from encoder_contract.fleet_key import SIGNATURE_BYTES, FleetKey
from encoder_contract.framing import checksum
from encoder_contract.geometry import Grid
from encoder_contract.trusted import is_own, is_own_file
from encoder_service.store.eviction import EvictionOrder, Item

log = logging.getLogger(__name__)
T = TypeVar("T")

HEADER_BYTES = 4096
"""Before the rows. A file ends with its rows."""
THREADS = 4
"""That move pieces, for all files together."""
PIECE_BYTES = 4 << 20
_HEADER = struct.Struct(
    f"<8s32sIIIIQQ{SIGNATURE_BYTES}s"
)  # magic, address, tokens, t, h, w, bytes of the rows, XXH3-64 of the rows, signature of the rows or zeros
_MAGIC = b"ENCDISK2"
_NAME = re.compile(
    r"([0-9a-f]{64})-([1-9]\d{0,8})-(\d{1,6})-(\d{1,6})-(\d{1,6})-(\d{1,9})-([0-9a-f]{16})"
)  # address, tokens, t, h, w, bytes of a row, holder
_UNFINISHED = re.compile(r"[0-9a-f]{16}\.tmp")
_IN_MEMORY = ("tmpfs", "ramfs")
_ODD_FILE = (errno.ELOOP, errno.ENXIO, errno.ENODEV, errno.EACCES, errno.EPERM)
"""Errors of opening a link, a socket, a device or another's file: of one file, not of the disk."""
Transfer: TypeAlias = Callable[[int, list[memoryview], int], int]
"""`os.preadv` or `os.pwritev`: (file, buffers, offset) -> bytes moved."""


class DiskError(Exception):
    """The folder cannot be used. The message says why and what to change."""


class _DamagedError(Exception):
    """A file is not what its name says."""


class DiskFile(Item):
    """The file of an embedding."""

    __slots__ = ("address", "grid", "row_bytes", "tag", "tokens")

    def __init__(self, address: bytes, tokens: int, grid: Grid, row_bytes: int, tag: str = "") -> None:
        """`tag` stands for the holder: see `holder_tag`."""
        self.address = address
        self.tokens = tokens
        self.grid = grid
        self.row_bytes = row_bytes
        self.tag = tag or holder_tag("")
        super().__init__(address, self.size_bytes)

    @property
    def name(self) -> str:
        """The file's name."""
        t, h, w = self.grid
        return f"{self.address.hex()}-{self.tokens}-{t}-{h}-{w}-{self.row_bytes}-{self.tag}"

    @property
    def rows_bytes(self) -> int:
        """Bytes of all rows."""
        return self.tokens * self.row_bytes

    @property
    def size_bytes(self) -> int:
        """Bytes of the file."""
        return HEADER_BYTES + self.rows_bytes

    def header(self, checksum: int, signature: bytes = b"") -> bytes:
        """Return the header of a file whose rows have this checksum and signature."""
        size = self.rows_bytes
        return _HEADER.pack(_MAGIC, self.address, self.tokens, *self.grid, size, checksum, signature)


def holder_tag(holder: str) -> str:
    """Return what stands for a holder in names of files."""
    return blake3(holder.encode()).hexdigest(length=8)


class Disk:
    """The files of one folder, within a number of bytes. `EvictionOrder` says which is dropped first. Thread-safe.

    Files with rows of another size, of another model or element type, count too, and are never read.

    `in`, `find` and `drop` take microseconds. `read` and `write` take as long as the disk: call them on worker threads.
    """

    def __init__(
        self,
        folder: Path,
        max_bytes: int,
        row_bytes: int,
        *,
        key: FleetKey | None = None,
        on_drop: Callable[[bytes], None] = lambda _address: None,
    ) -> None:
        """Open the folder, and create it if it is missing. Raises `DiskError`.

        With a key, rows without its signature are misses. `on_drop(address)` is called, without a lock, when an
        embedding leaves the disk.
        """
        self.max_bytes = max_bytes
        self.used_bytes = 0
        self.hits = self.evictions = self.writes = self.damaged = 0
        self.is_off = False
        """Whether the disk has failed or is full: the tier then holds nothing until the next start."""
        self._folder = folder
        self._row_bytes = row_bytes
        self._key = key
        self._on_drop = on_drop
        self._files: dict[bytes, DiskFile] = {}
        self._order: EvictionOrder[DiskFile] = EvictionOrder(max_bytes)
        self._lock = threading.Lock()
        self._movers = ThreadPoolExecutor(THREADS, "disk")
        self._root = self._open_folder(folder)
        try:
            self._is_direct = self._can_be_direct()
            self._find_files()
        except OSError as error:
            os.close(self._root)
            raise DiskError(f"--store-disk {folder} cannot be used: {error.strerror}") from error

    @classmethod
    def check(cls, folder: Path) -> None:
        """Raise `DiskError` if the folder cannot be used. Needs no model."""
        os.close(cls._open_folder(folder))

    def __contains__(self, address: bytes) -> bool:
        return self.find(address) is not None

    def __len__(self) -> int:
        return len(self._files)

    def find(self, address: bytes) -> DiskFile | None:
        """Return the file of an embedding, None if there is none."""
        file = self._files.get(address)
        return file if file is not None and file.row_bytes == self._row_bytes else None

    def files(self) -> list[DiskFile]:
        """Return the files that `find` finds."""
        with self._lock:
            return [file for file in self._files.values() if file.row_bytes == self._row_bytes]

    def write(
        self,
        address: bytes,
        tokens: int,
        grid: Grid,
        rows: Sequence[memoryview],
        xxh3: int,
        holder: str = "",
    ) -> None:
        """Write an embedding of `holder`, whose rows have the checksum `xxh3`. Drops others for it.

        Ignores one that is too large.
        """
        file = DiskFile(address, tokens, grid, self._row_bytes, holder_tag(holder))
        if not self._reserve(file):
            return
        signature = b"" if self._key is None else self._key.sign_rows(address, grid, rows)
        unfinished = f"{secrets.token_hex(8)}.tmp"
        try:
            self._transfer(partial(self._write, unfinished, file.header(xxh3, signature), rows))
            os.rename(unfinished, file.name, src_dir_fd=self._root, dst_dir_fd=self._root)
        except OSError as error:
            self._unlink(unfinished)
            with self._lock:
                self._release(file)
            if error.errno != errno.EISDIR:  # a folder has the file's name
                self._fail(error)
            return
        with self._lock:
            if self.is_off or address in self._files:  # meanwhile, by another thread
                self._release(file)
                return
            self._files[address] = file
            self._order.use(file, time.monotonic())
            self._order.add(file)
            self.writes += 1

    def read(self, file: DiskFile, rows: Sequence[memoryview]) -> int | None:
        """Read the rows of an embedding into `rows`; return their checksum, or None if the file is gone or damaged."""
        try:
            found = self._transfer(partial(self._read, file, rows))
        except FileNotFoundError:
            self.drop(file.address)
            return None
        except _DamagedError as error:
            log.warning("store: removed %s from %s: %s", file.name, self._folder, error)
            self.damaged += 1
            self.drop(file.address)
            return None
        except OSError as error:
            self._fail(error)
            return None
        with self._lock:
            if self._files.get(file.address) is file:
                self._order.remove(file)
                self._order.use(file, time.monotonic())
                self._order.add(file)
            self.hits += 1
        return found

    def drop(self, address: bytes) -> bool:
        """Remove the file of an embedding; return whether there was one."""
        with self._lock:
            if (file := self._files.get(address)) is None:
                return False
            self._remove(file)
        self._left(file)
        return True

    def clear(self) -> int:
        """Remove all files; return how many there were."""
        with self._lock:
            addresses = list(self._files)
        return sum(map(self.drop, addresses))

    def close(self) -> None:
        """Let another process use the folder. Do not call `read` and `write` afterwards."""
        self._movers.shutdown()
        os.close(self._root)

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
        moving = []
        for piece in cut(pages, lambda _: PIECE_BYTES):
            moving.append(self._movers.submit(_move_piece, piece, file, offset, transfer))
            offset += len(piece)
        errors = [
            error for each in moving if (error := each.exception()) is not None
        ]  # waits for all of them
        if errors:
            raise errors[0]

    @property
    def _direct(self) -> int:
        return os.O_DIRECT if self._is_direct else 0

    def _reserve(self, file: DiskFile) -> bool:
        """Count a new file, and drop others for it. Return whether it may be written."""
        dropped: list[DiskFile] = []
        with self._lock:
            if self.is_off or file.address in self._files or file.size_bytes > self.max_bytes:
                return False
            self._make_room(file, dropped)
            has_room = self.used_bytes + file.size_bytes <= self.max_bytes
            if has_room:
                self._order.admit(file, file.tag)
                self.used_bytes += file.size_bytes
        for each in dropped:
            self._left(each)
        return has_room

    def _make_room(self, new: DiskFile | None, dropped: list[DiskFile]) -> None:
        """Remove files until there is room for `new`, and append them to `dropped`. Call with the lock held."""
        tag, size, key = (None, 0, None) if new is None else (new.tag, new.size_bytes, new.key)
        while self.used_bytes + size > self.max_bytes:
            victim = self._order.victim(time.monotonic(), tag, size, key=key)
            if victim is None:  # all others are being written
                return
            self._order.dropped(victim)
            self._remove(victim)
            self.evictions += 1
            dropped.append(victim)

    def _remove(self, file: DiskFile) -> None:
        del self._files[file.address]
        self._order.remove(file)
        self._release(file)

    def _release(self, file: DiskFile) -> None:
        self._order.release(file)
        self.used_bytes -= file.size_bytes

    def _left(self, file: DiskFile) -> None:
        """Delete a removed file. Call it without the lock."""
        self._unlink(file.name)
        self._on_drop(file.address)

    def _unlink(self, name: str) -> None:
        with suppress(OSError):  # a file that stays is found again by the next start
            os.unlink(name, dir_fd=self._root)

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
        with self._opened(file.name, os.O_RDONLY | self._direct) as descriptor:
            status = os.fstat(descriptor)
            if not is_own_file(status):
                raise _DamagedError("it is not a regular file that only this user may write")
            if status.st_size != file.size_bytes:
                raise _DamagedError("its length is wrong")
            header = mmap.mmap(-1, HEADER_BYTES)
            self.move([memoryview(header)], descriptor, 0, os.preadv)
            self.move(rows, descriptor, HEADER_BYTES, os.preadv)
        found, signature = checksum(rows), header[_HEADER.size - SIGNATURE_BYTES : _HEADER.size]
        if header[: _HEADER.size] != file.header(found, signature):
            raise _DamagedError("header, rows and name do not belong together")
        if self._key is not None and not self._key.verify_rows(signature, file.address, file.grid, rows):
            raise _DamagedError("the fleet's key did not sign its rows")
        return found

    def _write(self, name: str, header: bytes, rows: Sequence[memoryview]) -> None:
        page = mmap.mmap(-1, HEADER_BYTES)  # aligned, as direct I/O demands
        page[: len(header)] = header
        self._unlink(name)  # of a first attempt with direct I/O
        with self._opened(name, os.O_WRONLY | os.O_CREAT | os.O_EXCL | self._direct) as descriptor:
            self.move([memoryview(page)], descriptor, 0, os.pwritev)
            self.move(rows, descriptor, HEADER_BYTES, os.pwritev)

    @contextmanager
    def _opened(self, name: str, flags: int) -> Iterator[int]:
        """Open a file of the folder. Raises `_DamagedError` for a name that is none, without blocking on it."""
        flags |= os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK
        try:
            descriptor = os.open(name, flags, 0o600, dir_fd=self._root)
        except OSError as error:
            if flags & os.O_CREAT or error.errno not in _ODD_FILE:
                raise
            raise _DamagedError(error.strerror) from error
        try:
            yield descriptor
        finally:
            os.close(descriptor)

    @staticmethod
    def _open_folder(folder: Path) -> int:
        """Create, open, check and lock the folder. The lock ends with the process. Raises `DiskError`."""
        where = f"--store-disk {folder}"
        try:
            folder.mkdir(mode=0o700, parents=True, exist_ok=True)
            root = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        except OSError as error:
            raise DiskError(f"{where} cannot be used: {error.strerror}") from error
        try:
            status = os.fstat(root)
            if (kind := _file_system(status.st_dev)) in _IN_MEMORY:
                raise DiskError(
                    f"{where} is on {kind}, which is memory: name a folder on a disk, or raise --store-host-gib"
                )
            if not is_own(status):
                mode = f"{stat.S_IMODE(status.st_mode):o}"
                raise DiskError(
                    f"{where} belongs to user {status.st_uid} and has mode {mode}: others than the server's user, "
                    f"{os.geteuid()}, could put wrong rows there. Run `chown` and `chmod go-w`, or name a new folder "
                    "in it, which the server creates"
                )
            fcntl.flock(root, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            os.close(root)
            raise DiskError(f"{where} is in use by another server: name a folder for each server") from error
        except OSError as error:
            os.close(root)
            raise DiskError(f"{where} cannot be used: {error.strerror}") from error
        except DiskError:
            os.close(root)
            raise
        return root

    def _can_be_direct(self) -> bool:
        """Whether rows of this size can be written and read without the page cache. Raises `OSError`."""
        probe = f"{secrets.token_hex(8)}.tmp"
        unit = next((unit for unit in (HEADER_BYTES, 512) if self._row_bytes % unit == 0), 0)
        pages = mmap.mmap(-1, HEADER_BYTES)
        for flag in (os.O_DIRECT, 0) if unit else (0,):
            try:
                with self._opened(probe, os.O_RDWR | os.O_CREAT | os.O_EXCL | flag) as descriptor:
                    os.pwritev(descriptor, [pages], 0)
                    os.pwritev(descriptor, [memoryview(pages)[: unit or 1]], HEADER_BYTES)
                    os.preadv(descriptor, [memoryview(pages)[: unit or 1]], HEADER_BYTES)
                return bool(flag)
            except OSError as error:
                if not flag or error.errno != errno.EINVAL:
                    raise
            finally:
                self._unlink(probe)
        return False

    def _find_files(self) -> None:
        """Enter the files that are there, the least recently written first. Removes torn ones, leaves foreign ones.

        A kill may leave two files of one embedding, of two holders: the last one counts.
        """
        found: list[tuple[int, DiskFile]] = []
        torn: list[str] = []
        foreign = 0
        with os.scandir(self._root) as entries:
            for entry in entries:
                status = entry.stat(follow_symlinks=False)
                named = _NAME.fullmatch(entry.name)
                if not is_own_file(status) or not (named or _UNFINISHED.fullmatch(entry.name)):
                    foreign += 1
                elif named is None or (file := _named(named)).size_bytes != status.st_size:
                    torn.append(entry.name)
                else:
                    found.append((status.st_mtime_ns, file))
        found.sort(key=lambda each: each[0])
        self._files = {file.address: file for _, file in found}
        torn += [file.name for _, file in found if self._files[file.address] is not file]
        for name in torn:
            self._unlink(name)
        self.damaged += len(torn)
        now = time.monotonic()
        for file in self._files.values():
            self._order.admit(file, file.tag)
            self._order.use(
                file, now
            )  # a holder's share holds from the start, as if its files had just been used
            self._order.add(file)
            self.used_bytes += file.size_bytes
        dropped: list[DiskFile] = []
        self._make_room(None, dropped)
        for file in dropped:
            self._left(file)
        log.info(
            "store: %d embeddings on the disk, %.1f GiB in %s (%s I/O)",
            len(self._files),
            self.used_bytes / (1 << 30),
            self._folder,
            "direct" if self._is_direct else "buffered",
        )
        if torn or foreign:
            log.warning(
                "store: in %s, %d torn files were removed, and %d files are not the store's",
                self._folder,
                len(torn),
                foreign,
            )

    def _fail(self, error: OSError) -> None:
        """Turn the tier off. Its files stay for the next start."""
        with self._lock:
            if self.is_off:
                return
            self.is_off = True
            dropped = list(self._files.values())
            for file in dropped:
                self._remove(file)
        log.warning(
            "store: the disk tier is off until the next start, %s: %s", self._folder, error.strerror or error
        )
        for file in dropped:
            self._on_drop(file.address)


def _move_piece(piece: memoryview, file: int, offset: int, transfer: Transfer) -> None:
    if move_all(piece, lambda rest, moved: transfer(file, [rest], offset + moved)) < len(piece):
        raise _DamagedError("it ends too early")


def _named(name: re.Match[str]) -> DiskFile:
    """Return the file with a name."""
    address, tokens, t, h, w, row_bytes, tag = name.groups()
    return DiskFile(bytes.fromhex(address), int(tokens), Grid(int(t), int(h), int(w)), int(row_bytes), tag)


def _file_system(device: int) -> str:
    """Return the type of the file system with a device number, "" if it is unknown."""
    number = f"{os.major(device)}:{os.minor(device)}"
    for line in Path("/proc/self/mountinfo").read_text().splitlines():
        fields, _, kind = line.partition(" - ")
        if fields.split()[2] == number:
            return kind.split()[0]
    return ""
