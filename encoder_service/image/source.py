"""A source: a submitted image file with its header, or a video with what its container says.

Separate from `sources.py`, because every decoder process imports this module, and needs none of that module's imports.
"""

import fcntl
import mmap
import os
import weakref
from dataclasses import dataclass, field

from encoder_contract.header import Header
from encoder_contract.orientation import UPRIGHT
from encoder_contract.video import HEAD_BYTES, VideoInfo, container_of

_END_OF_JPEG = b"\xff\xd9"
# How far before the end of a file the end marker may be: some encoders append a few bytes of padding.
_JPEG_PADDING_BYTES = 64
_SEALS = fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_WRITE | fcntl.F_SEAL_SEAL


class VideoFile:
    """The file of a video, in memory that decoder processes map. It is copied once, as it arrives.

    The last reference frees the memory. One thread writes; afterwards any thread reads.
    """

    def __init__(self) -> None:
        """Raise `OSError` if descriptors are short."""
        self.size = 0
        self.descriptor = os.memfd_create("video", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
        weakref.finalize(self, os.close, self.descriptor)

    @classmethod
    def of(cls, descriptor: int, size: int) -> "VideoFile":
        """Return the file behind another process's descriptor, for reading. The object owns the descriptor."""
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
        """Make the file immutable.

        The server checks its digest only once, and an attacker may control the process that decodes it.
        """
        fcntl.fcntl(self.descriptor, fcntl.F_ADD_SEALS, _SEALS)

    def mapped(self) -> "mmap.mmap | bytes":
        """Map the file for reading. An empty file cannot be mapped and is returned as bytes."""
        return mmap.mmap(self.descriptor, self.size, mmap.MAP_PRIVATE, mmap.PROT_READ) if self.size else b""

    @property
    def container(self) -> str | None:
        """The container format by the file's first bytes, or None."""
        return container_of(os.pread(self.descriptor, HEAD_BYTES, 0))


@dataclass(frozen=True, slots=True)
class Source:
    """A validated file: its digest is right and it is within the limits. `key` is the `source_key` of its `ImageKey`.

    For a video, `data` is empty, `header` describes a frame, and `file` is a weak reference. Only the `SourceCache`
    keeps the file alive; queued images do not.
    """

    key: bytes
    data: bytes = field(repr=False)
    header: Header
    video: VideoInfo | None = None
    file: "weakref.ref[VideoFile] | None" = field(default=None, repr=False)

    @property
    def is_whole_jpeg(self) -> bool:
        """Whether DALI may decode it: a complete JPEG that is not CMYK.

        A truncated image must not get an embedding. libjpeg rejects a truncated file, but a GPU decoder may fill the
        missing part with grey. So a file without an end marker is left to Pillow.
        """
        is_complete = _END_OF_JPEG in self.data[-_JPEG_PADDING_BYTES:]
        return self.header.format == "JPEG" and self.header.channels != 4 and is_complete

    @classmethod
    def of_video(cls, key: bytes, file: VideoFile, info: VideoInfo) -> "Source":
        """Return the source of a video."""
        header = Header("VIDEO", info.width, info.height, UPRIGHT, 3)
        return cls(key, b"", header, info, weakref.ref(file))
