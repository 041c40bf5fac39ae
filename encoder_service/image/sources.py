"""Files that were submitted, images and videos: the checks on their bytes and grid, and their cache.

The cache keeps files for a while, so that an evicted embedding can be computed again without the client.
"""

import asyncio
import math
import threading
from collections import OrderedDict, deque
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
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
from encoder_contract.video import VideoInfo
from encoder_service.image.source import Source, VideoFile
from encoder_service.keys import ImageKey

# Hashing this much and reading its header cost less than a hand-off to a thread; only a compressed text chunk costs
# more, and that under a millisecond. Larger files go to a worker thread.
ON_LOOP_BYTES = 4 << 10
# Reads the header of a file in one of some rare formats; see `FileDecoder.read_header`.
ReadHeader = Callable[[bytes, Sequence[str]], Header | EncoderError]
# Returns what the container of a video says; see `FileDecoder.open_video`.
OpenVideo = Callable[[bytes, VideoFile], VideoInfo | EncoderError]
# Two: hashing releases the GIL and reading a header does not, so more threads would only take turns. A pool of its
# own, so that no other blocking work delays validation.
THREADS = 2


T = TypeVar("T")


class ThreadTurns:
    """A few threads for short work; callers take turns, regardless of how much each one asks for.

    Belongs to one event loop. A caller waits for the work that has a thread, and for one piece of each other caller.
    """

    def __init__(self, threads: int, name: str) -> None:
        self._free = threads
        self._threads = ThreadPoolExecutor(threads, thread_name_prefix=name)
        self._waiting: OrderedDict[str, deque[asyncio.Future[None]]] = OrderedDict()

    async def run(self, caller: str, work: Callable[[], T]) -> T:
        """Return what `work` does on a thread. Work that has begun goes on when the call is cancelled."""
        loop = asyncio.get_running_loop()
        if not self._free:
            turn: asyncio.Future[None] = loop.create_future()
            self._waiting.setdefault(caller, deque()).append(turn)
            try:
                await turn
            except asyncio.CancelledError:
                if turn.done() and not turn.cancelled():  # its thread is free again
                    self._give_back()
                raise
        else:
            self._free -= 1
        running = self._threads.submit(work)
        running.add_done_callback(partial(self._ended, loop))
        return await asyncio.wrap_future(running)

    def _ended(self, loop: asyncio.AbstractEventLoop, _work: "Future[T]") -> None:
        with suppress(RuntimeError):  # the loop was closed
            loop.call_soon_threadsafe(self._give_back)

    def _give_back(self) -> None:
        """Give a thread to the caller whose turn it is."""
        while self._waiting:
            caller, turns = self._waiting.popitem(last=False)
            turn = turns.popleft()
            if turns:
                self._waiting[caller] = turns  # behind the others
            if not turn.done():  # else it was cancelled
                turn.set_result(None)
                return
        self._free += 1


@dataclass(frozen=True, slots=True)
class VideoLimits:
    """Limits of a video: its frames, and how long it is by their rate. Those of its file are checked as it arrives."""

    frames: int
    seconds: float

    def check(self, video: VideoInfo) -> None:
        """Raise `ImageLimitError` naming the limit that a video exceeds."""
        if video.frames > self.frames:
            raise ImageLimitError(f"{video.frames} frames exceed max_video_frames {self.frames}")
        if video.seconds > self.seconds:
            raise ImageLimitError(f"{video.seconds:.1f} s exceed max_video_seconds {self.seconds:g}")


