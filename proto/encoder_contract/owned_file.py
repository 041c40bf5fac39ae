"""Files of rows that belong to a process: it holds an exclusive `flock` on each for as long as it runs.

The kernel drops the lock when the owner ends in any way, so a file that can be locked has no owner and may be removed.
Process ids would not work between containers that share a folder.
"""

import fcntl
import os
import secrets
import stat
from pathlib import Path


def create_owned(folder: Path, prefix: str) -> tuple[Path, int]:
    """Create a file that only this user can open, and lock it; return its path and descriptor. Raises `OSError`."""
    while True:
        path = folder / f"{prefix}{os.getpid()}-{secrets.token_hex(6)}.rows"
        file = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            if os.fstat(file).st_nlink:
                return path, file
        except BlockingIOError:
            pass
        os.close(file)  # another process removed it before we had locked it


def remove_ownerless(folder: Path, prefix: str) -> list[Path]:
    """Remove the files in `folder` whose owners have ended, and return them: a crash does not leak memory."""
    return [path for path in folder.glob(f"{prefix}*.rows") if _remove_ownerless(path)]


def _remove_ownerless(path: Path) -> bool:
    try:
        # The folder may hold anything: opening a FIFO without O_NONBLOCK would block until it has a writer.
        file = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK)
    except OSError:
        return False  # belongs to another user, or was removed
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
