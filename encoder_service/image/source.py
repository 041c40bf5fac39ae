"""A source: an image file as it was submitted, and its header, which is read once; or a video, and what it says."""

import fcntl
import mmap
import os
import weakref
from dataclasses import dataclass, field

from encoder_contract.header import Header
from encoder_contract.orientation import UPRIGHT
from encoder_contract.video import HEAD_BYTES, VideoInfo, container_of

_SEALS = fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_WRITE | fcntl.F_SEAL_SEAL


class VideoFile:
    """The file of a video, in memory of its own that decoder processes map: it is copied once, as it arrives.

    The memory is freed with the last reference. One thread writes; when that is done, any thread reads.
    """

    def __init__(self) -> None:
        """Raise `OSError` if there is no descriptor for it."""
        self.size = 0
        self.descriptor = os.memfd_create("video", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
        weakref.finalize(self, os.close, self.descriptor)

    @classmethod
    def of(cls, descriptor: int, size: int) -> "VideoFile":
        """Return the file of another process, which is read here; its descriptor is closed with it."""
        file = cls.__new__(cls)
        file.size, file.descriptor = size, descriptor
        weakref.finalize(file, os.close, descriptor)
        return file

    def add(self, piece: bytes) -> None:
        """Append a piece. Raises `OSError` if memory is short."""
        view = memoryview(piece)
        while view:
            written = os.write(self.descriptor, view)
            self.size += written
            view = view[written:]

    def seal(self) -> None:
        """Keep everyone from changing it: its digest is checked once, and the process that opens it may be hostile."""
        fcntl.fcntl(self.descriptor, fcntl.F_ADD_SEALS, _SEALS)

    def mapped(self) -> "mmap.mmap | bytes":
        """Return the file to read, mapped; nothing can map an empty one."""
        return mmap.mmap(self.descriptor, self.size, mmap.MAP_PRIVATE, mmap.PROT_READ) if self.size else b""

    @property
    def container(self) -> str | None:
        """Which container it is by its first bytes, or None."""
        return container_of(os.pread(self.descriptor, HEAD_BYTES, 0))


@dataclass(frozen=True, slots=True)
class Source:
    """A validated file: it has its digest and is within the limits. `key` is the `source_key` of its `ImageKey`.

    Of a video, `data` is empty, `header` describes a frame, and the file lives only as long as it is kept in its cache:
    images that are queued hold none.
    """

    key: bytes
    data: bytes = field(repr=False)
    header: Header
    video: VideoInfo | None = None
    file: "weakref.ref[VideoFile] | None" = field(default=None, repr=False)

    @classmethod
    def of_video(cls, key: bytes, file: VideoFile, info: VideoInfo) -> "Source":
        """Return the source of a video."""
        header = Header("VIDEO", info.width, info.height, UPRIGHT, 3)
        return cls(key, b"", header, info, weakref.ref(file))
