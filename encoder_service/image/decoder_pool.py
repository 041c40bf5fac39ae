"""Decoding in separate processes: a malicious file can fail only itself.

`DecoderPool` runs one process more than there are decoding threads. When a process dies, the spare takes its place and
the pool starts another in the background. `OPEN_VIDEOS` further processes, which start with the first video, each keep
one video open.
"""

import logging
import threading
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from typing import TypeVar

import PIL

from encoder_contract.errors import (
    AbandonedError,
    EncoderError,
    OverloadedError,
    UndecodableImageError,
    UnknownImageError,
)
from encoder_contract.header import Header
from encoder_contract.video import VideoInfo
from encoder_service.config import Config
from encoder_service.image import decoder_child
from encoder_service.image.decoder import DEATHS, FileDecoder, PillowDecoder
from encoder_service.image.decoder_child import (
    DECODE_LIMIT_S,
    DecoderChild,
    DecoderDiedError,
    DecoderStartError,
    StderrPipe,
    decoding_bytes,
)
from encoder_service.image.pillow import PILLOW_BYTES_PER_PIXEL, Pixels, is_shortage
from encoder_service.image.source import Source, VideoFile

log = logging.getLogger(__name__)

Result = TypeVar("Result")

_RETRY_MS = 500
# Videos that are open at a time, each in a separate process. If callers read more videos in turn, processes have to
# decode them from the beginning again and again.
OPEN_VIDEOS = 2


