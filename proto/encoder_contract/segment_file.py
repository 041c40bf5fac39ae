"""Segment file: how a server's shared memory is told from any other file that a server may have named."""

import os
import stat

from encoder_contract.endpoint import is_local
from encoder_contract.errors import InternalError
from encoder_contract.handle import SEGMENT_ID_BYTES

MAGIC = b"ENCROWS1"
"""What follows the id at the beginning of every segment."""
CALLERS_PREFIX = "encoder-client-"
"""What the names of files begin with through which callers put rows, in the folder of the server's segment."""


def open_segment(path: str) -> int:
    """Open a segment of this user for reading; return the file descriptor.

    Follows no link and waits for nobody. Raises `OSError` when it cannot be opened, and `InternalError` when it is
    something else than a segment of this user.
    """
    # Without O_NONBLOCK, a FIFO keeps whoever opens it until someone writes.
    file = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK)
    try:
        status = os.fstat(file)
        ours = stat.S_ISREG(status.st_mode) and status.st_uid == os.geteuid()
        if not ours or os.pread(file, len(MAGIC), SEGMENT_ID_BYTES) != MAGIC:
            raise InternalError(f"{path} is not a segment of this user")
    except BaseException:  # Ctrl-C too: nobody else knows of the file
        os.close(file)
        raise
    return file


def segment_proof(endpoint: str, path: str) -> bytes:
    """Return what shows the server at `endpoint` that we can read the segment it named: the first bytes of it.

    Empty when we cannot, or when the server is not known to be on this host: nobody else is told what files hold.
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
