"""Decoding videos with FFmpeg: frames to upright RGB pixels. Only decoder processes import it.

One thread decodes. Frames are numbered as vLLM's loader does: by how many were decoded before, from the beginning of
the file. So a frame is reached by decoding all frames before it, and an earlier frame by starting again. The times in
the container matter only where they contradict its frame rate or its number of frames.
"""

import ctypes
import io
import math
import mmap
import weakref
from collections.abc import Iterator
from contextlib import ExitStack
from ctypes import byref, c_void_p
from typing import Any, NamedTuple

import numpy as np

from encoder_contract.errors import InvalidImageError, OverloadedError
from encoder_contract.video import UNKNOWN_FPS, VideoInfo
from encoder_service.image import ffmpeg
from encoder_service.image.pillow import Pixels

_lib = ffmpeg.load()
_lib.av_log_set_level(ffmpeg.LOG_ERRORS)
# A playlist, for example, would name other files.
_FORMATS = b"mov,matroska,webm,avi,flv,mpeg,mpegts"
_BUFFER_BYTES = 64 << 10
_MOST_FRAMES = (1 << 31) - 1  # a container may state any number


class _Reader:
    """Reads the mapped file of an open video, for FFmpeg."""

    def __init__(self, content: mmap.mmap) -> None:
        self._bytes = np.frombuffer(content, np.uint8)
        self._at = 0

    def read(self, buffer: int, size: int) -> int:
        count = min(size, len(self._bytes) - self._at)
        if count <= 0:
            return ffmpeg.END
        ctypes.memmove(buffer, self._bytes.ctypes.data + self._at, count)
        self._at += count
        return count

    def seek(self, offset: int, whence: int) -> int:
        if whence & ffmpeg.SEEK_SIZE:
            return len(self._bytes)
        start = {io.SEEK_SET: 0, io.SEEK_CUR: self._at, io.SEEK_END: len(self._bytes)}[whence & 3]
        self._at = max(0, start + offset)
        return self._at


# The callbacks are made once, before the process enters its sandbox, where no code can be made. They get an address.
_readers: dict[int, _Reader] = {}
_READ = ffmpeg.ReadFunction(lambda key, buffer, size: _readers[key].read(buffer, size))
_SEEK = ffmpeg.SeekFunction(lambda key, offset, whence: _readers[key].seek(offset, whence))


class _Beginning(NamedTuple):
    """The first frames that can be decoded: the numbers of their packets, and the time of the last of them.

    Packets that are shown before it, and are none of them, need a frame that the file lacks.
    """

    packets: frozenset[int]
    pts: int


class _Packets(NamedTuple):
    """The packets of a video that become frames: how many are `shown`, and the times of the first and last, seconds.

    `leading` packets before them become none. `last_key` is the number of the last packet that needs no other. Times
    are infinite if the packets have none.
    """

    shown: int
    leading: int
    last_key: int
    first_s: float
    last_s: float

    @property
    def seconds(self) -> float:
        """For how long they are shown; 0 if they have no times."""
        seconds = (self.last_s - self.first_s) * self.shown / (self.shown - 1) if self.shown > 1 else 0.0
        return seconds if math.isfinite(seconds) else 0.0


