"""Submitted files, images and videos: the checks on their bytes and grid, and their cache.

The cache keeps files for a while, so that an evicted embedding can be computed again without the client.
"""

import math
import threading
from collections import OrderedDict
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import partial
from time import monotonic
from typing import TypeVar

from encoder_contract.digest import content_digest
from encoder_contract.errors import (
    DigestMismatchError,
    EncoderError,
    ImageLimitError,
    InvalidImageError,
    InvalidRequestError,
)
from encoder_contract.geometry import Grid, GridRule
from encoder_contract.header import (
    FORMATS,
    RARE_FORMATS,
    Header,
    check_limits,
    format_of,
    read_header,
    unknown,
)
from encoder_contract.turns import ThreadTurns
from encoder_contract.video import CONTAINERS, VideoInfo
from encoder_service.image.source import Source, VideoFile
from encoder_service.keys import ImageKey
from encoder_service.store.eviction import EvictionOrder, Item

# To hash files of up to this size together and to read their headers costs less than to hand them to a thread. A
# compressed text chunk alone costs more, but still less than a millisecond. Larger files go to a thread.
ON_LOOP_BYTES = 4 << 10
# See `FileDecoder.read_header` and `FileDecoder.open_video`.
ReadHeader = Callable[[bytes, Sequence[str]], Header | EncoderError]
OpenVideo = Callable[[bytes, VideoFile], VideoInfo | EncoderError]
# Hashing releases the GIL and reading a header does not, so more than two threads would wait for each other. The pool
# is separate, so that no other blocking work delays validation.
THREADS = 2
SOURCE_TTL_S = 600.0  # seconds to keep a submitted file after its last use


T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class VideoLimits:
    """Limits of a video: its number of frames, and its seconds at its frame rate. The upload checks the file's size."""

    frames: int
    seconds: float

    def check(self, video: VideoInfo) -> None:
        """Raise `ImageLimitError` if a video exceeds a limit, which the error names."""
        if video.frames > self.frames:
            raise ImageLimitError(f"{video.frames} frames exceed max_video_frames {self.frames}")
        if video.seconds > self.seconds:
            raise ImageLimitError(f"{video.seconds:.1f} s exceed max_video_seconds {self.seconds:g}")


VIDEO_LIMITS = VideoLimits(frames=216_000, seconds=3600.0)


