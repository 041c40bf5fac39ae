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
    with open(path, "rb", opener=lambda name, flags: os.open(name, flags | os.O_NONBLOCK)) as file:
        mode = os.fstat(file.fileno()).st_mode
        if not stat.S_ISREG(mode):
            raise OSError(errno.EINVAL, "not a regular file", str(path))
        if mode & stat.S_IWOTH:
            raise OSError(errno.EPERM, "every user may write it: run `chmod o-w`", str(path))
        return file.read()


def is_own_file(status: os.stat_result) -> bool:
    """Whether this is a regular file of this user that no other user may write."""
    return stat.S_ISREG(status.st_mode) and is_own(status)


def is_own(status: os.stat_result) -> bool:
    """Whether a file or folder belongs to this user, and no other may write it."""
    return status.st_uid == os.geteuid() and not status.st_mode & (stat.S_IWGRP | stat.S_IWOTH)