class _Track:
    """The video track of a file, which is read and decoded once, from its beginning. It frees what FFmpeg allocated."""

    def __init__(self, content: mmap.mmap, first_packet: int = 0) -> None:
        """Decode from this packet on. Raises `InvalidImageError` for a file without a video that can be decoded."""
        owned = ExitStack()
        weakref.finalize(self, owned.close)
        self._format = _opened(content, owned)
        self._stream = self._video_stream()
        self._codec: Any = None
        self._owned = owned
        self._first_packet, self._sent, self._is_over = first_packet, 0, False
        self._packet = _lib.av_packet_alloc()
        owned.callback(_lib.av_packet_free, byref(self._packet))
        self.frame = _lib.av_frame_alloc()
        """The frame that was decoded last."""
        owned.callback(_lib.av_frame_free, byref(self.frame))

    def _video_stream(self) -> Any:
        """Return the first video stream, and have the packets of all others skipped."""
        streams = [
            self._format.contents.streams[number] for number in range(self._format.contents.nb_streams)
        ]
        found = [
            each for each in streams if each.contents.codecpar.contents.codec_type == ffmpeg.VIDEO_STREAM
        ]
        if not found:
            raise InvalidImageError("damaged or unsupported video: it has no video track")
        for each in streams:
            if each is not found[0]:
                each.contents.discard = ffmpeg.DISCARD_ALL
        return found[0]

    @property
    def codec(self) -> str:
        """The name of the video's codec."""
        return str(_lib.avcodec_get_name(self._stream.contents.codecpar.contents.codec_id).decode())

    @property
    def fps(self) -> float:
        """The frame rate that the container states, or that FFmpeg has guessed; 0 if unknown."""
        fps = float(self._stream.contents.avg_frame_rate)
        return max(0.0, fps or float(_lib.av_guess_frame_rate(self._format, self._stream, None)))

    @property
    def rotation(self) -> int:
        """By how many degrees frames are turned clockwise to be shown."""
        parameters = self._stream.contents.codecpar.contents
        found = _lib.av_packet_side_data_get(
            parameters.coded_side_data, parameters.nb_coded_side_data, ffmpeg.DISPLAY_MATRIX
        )
        angle = _lib.av_display_rotation_get(found.contents.data) if found else 0.0
        return round(-angle) % 360 if math.isfinite(angle) else 0

    @property
    def stated_frames(self) -> int:
        """The number of frames that an index states, without those that an edit list hides; 0 without an index."""
        stated, shown = int(self._stream.contents.nb_frames), 0
        for number in range(_lib.avformat_index_get_entries_count(self._stream)):
            entry = _lib.avformat_index_get_entry(self._stream, number).contents
            shown += not entry.flags_and_size & ffmpeg.INDEX_DISCARD
        return shown if 0 < shown < stated - 1 else stated

    @property
    def stated_s(self) -> float:
        """The duration that the container states, seconds."""
        if (of_file := self._format.contents.duration) > 0:
            return float(of_file) / ffmpeg.TIME_BASE
        return self._seconds(self._stream.contents.duration)

    def beginning(self) -> _Beginning | None:
        """Decode the first frames, up to one whose place is known; None if no frame can be decoded.

        Raises `OverloadedError` if memory is short.
        """
        found: set[int] = set()
        while (is_decoded := self.decode()) is not None:
            if is_decoded:
                frame = self.frame.contents
                found.add((frame.opaque or 1) - 1)
                if frame.pts != ffmpeg.NO_TIME or 0 in found:
                    return _Beginning(frozenset(found), frame.pts)
        return _Beginning(frozenset(found), ffmpeg.NO_TIME) if found else None

    def packets(self, beginning: _Beginning) -> _Packets:
        """Read all packets, without decoding them."""
        count, leading, last_key, first, last = 0, 0, 0, math.inf, -math.inf
        oldest = min(beginning.packets)
        for number, packet in enumerate(self._read()):
            if packet.flags & ffmpeg.PACKET_DISCARD:
                continue
            is_later = number > oldest
            if ffmpeg.NO_TIME not in (packet.pts, beginning.pts):
                is_later = packet.pts >= beginning.pts
            if not is_later and number not in beginning.packets:
                leading += 1
                continue
            count += 1
            if packet.flags & ffmpeg.PACKET_KEY:
                last_key = number
            time = packet.pts if packet.pts != ffmpeg.NO_TIME else packet.dts
            if time != ffmpeg.NO_TIME:
                first, last = min(first, self._seconds(time)), max(last, self._seconds(time))
        return _Packets(count, leading, last_key, first, last)

    def _seconds(self, time: int) -> float:
        return time * float(self._stream.contents.time_base) if time != ffmpeg.NO_TIME else 0.0

    def _read(self) -> Iterator[ffmpeg.Packet]:
        index = self._stream.contents.index
        while (status := _lib.av_read_frame(self._format, self._packet)) >= 0:
            packet = self._packet.contents
            if packet.stream_index == index:
                yield packet
            _lib.av_packet_unref(self._packet)
        _check_memory(status)

    def decode(self) -> bool | None:
        """Decode the next frame. Return True, False for a packet that cannot be decoded, None at the end.

        Raises `OverloadedError` if memory is short.
        """
        codec = self._codec = self._codec or self._open_codec()
        while True:
            status = _lib.avcodec_receive_frame(codec, self.frame)
            if status >= 0:
                return True
            if status == ffmpeg.END:
                return None
            _check_memory(status)
            status = self._send(codec)
            _check_memory(status)
            if status < 0:
                return None if self._is_over else False

    def _send(self, codec: int) -> int:
        for packet in self._read():
            self._sent += 1
            if self._sent <= self._first_packet:
                continue
            packet.opaque = self._sent  # from 1, because 0 is none
            status = _lib.avcodec_send_packet(codec, self._packet)
            _lib.av_packet_unref(self._packet)
            return int(status)
        self._is_over = True
        return int(_lib.avcodec_send_packet(codec, None))

    def _open_codec(self) -> int:
        parameters = self._stream.contents.codecpar
        decoder = _lib.avcodec_find_decoder(parameters.contents.codec_id)
        codec = c_void_p(_lib.avcodec_alloc_context3(decoder) if decoder else None)
        self._owned.callback(_lib.avcodec_free_context, byref(codec))
        if (
            not codec
            or _lib.avcodec_parameters_to_context(codec, parameters) < 0
            or _lib.av_opt_set(codec, b"threads", b"1", 0) < 0
            or _lib.av_opt_set(codec, b"flags", b"+copy_opaque", 0) < 0
            or _lib.avcodec_open2(codec, None, None) < 0
        ):
            raise InvalidImageError(f"unsupported video: this server cannot decode {self.codec}")
        assert codec.value is not None
        return codec.value


