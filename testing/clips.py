"""Seeded videos, their frames as OpenCV reads them, and variants of MP4 that OpenCV cannot write."""

import os
import struct
import tempfile
from collections.abc import Callable, Iterator, Sequence
from functools import lru_cache
from pathlib import Path

import cv2
import numpy as np
from numpy.typing import NDArray

from testing.photos import pixels

CODECS = {
    "mp4": "mp4v",
    "mov": "mp4v",
    "webm": "VP80",
    "mkv": "mp4v",
    "avi": "MJPG",
    "flv": "FLV1",
    "ts": "mpg2",
    "m2ts": "mpg2",
    "mpg": "mpg2",
}


@lru_cache(maxsize=32)
def clip(
    container: str = "mp4",
    *,
    frames: int = 60,
    fps: float = 30.0,
    width: int = 160,
    height: int = 96,
    seed: int = 0,
    codec: str = "",
) -> bytes:
    """Return a video of a moving photo; no two frames are equal."""
    picture = pixels(width, height, seed)
    with tempfile.TemporaryDirectory() as folder:
        path = str(Path(folder) / f"clip.{container}")
        fourcc = cv2.VideoWriter.fourcc(*(codec or CODECS[container]))
        writer = cv2.VideoWriter(path, fourcc, fps, (width, height))
        if not writer.isOpened():
            raise RuntimeError(f"this OpenCV writes no {codec or CODECS[container]} into {container}")
        for number in range(frames):
            moved = np.roll(picture, (number, 3 * number), axis=(0, 1))
            moved[:8, : 2 + 2 * (number % 64)] = 255
            writer.write(moved)
        writer.release()
        return Path(path).read_bytes()