class Validator:
    """Checks bytes against their digest and the limits without decoding pixels. Used from the event loop."""

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
        """`read_rare_header` and `open_video` may take long; `on_hash` is told the seconds that hashing a file took."""
        self.geometry = geometry
        self._max_image_bytes = max_image_bytes
        self._max_image_pixels = max_image_pixels
        self._formats = formats
        self._rare_formats = [name for name in formats if name in RARE_FORMATS]
        self._read_rare_header = read_rare_header
        self._on_hash = on_hash
        self._threads = ThreadTurns(THREADS, "validation")
        # Decoder processes read these one at a time: no other file waits for them.
        self._rare_headers = ThreadTurns(1, "rare-headers")
        self._open_video = open_video
        self._video_limits = video_limits
        self._videos = ThreadTurns(1, "videos")

    async def take(self, key: ImageKey, data: bytes, caller: str) -> Source:
        """Return `data` as a source if it has the digest of `key` and is within the limits.

        `caller` is who sent it: callers take turns. Raises `DigestMismatchError`, `InvalidImageError` or
        `ImageLimitError`, and `OverloadedError` if the header of a rare format could not be read now.
        """
        if len(data) <= ON_LOOP_BYTES:
            header = self._check(key, data)
        else:
            header = await self._threads.run(caller, partial(self._check, key, data))
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
        return Source(key.source_key, data, header)

    async def take_video(self, key: ImageKey, file: VideoFile, caller: str) -> Source:
        """Return the source of a video if it has the digest of `key` and is within the limits.

        Raises as `take` does.
        """
        info = await self._videos.run(caller, partial(self._opened, key, file))
        self._video_limits.check(info)
        source = Source.of_video(key.source_key, file, info)
        check_limits(
            source.header, file.size, max_image_bytes=file.size, max_image_pixels=self._max_image_pixels
        )
        return source

    def _opened(self, key: ImageKey, file: VideoFile) -> VideoInfo:
        began = monotonic()
        file.seal()
        digest = content_digest(file.mapped())
        self._on_hash(monotonic() - began)
        _check_digest(key, digest)
        if file.container is None:
            raise InvalidImageError("no video in a supported container: MP4, MOV, WebM or MKV")
        info = self._open_video(key.source_key, file)
        if isinstance(info, EncoderError):
            raise info
        return info

    def _check(self, key: ImageKey, data: bytes) -> Header | None:
        """Check the digest and return the header; None if the file may have a rare format."""
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
        """Raise `ImageLimitError` for a variant, `InvalidRequestError` for a grid, that no image can have."""
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

    def agreed(self, said: Iterable[Grid], claimed: Grid | None) -> Grid | None:
        """Return the first grid in `said` (by the index) that agrees with the caller; None: read it from the bytes.

        `said` neither confirms a grid that no image can have nor refutes what the caller computed.
        """
        return next((grid for grid in said if self.geometry.has(grid) and claimed in (None, grid)), None)

    def grid(self, key: ImageKey, source: Source, claimed: Grid | None = None) -> Grid:
        """Return the grid of an image with this source, in the variant of its key.

        Raises `ImageLimitError`, or `InvalidRequestError` if the caller computed another grid. Frames of a video have
        the grid of their key, which is checked as by `check_name`; `InvalidRequestError` if the video has fewer.
        """
        if key.frames is not None:
            self.check_name(key, None)  # a Fetch may name any
            assert source.video is not None, "a file under the name of frames is a video"
            if key.frames.second >= source.video.frames:
                raise InvalidRequestError(
                    f"frame {key.frames.second} does not exist: the video has {source.video.frames} frames"
                )
            return key.frames.grid
        geometry = self.geometry.variant(min_pixels=key.min_pixels, max_pixels=key.max_pixels)
        return confirm(geometry.grid(*source.header.upright), claimed)


def _check_digest(key: ImageKey, digest: bytes) -> None:
    if digest != key.digest:
        raise DigestMismatchError(f"the bytes hash to {digest.hex()}, but were sent under {key.digest.hex()}")


def confirm(grid: Grid, claimed: Grid | None) -> Grid:
    """Return `grid`; raises `InvalidRequestError` if the caller computed another."""
    if claimed is not None and claimed != grid:
        raise InvalidRequestError(
            f"the caller computed grid {tuple(claimed)}, but the image has {tuple(grid)}"
        )
    return grid


