"""Segment files: rows in shared memory, in a file that belongs to the process that created it.

The owner holds an exclusive `flock` on its file for as long as it runs. The kernel drops the lock when the owner ends,
however it ends, so a file that can be locked has no owner and may be removed. Process ids would not work between
containers that share a folder.
"""

import fcntl
import os
import secrets
import stat
from pathlib import Path

from encoder_contract.endpoint import is_local
from encoder_contract.errors import InternalError
from encoder_contract.handle import SEGMENT_ID_BYTES

MAGIC = b"ENCROWS1"
"""The bytes after the id at the beginning of every segment of a server. They tell it from other files."""


def create_owned(folder: Path, prefix: str) -> tuple[Path, int]:
    """Create a locked file that only this user can open; return its path and descriptor. Raises `OSError`."""
    while True:
        path = folder / f"{prefix}{os.getpid()}-{secrets.token_hex(6)}.rows"
        file = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            if os.fstat(file).st_nlink:
                return path, file
        except BlockingIOError:
            pass
        os.close(file)  # another process removed the file before we locked it


def remove_ownerless(folder: Path, prefix: str) -> list[Path]:
    """Remove the files in `folder` whose owners have ended, so that a crash leaks no memory; return their paths."""
    return [path for path in folder.glob(f"{prefix}*.rows") if remove_if_ownerless(path)]


def remove_if_ownerless(path: Path) -> bool:
    """Remove a file if its owner has ended; return whether that is so."""
    try:
        # The folder may hold other files: without O_NONBLOCK, opening a FIFO would block until it has a writer.
        file = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK)
    except OSError:
        return False  # it belongs to another user, or was removed
    try:
        if not stat.S_ISREG(os.fstat(file).st_mode):
            return False
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        path.unlink(missing_ok=True)
        return True
    except OSError:
        return False  # its owner is running
    finally:
        os.close(file)


def open_segment(path: str | Path, *, writes: bool = False) -> int:
    """Open a segment of this user for reading, or also for writing; return the file descriptor.

    Does not follow links and does not block. Raises `OSError` if the file cannot be opened, and `InternalError` if it
    is not a segment of this user.
    """
    # Without O_NONBLOCK, opening a FIFO blocks until another process opens it for writing.
    access = os.O_RDWR if writes else os.O_RDONLY
    file = os.open(path, access | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK)
    try:
        status = os.fstat(file)
        ours = stat.S_ISREG(status.st_mode) and status.st_uid == os.geteuid()
        if not ours or os.pread(file, len(MAGIC), SEGMENT_ID_BYTES) != MAGIC:
            raise InternalError(f"{path} is not a segment of this user")
    except BaseException:  # Ctrl-C too: otherwise the file would stay open
        os.close(file)
        raise
    return file


def segment_proof(endpoint: str, path: str) -> bytes:
    """Return the first bytes of a segment, which prove to the server at `endpoint` that we can read its segment.

    Return nothing if we cannot read the file. Servers that are not known to be on this host never get bytes of a file.
    """
    if not path or not is_local(endpoint):
        return b""
    try:
        file = open_segment(path)
    except (OSError, InternalError):
        return b""
    try:
        return os.pread(file, SEGMENT_ID_BYTES, 0)
    finally:
        os.close(file)