class Validator:
    """Checks files against their digest and the limits, without decoding pixels. Use from one event loop."""

    def __init__(
        self,
        geometry: GridRule,
        *,
        max_image_bytes: int,
        max_image_pixels: int,
        formats: Sequence[str] = (*FORMATS, *RARE_FORMATS),
        read_rare_header: ReadHeader,
        open_video: OpenVideo,
        video_limits: VideoLimits,
        on_hash: Callable[[float], None] = lambda _seconds: None,
    ) -> None:
        """`read_rare_header` and `open_video` may block for long. `on_hash` gets the seconds of each hash."""
        self.geometry = geometry
        self._max_image_bytes = max_image_bytes
        self._max_image_pixels = max_image_pixels
        self._formats = formats
        self._rare_formats = [name for name in formats if name in RARE_FORMATS]
        self._read_rare_header = read_rare_header
        self._on_hash = on_hash
        self._threads = ThreadTurns(THREADS, "validation")
        # Decoder processes read these headers one at a time. They have a separate thread, so they delay no other file.
        self._rare_headers = ThreadTurns(1, "rare-headers")
        self._open_video = open_video
        self._video_limits = video_limits
        self._videos = ThreadTurns(1, "videos")

    async def validate(
        self, files: Sequence[tuple[ImageKey, bytes]], caller: str
    ) -> list[Source | Exception]:
        """Return each file as a source if it has the digest of its key and is within the limits. Callers take turns.

        Return `DigestMismatchError`, `InvalidImageError` or `ImageLimitError` for a file that fails, `OverloadedError`
        if the header of a rare format cannot be read now, and unexpected errors.
        """
        check = partial(self._check_all, files)
        if sum(len(data) for _, data in files) <= ON_LOOP_BYTES:
            headers = check()
        else:
            headers = await self._threads.run(caller, check)
        return [
            header if isinstance(header, Exception) else await self._source(key, data, header, caller)
            for (key, data), header in zip(files, headers, strict=True)
        ]

    async def _source(
        self, key: ImageKey, data: bytes, header: Header | None, caller: str
    ) -> Source | Exception:
        try:
            if header is None:
                header = await self._rare_headers.run(caller, partial(self._rare_header, data))
            check_limits(
                header,
                len(data),
                max_image_bytes=self._max_image_bytes,
                max_image_pixels=self._max_image_pixels,
            )
            if not self.geometry.at_once(*header.upright):
                await self._threads.run(caller, partial(self.geometry.grid, *header.upright))
        except Exception as error:  # noqa: BLE001 - only this file fails
            return error
        return Source(key.source_key, data, header)

    async def validate_video(self, key: ImageKey, file: VideoFile, caller: str) -> Source:
        """Return the source of a video if it has the digest of `key` and is within the limits.

        Raises as `validate` does.
        """
        info = await self._videos.run(caller, partial(self._check_video, key, file))
        self._video_limits.check(info)
        source = Source.of_video(key.source_key, file, info)
        check_limits(
            source.header, file.size, max_image_bytes=file.size, max_image_pixels=self._max_image_pixels
        )
        return source

    def _check_video(self, key: ImageKey, file: VideoFile) -> VideoInfo:
        """Check the digest and return what the container says."""
        began = monotonic()
        file.seal()
        digest = content_digest(file.mapped())
        self._on_hash(monotonic() - began)
        _check_digest(key, digest)
        if file.container is None:
            raise InvalidImageError(f"no video in a supported container: {CONTAINERS}")
        info = self._open_video(key.source_key, file)
        if isinstance(info, EncoderError):
            raise info
        return info

    def _check_all(self, files: Sequence[tuple[ImageKey, bytes]]) -> list[Header | Exception | None]:
        return [self._checked(key, data) for key, data in files]

    def _checked(self, key: ImageKey, data: bytes) -> Header | Exception | None:
        try:
            return self._check(key, data)
        except Exception as error:  # noqa: BLE001 - only this file fails
            return error

    def _check(self, key: ImageKey, data: bytes) -> Header | None:
        """Check the digest and return the header; None if the file may be in a rare format."""
        began = monotonic()
        digest = content_digest(data)
        self._on_hash(monotonic() - began)
        _check_digest(key, digest)
        if format_of(data) is not None:
            return read_header(data, self._formats)
        if not self._rare_formats:
            raise unknown(data, self._formats)
        return None

    def _rare_header(self, data: bytes) -> Header:
        header = self._read_rare_header(data, self._rare_formats)
        if isinstance(header, EncoderError):
            raise header
        return header

    def check_name(self, key: ImageKey, claimed: Grid | None) -> None:
        """Raise `ImageLimitError` for an impossible variant, `InvalidRequestError` for an impossible grid."""
        claimed = key.frames.grid if key.frames else claimed
        geometry = self.geometry.variant(min_pixels=key.min_pixels, max_pixels=key.max_pixels)
        if claimed is not None and not geometry.has(claimed):
            raise InvalidRequestError(f"the caller computed grid {tuple(claimed)}, which is not a valid grid")
        if key.frames and key.frames.bilinear:
            height, width = key.frames.bilinear
            if height * width > self._max_image_pixels:
                raise ImageLimitError(
                    f"{width}x{height} pixels exceed max_image_pixels {self._max_image_pixels}"
                )

    def agreed_grid(self, recorded: Iterable[Grid], claimed: Grid | None) -> Grid | None:
        """Return the first grid that the index has `recorded` and the caller, if it claims one, agrees with.

        Without such a grid, return None: it must be read from the bytes, because an entry of the index may be wrong.
        """
        return next((grid for grid in recorded if self.geometry.has(grid) and claimed in (None, grid)), None)

    def grid(self, key: ImageKey, source: Source, claimed: Grid | None = None) -> Grid:
        """Return the grid of an image with this source, in the variant of its key.

        Raises `ImageLimitError`, or `InvalidRequestError` if the caller computed another grid. Frames of a video have
        the grid of their key, which is checked as by `check_name`; a frame that does not exist is an
        `InvalidRequestError`.
        """
        if key.frames is not None:
            self.check_name(key, None)  # a Fetch can name any grid
            assert source.video is not None, "a file under the name of frames is a video"
            if key.frames.second >= source.video.frames:
                raise InvalidRequestError(
                    f"frame {key.frames.second} does not exist: the video has {source.video.frames} frames"
                )
            return key.frames.grid
        geometry = self.geometry.variant(min_pixels=key.min_pixels, max_pixels=key.max_pixels)
        return confirmed_grid(geometry.grid(*source.header.upright), claimed)


def _check_digest(key: ImageKey, digest: bytes) -> None:
    if digest != key.digest:
        raise DigestMismatchError(f"the bytes hash to {digest.hex()}, but were sent under {key.digest.hex()}")