def _opened(content: mmap.mmap, owned: ExitStack) -> Any:
    """Return FFmpeg's context of a file, which `owned` closes. Raises `InvalidImageError`."""
    reader = _Reader(content)
    key = id(reader)
    _readers[key] = reader
    owned.callback(_readers.pop, key)
    source = _lib.avio_alloc_context(_lib.av_malloc(_BUFFER_BYTES), _BUFFER_BYTES, 0, key, _READ, None, _SEEK)
    owned.callback(_lib.avio_context_free, byref(source))
    owned.callback(lambda: _lib.av_free(source.contents.buffer))
    context, options = _lib.avformat_alloc_context(), c_void_p()
    context.contents.pb = ctypes.cast(source, c_void_p)
    _lib.av_dict_set(byref(options), b"format_whitelist", _FORMATS, 0)
    status = _lib.avformat_open_input(byref(context), None, None, byref(options))
    _lib.av_dict_free(byref(options))
    if status >= 0:
        owned.callback(_lib.avformat_close_input, byref(context))
        status = _lib.avformat_find_stream_info(context, None)
    _check_memory(status)
    if status < 0:
        raise InvalidImageError("damaged or unsupported video: it cannot be opened")
    return context


def _check_memory(status: int) -> None:
    if status == ffmpeg.NO_MEMORY:
        raise OverloadedError("decoding this video ran short of memory", retry_after_ms=0)