def true_frames(file: bytes) -> Iterator[NDArray[np.uint8]]:
    """Yield the frames of a video, uint8 [H, W, 3] RGB, one after the other, as OpenCV reads them from a path."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "clip"
        path.write_bytes(file)
        capture = cv2.VideoCapture(os.fspath(path), cv2.CAP_FFMPEG)
        while True:
            is_read, frame = capture.read()
            if not is_read:
                return
            yield np.asarray(cv2.cvtColor(frame, cv2.COLOR_BGR2RGB), np.uint8)


def rotated(mp4: bytes, degrees: int) -> bytes:
    """Return an MP4 with a rotation matrix: its frames are shown rotated clockwise by 90, 180 or 270 degrees."""
    matrix = {90: (0, 1, -1, 0), 180: (-1, 0, 0, -1), 270: (0, -1, 1, 0)}[degrees]

    def turn(header: bytes) -> bytes:
        at = 40 if header[0] == 0 else 52
        a, b, c, d = (number << 16 for number in matrix)
        turned = struct.pack(">9i", a, b, 0, c, d, 0, 0, 0, 1 << 30)
        return header[:at] + turned + header[at + 36 :]

    return _with_box(mp4, (b"moov", b"trak", b"tkhd"), turn)


def of_variable_rate(mp4: bytes) -> bytes:
    """Return an MP4 whose frames are shown for one, two and three frame times in turn."""

    def vary(times: bytes) -> bytes:
        count, delta = struct.unpack_from(">II", times, 8)
        entries = b"".join(struct.pack(">II", 1, delta * (1 + number % 3)) for number in range(count))
        return times[:4] + struct.pack(">I", count) + entries

    return _with_box(mp4, (b"moov", b"trak", b"mdia", b"minf", b"stbl", b"stts"), vary)


def recorded(mkv: bytes, times_ms: Sequence[int]) -> bytes:
    """Return a short MKV or WebM as browsers record it: without a frame rate, and with a time for each frame.

    `times_ms` are below 32 s, since they are relative to clusters, which all begin at 0 here.
    """
    times = iter(times_ms)

    def change(kind: bytes, content: bytes) -> tuple[bytes, bytes]:
        if kind == b"\x44\x89":  # duration
            return kind, struct.pack(">d", times_ms[-1])
        if kind == b"\x23\xe3\x83":  # time of a frame
            return b"\xec", content  # an element that players skip
        if kind == b"\xe7":  # time of a cluster
            return kind, bytes(len(content))
        if kind == b"\xa3":  # block: track, time, flags, frame
            return kind, content[:1] + struct.pack(">h", next(times)) + content[3:]
        return kind, content

    return _ebml(mkv, change)


def beginning_at(mkv: bytes, seconds: int) -> bytes:
    """Return an MKV or WebM whose first frame is shown so many seconds after 0, as recorders of streams write it."""

    def change(kind: bytes, content: bytes) -> tuple[bytes, bytes]:
        if kind == b"\x44\x89":  # duration: the time of its end
            (duration,) = struct.unpack(">d" if len(content) == 8 else ">f", content)
            return kind, struct.pack(">d", duration + 1000 * seconds)
        if kind == b"\xe7":  # time of a cluster
            return kind, struct.pack(">Q", int.from_bytes(content, "big") + 1000 * seconds)
        return kind, content

    return _ebml(mkv, change)


def with_sound(mkv: bytes, packets: int) -> bytes:
    """Return an MKV or WebM with a second track, of sound: so many packets before the frames of each cluster."""
    rate_and_channel = (
        _element("b5", struct.pack(">f", 8000.0)) + _element("9f", b"\1") + _element("6264", b"\x08")
    )
    names = (
        _element("d7", b"\2")
        + _element("73c5", b"\2")
        + _element("83", b"\2")
        + _element("86", b"A_PCM/INT/LIT")
    )
    track = _element("ae", names + _element("e1", rate_and_channel))
    sound = _element("a3", b"\x82\0\0\x80\0") * packets

    def change(kind: bytes, content: bytes) -> tuple[bytes, bytes]:
        if kind == b"\x16\x54\xae\x6b":  # tracks
            return kind, content + track
        if kind == b"\x1f\x43\xb6\x75":  # cluster
            first = content.index(b"\xa3\1\0")  # its first frame
            return kind, content[:first] + sound + content[first:]
        return kind, content

    return _ebml(mkv, change)


def _element(kind: str, content: bytes) -> bytes:
    return bytes.fromhex(kind) + (1 << 56 | len(content)).to_bytes(8, "big") + content


def _ebml(data: bytes, change: Callable[[bytes, bytes], tuple[bytes, bytes]]) -> bytes:
    """Return EBML elements, each changed; of those that contain others, these are."""
    out, at = b"", 0
    while at < len(data):
        kind, at = _number(data, at, keep_marker=True)
        size, begin = _number(data, at)
        length = int.from_bytes(size, "big")
        at = begin + length
        content = data[begin:at]
        if kind.hex() in (
            "18538067",
            "1549a966",
            "1654ae6b",
            "ae",
            "1f43b675",
        ):  # segment, info, tracks, cluster
            content = _ebml(content, change)
        elif kind.hex() in ("114d9b74", "1c53bb6b"):  # places of other elements, which move
            continue
        kind, content = change(kind, content)
        out += _element(kind.hex(), content)
    return out


def _number(data: bytes, at: int, *, keep_marker: bool = False) -> tuple[bytes, int]:
    """Return a number of variable length, and where it ends."""
    length = 9 - data[at].bit_length()
    marker = 0 if keep_marker else 1 << (8 - length)
    return bytes([data[at] - marker]) + data[at + 1 : at + length], at + length


def beginning_with_frame(mp4: bytes, number: int, fps: float) -> bytes:
    """Return an MP4 whose edit list hides all frames before this one, as after a cut without encoding anew."""

    def hide(edits: bytes) -> bytes:
        (begin,) = struct.unpack_from(">i", edits, 12)
        return edits[:12] + struct.pack(">i", begin + round(number * _units(mp4) / fps)) + edits[16:]

    return _with_box(mp4, (b"moov", b"trak", b"edts", b"elst"), hide)


def _units(mp4: bytes) -> int:
    """Return how many units of time the track of an MP4 counts in a second."""
    found: list[int] = []

    def read(header: bytes) -> bytes:
        found.append(struct.unpack_from(">I", header, 12)[0])
        return header

    _with_box(mp4, (b"moov", b"trak", b"mdia", b"mdhd"), read)
    return found[0]


def with_index_first(mp4: bytes) -> bytes:
    """Return an MP4 whose index precedes its frames, as in files for the web: a truncated one can still be read."""
    boxes: dict[bytes, bytes] = {}
    at = 0
    while at < len(mp4):
        size, kind = struct.unpack_from(">I4s", mp4, at)
        size = struct.unpack_from(">Q", mp4, at + 8)[0] if size == 1 else size
        boxes[kind] = mp4[at : at + size]
        at += size
    index = boxes.pop(b"moov")

    def move(places: bytes) -> bytes:
        (count,) = struct.unpack_from(">I", places, 4)
        moved = (place + len(index) for place in struct.unpack_from(f">{count}I", places, 8))
        return places[:8] + struct.pack(f">{count}I", *moved)

    index = _with_box(index, (b"moov", b"trak", b"mdia", b"minf", b"stbl", b"stco"), move)
    return boxes.pop(b"ftyp") + index + b"".join(boxes.values())


def _with_box(data: bytes, path: tuple[bytes, ...], change: Callable[[bytes], bytes]) -> bytes:
    """Return MP4 boxes with the content of the first box at `path` changed; the following boxes move."""
    at = 0
    while at + 8 <= len(data):
        size, kind = struct.unpack_from(">I4s", data, at)
        begin = 8
        if size == 1:
            size, begin = struct.unpack_from(">Q", data, at + 8)[0], 16
        if kind == path[0]:
            content = data[at + begin : at + size]
            content = _with_box(content, path[1:], change) if len(path) > 1 else change(content)
            return data[:at] + struct.pack(">I4s", 8 + len(content), kind) + content + data[at + size :]
        at += size
    raise ValueError(f"no box {path[0].decode()}")
