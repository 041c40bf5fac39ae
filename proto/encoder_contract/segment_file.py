"""Segment file: how a client tells a server's shared memory from other files that a server might name."""

import os
import stat

from encoder_contract.endpoint import is_local
from encoder_contract.errors import InternalError
from encoder_contract.handle import SEGMENT_ID_BYTES

MAGIC = b"ENCROWS1"
"""The bytes after the id at the beginning of every segment."""
CALLERS_PREFIX = "encoder-client-"
"""Prefix of the files through which callers put rows, in the folder of the server's segment."""


def open_segment(path: str) -> int:
    """Open a segment of this user for reading; return the file descriptor.

    Follows no link and does not block. Raises `OSError` if it cannot be opened, and `InternalError` if it is not a
    segment of this user.
    """
    # Without O_NONBLOCK, opening a FIFO blocks until another process opens it for writing.
    file = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK)
    try:
        status = os.fstat(file)
        ours = stat.S_ISREG(status.st_mode) and status.st_uid == os.geteuid()
        if not ours or os.pread(file, len(MAGIC), SEGMENT_ID_BYTES) != MAGIC:
            raise InternalError(f"{path} is not a segment of this user")
    except BaseException:  # Ctrl-C too: nothing else would close the file
        os.close(file)
        raise
    return file


def segment_proof(endpoint: str, path: str) -> bytes:
    """Return the proof for the server at `endpoint` that we can read the segment that it named: its first bytes.

    Empty if we cannot read it, or the server is not known to be on this host: no other server gets bytes of files.
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