class OpenVideo:
    """An open video. It is decoded forwards only, and from the beginning again for an earlier frame."""

    def __init__(self, content: mmap.mmap) -> None:
        """Raise `InvalidImageError` for a file without a video, `OverloadedError` if memory is short."""
        self._content = content
        # OpenCV has FFmpeg convert to BGR. Straight to RGB, frames of 10 bits would differ by up to 4 levels of 255.
        self._bgr, self._rgb = _Converter(ffmpeg.BGR24), _Converter(ffmpeg.RGB24)
        self._open()

    def _open(self) -> None:
        self._next = 0
        self._track = _Track(self._content)
        self._rotation = self._track.rotation

    def info(self) -> VideoInfo:
        """Return what the container says, where it is true of the frames; then rewind.

        Raises `InvalidImageError` for a video without frames, or without any that can be decoded, and `OverloadedError`
        if memory is short.
        """
        track = self._track
        fps, stated, stated_s = track.fps, track.stated_frames, track.stated_s
        if (beginning := track.beginning()) is None:
            raise InvalidImageError(
                f"damaged or unsupported video: no frame of its {track.codec} can be decoded"
            )
        width, height = track.frame.contents.width, track.frame.contents.height
        self._open()
        packets = self._track.packets(beginning)
        self._open()
        frames, readable = (stated or _frames_of(stated_s, fps, packets)) - packets.leading, packets.shown
        if stated and readable < frames - 1:
            frames = self._found_at_the_end(frames, packets)
        else:
            if frames < 1 or (packets.leading and not stated):
                # An interrupted recording, whose container does not say how many it has, or one that was cut.
                frames = readable
            if _contradicts(packets, fps or UNKNOWN_FPS, readable, min(frames, readable)):
                # A recording without a frame rate, of which FFmpeg has guessed one, and from that the number of frames.
                frames, fps = min(frames, readable), readable / packets.seconds
        if self._rotation in (90, 270):
            width, height = height, width
        frames = min(frames, _MOST_FRAMES)
        return VideoInfo(frames, min(frames, readable), fps, width, height, self._rotation)

    def _found_at_the_end(self, stated: int, packets: _Packets) -> int:
        """Return how many frames vLLM's loader finds in a truncated file with an index.

        It looks for the last one. If the last packet is damaged and frames come out after it, it believes the index.
        """
        end, tail = _Track(self._content, packets.last_key), []
        while (is_decoded := end.decode()) is not None:
            tail.append(is_decoded)
        if False in tail[:-1]:
            return stated
        return max(1, packets.shown - (tail[-1:] == [False]))

    def read(self, first: int, second: int, out: Pixels) -> None:
        """Write two frames to `out` [2, H, W, 3], upright RGB.

        Raises `InvalidImageError` for a frame that cannot be read, `OverloadedError` if memory is short.
        """
        if first < self._next:
            self._open()
        for slot, number in enumerate((first, second)):
            if slot and number == first:
                out[1] = out[0]
                break
            self._read_one(number, out[slot])

    def _read_one(self, number: int, out: Pixels) -> None:
        is_decoded: bool | None = True
        while self._next <= number and is_decoded is not None:
            is_decoded = self._track.decode()
            self._next += is_decoded is not None
        if not is_decoded:
            raise InvalidImageError(
                f"frame {number} cannot be decoded: the video is damaged, or ends after {self._next} frames"
            )
        bgr = self._bgr.convert(self._track.frame)
        if not bgr or not self._rgb.convert(bgr):
            raise InvalidImageError(f"frame {number} cannot be decoded: its colours are of an unknown kind")
        turned = np.rot90(self._rgb.pixels, -(self._rotation // 90) if self._rotation % 90 == 0 else 0)
        if turned.shape != out.shape:
            height, width = turned.shape[:2]
            raise InvalidImageError(
                f"frame {number} has {width}x{height} pixels, the video {out.shape[1]}x{out.shape[0]}"
            )
        np.copyto(out, turned)


class _Converter:
    """Converts frames to one format, three bytes a pixel, in memory of known content."""

    def __init__(self, kind: int) -> None:
        self._kind = kind
        self._scaler, self._out = c_void_p(_lib.sws_alloc_context()), _lib.av_frame_alloc()
        weakref.finalize(self, _lib.sws_free_context, byref(self._scaler))
        weakref.finalize(self, _lib.av_frame_free, byref(self._out))
        self.pixels: Pixels = np.empty((0, 0, 3), np.uint8)
        """What was converted last, uint8 [H, W, 3]."""

    def convert(self, frame: Any) -> Any:
        """Return the converted frame, which the next call overwrites; None if it cannot be converted.

        Raises `OverloadedError` if memory is short.
        """
        width, height = frame.contents.width, frame.contents.height
        if self.pixels.shape[:2] != (height, width):
            self._allocate(width, height)
        # FFmpeg 8 would refuse to convert an interlaced frame to one that is not.
        frame.contents.flags &= ~ffmpeg.FRAME_INTERLACED
        status = _lib.sws_scale_frame(self._scaler, self._out, frame)
        _check_memory(status)
        return self._out if status >= 0 else None

    def _allocate(self, width: int, height: int) -> None:
        _lib.av_frame_unref(self._out)
        out = self._out.contents
        out.format, out.width, out.height = self._kind, width, height
        _check_memory(_lib.av_frame_get_buffer(self._out, 0))
        line = out.linesize[0]
        memory = (ctypes.c_ubyte * (height * line)).from_address(out.data[0])
        ctypes.memset(memory, 0, height * line)
        lines = np.frombuffer(memory, np.uint8).reshape(height, line)
        self.pixels = lines[:, : 3 * width].reshape(height, width, 3)


def _frames_of(stated_s: float, fps: float, packets: _Packets) -> int:
    """Return how many frames a container without an index has, as vLLM's loader counts them.

    The duration in a MKV or WebM is the time of its end, even if the file does not begin at 0.
    """
    if packets.first_s > 0.1 * stated_s and packets.last_s <= stated_s:
        stated_s -= packets.first_s
    return math.floor(stated_s * fps + 0.5)


def _contradicts(packets: _Packets, fps: float, *counts: int) -> bool:
    """Whether no number of frames takes about so many seconds at a rate: each is off by more than a tenth.

    A file may have more packets than frames: an edit list hides some, or a packet has half of the lines. For how long
    the last frame is shown is unknown.
    """
    if not packets.seconds > 0:
        return False
    shortest, longest = 0.9 * (packets.last_s - packets.first_s), 1.1 * packets.seconds
    return not any(shortest <= count / fps <= longest for count in counts)