def confirmed_grid(grid: Grid, claimed: Grid | None) -> Grid:
    """Return `grid`. Raises `InvalidRequestError` if the caller claims another one."""
    if claimed is not None and claimed != grid:
        raise InvalidRequestError(
            f"the caller computed grid {tuple(claimed)}, but the image has {tuple(grid)}"
        )
    return grid


class _File(Item):
    """A source in the cache. `file` keeps the file of a video alive."""

    __slots__ = ("file", "source", "used_s")

    def __init__(self, source: Source, used_s: float) -> None:
        self.file = source.file() if source.file else None
        self.source = source
        self.used_s = used_s
        super().__init__(source.key, len(source.data) if self.file is None else self.file.size, 1)


_BYTES, _FILES = 0, 1  # the limits of a cache, and the amounts of a file


class SourceCache:
    """A bounded map from a key to its source. Thread-safe; reading its size drops expired files.

    The key is derived from content digest and tenant salt: a tenant must not learn what another one sent.

    A file lives for `ttl_s` seconds after its last use, or less if `max_bytes` or `max_files` is reached. A dropped
    image costs its sender another upload, never a wrong answer. A file counts against the holder that sent it first.
    `EvictionOrder` says which file is dropped, by shares of the limit that is reached.
    """

    def __init__(
        self,
        max_bytes: int,
        ttl_s: float,
        clock: Callable[[], float] = monotonic,
        *,
        max_files: float = math.inf,
    ) -> None:
        """`max_files` bounds the files of a cache of videos, each of which takes a descriptor."""
        self.max_bytes = max_bytes
        self._max_files = max_files
        self._ttl_s = ttl_s
        self._clock = clock
        self._lock = threading.Lock()
        self._held_bytes = 0
        self._files: OrderedDict[bytes, _File] = OrderedDict()  # the least recently used is first
        self._order: EvictionOrder[_File] = EvictionOrder(max_bytes, max_files)

    def __len__(self) -> int:
        with self._lock:
            self._expire()
            return len(self._files)

    @property
    def held_bytes(self) -> int:
        """Bytes of all files kept."""
        with self._lock:
            self._expire()
            return self._held_bytes

    def put(self, source: Source, holder: str = "") -> None:
        """Keep `source`, and evict others if space is short. A file larger than `max_bytes` is not kept."""
        with self._lock:
            self._expire()
            if source.key in self._files:
                self._use(source.key)
                return
            file = _File(source, self._clock())
            size = file.amounts[_BYTES]
            if size > self.max_bytes:
                return
            while self._held_bytes + size > self.max_bytes:
                self._evict(source.key, holder, size, _BYTES)
            while len(self._files) + 1 > self._max_files:
                self._evict(source.key, holder, 1, _FILES)
            self._files[source.key] = file
            self._held_bytes += size
            self._order.admit(file, holder)
            self._order.use(file, file.used_s)
            self._order.add(file)

    def get(self, key: bytes) -> Source | None:
        """Return the source of `key` and renew its lifetime, or None."""
        with self._lock:
            self._expire()
            return self._use(key).source if key in self._files else None

    def drop(self, key: bytes) -> None:
        """Drop the source of `key`, if there is one."""
        with self._lock:
            if key in self._files:
                self._remove(self._files[key])

    def clear(self) -> None:
        """Drop all files."""
        with self._lock:
            for file in list(self._files.values()):
                self._remove(file)

    def _use(self, key: bytes) -> _File:
        file = self._files[key]
        file.used_s = self._clock()
        self._files.move_to_end(key)
        self._order.remove(file)
        self._order.use(file, file.used_s)
        self._order.add(file)
        return file

    def _evict(self, key: bytes, holder: str, new: int, limit: int) -> None:
        """Drop the file that is next, so that `holder` can keep file `key`, which has `new` of a limit."""
        victim = self._order.victim(self._clock(), holder, new, limit, key)
        assert victim is not None, "a cache that is full has files, and none is pinned"
        self._order.dropped(victim)
        self._remove(victim)

    def _expire(self) -> None:
        now = self._clock()
        while self._files:
            file = next(iter(self._files.values()))
            if file.used_s + self._ttl_s > now:
                return
            self._order.dropped(file)
            self._remove(file)

    def _remove(self, file: _File) -> None:
        del self._files[file.source.key]
        self._held_bytes -= file.amounts[_BYTES]
        self._order.remove(file)
        self._order.release(file)