class DecoderPool:
    """Decodes images in separate processes, one for each of up to `threads` threads, and a spare.

    They also read the headers of rare formats, one at a time. `OPEN_VIDEOS` further processes, started when first
    needed, each keep one video open.

    If a process dies, its image gets an error: `UndecodableImageError` if the image is to blame, else
    `OverloadedError`. `deaths` counts them by reason. The processes start in the background; `start` waits for them,
    and `name` then says what the kernel enforces. `cpu_s` is the CPU time that an image may take.
    """

    def __init__(
        self, threads: int = 4, *, max_image_pixels: int = 100_000_000, cpu_s: float = DECODE_LIMIT_S
    ) -> None:
        self.name = f"Pillow {PIL.__version__} in separate processes"
        self._cpu_s = cpu_s
        memory_bytes = self._memory_bytes = (
            decoder_child.BASE_BYTES + PILLOW_BYTES_PER_PIXEL * max_image_pixels
        )
        self._stderr = StderrPipe()
        self._deaths_lock = threading.Lock()
        self._deaths = dict.fromkeys(DEATHS, 0)
        # One thread that lives as long as the pool: the kernel kills a process when the thread that started it ends.
        launcher = ThreadPoolExecutor(1, thread_name_prefix="decoder-launcher")
        self._children = [
            DecoderChild(launcher, self._stderr, memory_bytes=memory_bytes, cpu_s=cpu_s)
            for _ in range(threads + 1)
        ]
        self._header_lock = threading.Lock()
        self._video_children = [
            DecoderChild(launcher, self._stderr, memory_bytes=memory_bytes, cpu_s=cpu_s, videos=True)
            for _ in range(OPEN_VIDEOS)
        ]
        # The most recently used child is last and takes the next image, because its memory is warm. A child whose
        # process is being started is first.
        self._idle, self._idle_videos = deque(self._children), deque(self._video_children)
        self._idle_changed = threading.Condition()
        for child in self._children:
            child.launch()

    @property
    def deaths(self) -> Mapping[str, int]:
        """Processes that ended, by reason."""
        return self._deaths

    @property
    def messages(self) -> int:
        """Lines that the processes have printed to standard error; the lines are dropped."""
        self._stderr.drain()
        return self._stderr.lines

    def start(self) -> None:
        """Wait until all processes are ready. Raises `DecoderStartError` if one does not start."""
        is_confined = all(self._for_all(self._children, lambda child: child.ready().is_confined))
        if not is_confined:
            log.warning("this kernel has no seccomp: decoder processes can open files and sockets")
        confined = "confined by seccomp" if is_confined else "not confined"
        self.name = f"Pillow {PIL.__version__} in separate processes ({confined})"

    def close(self) -> None:
        """End all processes, each after its current image; a further use starts them again."""
        self._for_all(self._children, DecoderChild.end)
        self.close_videos()

    def close_videos(self) -> None:
        """See `FileDecoder`."""
        self._for_all(self._video_children, DecoderChild.end)

    def read_header(self, file: bytes, formats: Sequence[str]) -> Header | EncoderError:
        """See `FileDecoder`. A process that does not start is an `OverloadedError` of the image."""
        limits = f"{decoder_child.HEADER_CPU_S:g} s of CPU time", decoder_child.BASE_BYTES
        try:
            with self._header_lock:
                return self._run(
                    "reading the header of this image", limits, lambda child: child.read_header(file, formats)
                )
        except DecoderStartError as error:
            log.error("%s", error)
            return OverloadedError(
                "no decoder process starts to read the header of this image: retry", retry_after_ms=_RETRY_MS
            )

    def decode(self, source: Source) -> Pixels | EncoderError:
        """See `FileDecoder`. Raises `DecoderStartError` if no process starts."""
        limits = f"{self._cpu_s:g} s of CPU time", decoding_bytes(source.header)
        return self._run(f"decoding this {source.header.format}", limits, lambda child: child.decode(source))

    def open_video(self, key: bytes, file: VideoFile) -> VideoInfo | EncoderError:
        """See `FileDecoder`; the video then stays open for `read_frames`.

        Raises `DecoderStartError` if no process starts.
        """
        return self._run(
            "opening this video",
            self._video_limits,
            lambda child: child.open_video(key, file),
            key,
        )

    def read_frames(
        self, source: Source, first: int, second: int, is_wanted: Callable[[], bool] = lambda: True
    ) -> Pixels | EncoderError:
        """See `FileDecoder`. Raises `DecoderStartError` if no process starts.

        A process on its way to frames that are no longer wanted is killed, because they may be minutes away.
        """

        def read(child: DecoderChild) -> Pixels | EncoderError:
            if child.open_video_key != source.key:
                if source.file is None or (file := source.file()) is None:
                    return UnknownImageError(
                        "the file of this video is no longer kept: submit it, then fetch"
                    )
                opened = child.open_video(source.key, file)
                if isinstance(opened, EncoderError):
                    return opened
            return child.read_frames(source, first, second, is_wanted)

        what = f"decoding frames {first} and {second} of this video"
        return self._run(what, self._video_limits, read, source.key)

    @property
    def _video_limits(self) -> tuple[str, int]:
        return (
            f"{self._cpu_s:g} s of CPU time, and {decoder_child.FRAME_CPU_S:g} s a frame",
            self._memory_bytes,
        )

    @contextmanager
    def _idle_child(self, video: bytes | None = None) -> Iterator[DecoderChild]:
        """Hold a child that is idle, or wait for one. With the key of a `video`, prefer the child that has it open."""
        idle = self._idle if video is None else self._idle_videos
        with self._idle_changed:
            while (child := self._next_idle(video)) is None:
                self._idle_changed.wait()
            idle.remove(child)
        put_back = idle.append
        try:
            yield child
        except BaseException:
            put_back = idle.appendleft  # its process is being started, or should be
            raise
        finally:
            with self._idle_changed:
                put_back(child)
                self._idle_changed.notify_all()

    def _next_idle(self, video: bytes | None) -> DecoderChild | None:
        """Return the child to use next; None if none is idle, or if the child that has the video open is busy."""
        if video is None:
            return self._idle[-1] if self._idle else None
        child = next((each for each in self._video_children if each.open_video_key == video), None)
        if child is None:
            return self._idle_videos[0] if self._idle_videos else None
        return child if child in self._idle_videos else None

    def _for_all(
        self, children: Sequence[DecoderChild], use: Callable[[DecoderChild], Result]
    ) -> list[Result]:
        """Wait until all of these children are idle, then return what `use` returns for each."""
        video = None if children is self._children else b""  # no video has this key
        with ExitStack() as stack:
            return [use(child) for child in [stack.enter_context(self._idle_child(video)) for _ in children]]

    def _run(
        self,
        what: str,
        limits: tuple[str, int],
        use: Callable[[DecoderChild], Result],
        video: bytes | None = None,
    ) -> Result | EncoderError:
        """Return what `use` returns for an idle child, or the error of an image whose process died.

        `what` and `limits` (CPU time as text, bytes of memory) are for the error.
        """
        try:
            with self._idle_child(video) as child:
                return use(child)
        except DecoderDiedError as died:
            if died.reason == decoder_child.ABANDONED:
                return AbandonedError("all callers of the image have left")
            log.warning("a decoder process ended (%s) while %s", died, what)
            return self._death_error(died.reason, what, *limits)
        except OSError as error:
            if not is_shortage(error):
                raise
            log.warning("short of memory or files while %s", what, exc_info=error)
            return OverloadedError(f"{what} ran short of memory or files", retry_after_ms=_RETRY_MS)

    def _death_error(self, reason: str, what: str, cpu_time: str, memory_bytes: int) -> EncoderError:
        """Count a death and return the error of its image."""
        with self._deaths_lock:
            self._deaths[reason] += 1
        if reason in ("killed", "stuck"):  # something else stopped or killed it, or it got no CPU time
            return OverloadedError(
                f"the decoder process was ended while {what}: retry", retry_after_ms=_RETRY_MS
            )
        texts = {
            "crashed": f"the decoder crashed while {what}",
            "senseless": f"the decoder gave an invalid answer while {what}",
            "time": f"{what} takes more than {cpu_time}",
            "memory": f"{what} takes more memory than {memory_bytes // 1_000_000} MB",
        }
        return UndecodableImageError(texts[reason])


def files_decoder(config: Config, threads: int) -> FileDecoder:
    """Return the decoder of single files and headers, for this many threads. It may still be starting."""
    if config.decoder_process == "no":
        return PillowDecoder()
    return DecoderPool(threads, max_image_pixels=config.max_image_pixels)
