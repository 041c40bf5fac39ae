"""Files and folders that other users of the host may have prepared: none is believed that they can change.

Nothing here blocks on a pipe or a device.
"""

import errno
import os
import stat
from pathlib import Path


def read_trusted(path: str | Path) -> bytes:
    """Return the content of an operator's file. Follows links, as which Kubernetes mounts secrets.

    Raises `OSError`, also for a file that is not regular, or that every user may write.
    """
    file = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
    with os.fdopen(file, "rb") as content:
        mode = os.fstat(file).st_mode
        if stat.S_ISDIR(mode):
            raise OSError(errno.EISDIR, os.strerror(errno.EISDIR), str(path))
        if not stat.S_ISREG(mode):
            raise OSError(errno.EINVAL, "not a regular file", str(path))
        if mode & stat.S_IWOTH:
            raise OSError(errno.EPERM, "every user may write it: run `chmod o-w`", str(path))
        return content.read()


def is_own_file(status: os.stat_result) -> bool:
    """Whether this is a regular file of this user that no other user may write."""
    return stat.S_ISREG(status.st_mode) and is_own(status)


def is_own(status: os.stat_result) -> bool:
    """Whether a file or folder belongs to this user, and no other may write it."""
    return status.st_uid == os.geteuid() and not status.st_mode & (stat.S_IWGRP | stat.S_IWOTH)