@dataclass(slots=True)
class _Kept:
    source: Source
    file: VideoFile | None  # a video's, which lives as long as this
    holder: str
    used_s: float

    @property
    def size(self) -> int:
        return len(self.source.data) if self.file is None else self.file.size


class SourceCache:
    """A bounded, least-recently-used map from a key to its source. Thread-safe: even asking its size drops entries.

    The key is derived from content digest and tenant salt: a tenant must not learn what another sent.

    An entry lives for `ttl_s` seconds after its last use, or less if `max_bytes` is reached: a dropped image
    costs its sender another upload, never a wrong answer. Entries count against the holder that sent them first. While
    there is space, a holder may take all of it; then the holder with the most bytes makes room, so that holders that
    always want more have equal shares.
    """

    def __init__(
        self,
        max_bytes: int,
        ttl_s: float,
        clock: Callable[[], float] = monotonic,
        *,
        max_files: float = math.inf,
    ) -> None:
        """At most `max_files` are kept: a video takes a descriptor."""
        self.max_bytes = max_bytes
        self._max_files = max_files
        self._ttl_s = ttl_s
        self._clock = clock
        self._turn = threading.Lock()
        self._held_bytes = 0
        self._images: OrderedDict[bytes, _Kept] = (
            OrderedDict()
        )  # the least recently used first, as in the next
        self._of: dict[str, OrderedDict[bytes, None]] = {}  # by holder
        self._bytes_of: dict[str, int] = {}

    def __len__(self) -> int:
        with self._turn:
            self._expire()
            return len(self._images)

    @property
    def held_bytes(self) -> int:
        """Bytes of all files kept."""
        with self._turn:
            self._expire()
            return self._held_bytes

    def put(self, source: Source, holder: str = "") -> None:
        """Keep `source`, evicting others while there is no space. One larger than `max_bytes` is not kept."""
        with self._turn:
            self._expire()
            if (kept := self._images.get(source.key)) is not None:
                holder = kept.holder
                self._remove(source.key)
            kept = _Kept(source, source.file() if source.file else None, holder, self._clock())
            if (size := kept.size) > self.max_bytes:
                return
            self._images[source.key] = kept
            self._of.setdefault(holder, OrderedDict())[source.key] = None
            self._bytes_of[holder] = self._bytes_of.get(holder, 0) + size
            self._held_bytes += size
            while self._held_bytes > self.max_bytes or len(self._images) > self._max_files:
                self._remove(self._victim(source.key))

    def get(self, key: bytes) -> Source | None:
        """Return the source of `key` and renew its lifetime, or None."""
        with self._turn:
            self._expire()
            kept = self._images.get(key)
            if kept is None:
                return None
            kept.used_s = self._clock()
            self._images.move_to_end(key)
            self._of[kept.holder].move_to_end(key)
            return kept.source

    def drop(self, key: bytes) -> None:
        """Drop the source of `key`, if there is one."""
        with self._turn:
            if key in self._images:
                self._remove(key)

    def clear(self) -> None:
        """Drop everything."""
        with self._turn:
            self._images.clear()
            self._of.clear()
            self._bytes_of.clear()
            self._held_bytes = 0

    def _victim(self, newest: bytes) -> bytes:
        """Return the oldest entry of the holder with the most bytes, but for the one that was just put."""
        oldest = {holder: next(iter(keys)) for holder, keys in self._of.items()}
        return oldest[max((h for h in oldest if oldest[h] != newest), key=self._bytes_of.__getitem__)]

    def _expire(self) -> None:
        now = self._clock()
        while self._images:
            key, kept = next(iter(self._images.items()))
            if kept.used_s + self._ttl_s > now:
                return
            self._remove(key)

    def _remove(self, key: bytes) -> None:
        kept = self._images.pop(key)
        size = kept.size
        self._held_bytes -= size
        self._bytes_of[kept.holder] -= size
        del self._of[kept.holder][key]
        if not self._of[kept.holder]:
            del self._of[kept.holder], self._bytes_of[kept.holder]
