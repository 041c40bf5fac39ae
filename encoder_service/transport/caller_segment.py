"""A caller's own segment: the file through which a process of our user, on our host, puts rows."""

import os
import stat
from hmac import compare_digest
from pathlib import Path

from encoder_contract.v1 import encoder_pb2 as pb
from encoder_service.store import Store


class CallerSegments:
    """Opens the files that callers name. It reads from them and never maps them: they may be cut short at any time."""

    def __init__(self, store: Store) -> None:
        """Open files in the folder of the segment of `store`, for callers that can read that segment."""
        self._segment = store.segment

    def open(self, opened: pb.PutOpen) -> int | None:
        """Return the descriptor of the file, for reading; None if there is none, or it may not be opened.

        Only a regular file of our user, in our folder, and only for a caller that has proved it could open it itself.
        """
        path = Path(opened.segment)
        if not opened.segment or path.parent != self._segment.path.parent:
            return None
        if not compare_digest(opened.shm_proof, self._segment.segment_id):
            return None
        try:
            # Without O_NONBLOCK, a FIFO keeps whoever opens it until someone writes.
            file = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK)
        except OSError:
            return None
        status = os.fstat(file)
        if stat.S_ISREG(status.st_mode) and status.st_uid == os.geteuid():
            return file
        os.close(file)
        return None
