"""Videos in decoder processes: the requested frames, in whatever order they are read, or one error."""

import os
import random
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from itertools import accumulate
from pathlib import Path

import cv2
import numpy as np
import pytest
from numpy.typing import NDArray

from encoder_contract.errors import (
    AbandonedError,
    EncoderError,
    InvalidImageError,
    UndecodableImageError,
    UnknownImageError,
)
from encoder_contract.video import VideoInfo
from encoder_service.image import decoder_child
from encoder_service.image.decoder_pool import OPEN_VIDEOS, DecoderPool
from encoder_service.image.source import Source, VideoFile
from testing.clips import (
    beginning_at,
    beginning_with_frame,
    clip,
    of_variable_rate,
    recorded,
    rotated,
    true_frames,
    with_index_first,
    with_sound,
)

CLIPS = {
    "mp4": clip("mp4"),
    "mov": clip("mov", frames=31, fps=12.5, width=98, height=162, seed=1),
    "mkv": clip("mkv", frames=45, fps=60.0, seed=2),
    "webm": clip("webm", frames=40, fps=10.0, seed=3),
    "vp9": clip("webm", frames=24, seed=4, codec="VP90"),
    "avi": clip("avi", frames=30, seed=7),
    "avi in MPEG-4": clip("avi", frames=30, seed=7, codec="XVID"),
    "flv": clip("flv", frames=30, fps=25.0, seed=8),
    "ts": clip("ts", frames=40, fps=25.0, seed=9),
    "m2ts": clip("m2ts", frames=40, fps=25.0, seed=9),
    "mpg": clip("mpg", frames=40, fps=25.0, seed=9),
    "turned": rotated(clip("mp4", frames=20, seed=5), 90),
    "upside down": rotated(clip("mp4", frames=20, seed=5), 180),
    "variable": of_variable_rate(clip("mp4", frames=50, seed=6)),
}


@pytest.fixture(scope="module")
def pool() -> Iterator[DecoderPool]:
    pool = DecoderPool(1, cpu_s=10.0)
    yield pool
    pool.close()


def file_of(data: bytes) -> VideoFile:
    file = VideoFile()
    for begin in range(0, len(data), 100_000):
        file.add(data[begin : begin + 100_000])
    return file


def opened(pool: DecoderPool, key: bytes, data: bytes) -> tuple[Source, VideoFile]:
    """Return the source of a video, and its file, which the caller must keep."""
    file = file_of(data)
    info = pool.open_video(key, file)
    assert isinstance(info, VideoInfo), info
    return Source.of_video(key, file, info), file


@pytest.mark.parametrize("name", CLIPS)
def test_frames_equal_those_of_a_sequential_reader(pool: DecoderPool, name: str) -> None:
    expected = list(true_frames(CLIPS[name]))
    source, _file = opened(pool, name.encode(), CLIPS[name])
    assert source.video is not None
    assert source.video.frames == source.video.readable_frames == len(expected)
    assert (source.video.height, source.video.width) == expected[0].shape[:2]
    draw = random.Random(0)
    forwards = [(number, number + 1) for number in range(0, len(expected) - 1, 5)]
    anywhere = [tuple(sorted(draw.sample(range(len(expected)), 2))) for _ in range(6)]
    for first, second in [*forwards, *anywhere, (3, 3)]:
        pixels = pool.read_frames(source, first, second)
        assert isinstance(pixels, np.ndarray), pixels
        assert np.array_equal(pixels, [expected[first], expected[second]]), (first, second)


# H.264 and HEVC as phones and browsers write them. OpenCV's wheel can only read them. Frames refer to later ones, so
# the file stores them in another order than they are shown. Frame n has a white bar of 4 (n + 1) pixels at the top of
# 160x96.
# FFmpeg 9 made them from raw frames: `-c:v libx264 -crf 30 -bf 3 -g 12`, fragmented with `-movflags
# frag_keyframe+empty_moov`, open with `-x264-params open-gop=1:bframes=3:b-pyramid=normal`; and `-c:v libx265 -crf 32
# -x265-params bframes=3:keyint=12`. From the frames of h264.mp4: interlaced `-flags +ildct+ilme` (and `-x264-params
# tff=1:interlaced=1`), `-c:v libsvtav1 -crf 50`, 10 bits `-pix_fmt yuv420p10le`.
STORED_CLIPS = sorted((Path(__file__).parent / "clips").iterdir())


def numbers_of(pixels: NDArray[np.uint8]) -> list[int]:
    """Return which frames of a stored clip these are, by their bars."""
    bars = pixels[:, 4:12].mean(axis=(1, 3)) > 128
    return [round(bar.sum() / 4) - 1 for bar in bars]


@pytest.mark.parametrize("path", STORED_CLIPS, ids=lambda path: path.name)
def test_frames_that_refer_to_later_ones_are_numbered_in_display_order(pool: DecoderPool, path: Path) -> None:
    source, _file = opened(pool, path.name.encode(), path.read_bytes())
    assert source.video == VideoInfo(30, 30, 30.0, 160, 96, 0)
    draw = random.Random(1)
    anywhere = [tuple(sorted(draw.sample(range(30), 2))) for _ in range(12)]
    for first, second in [*((number, number + 1) for number in range(0, 30, 2)), *anywhere]:
        pixels = pool.read_frames(source, first, second)
        assert isinstance(pixels, np.ndarray), pixels
        assert numbers_of(pixels) == [first, second]


@pytest.mark.parametrize(
    "path", [path for path in STORED_CLIPS if "interlaced" not in path.name], ids=lambda path: path.name
)
def test_frames_have_the_pixels_that_opencv_gives(pool: DecoderPool, path: Path) -> None:
    """OpenCV's frames of an interlaced video are unwritten memory."""
    source, _file = opened(pool, b"pixels of " + path.name.encode(), path.read_bytes())
    for number, expected in enumerate(true_frames(path.read_bytes())):
        pixels = pool.read_frames(source, number, number)
        assert isinstance(pixels, np.ndarray), pixels
        assert np.array_equal(pixels[0], expected), number


@pytest.mark.parametrize("name", ["h264_interlaced.mp4", "mpeg2_interlaced.ts"])
def test_interlaced_frames_are_equal_in_each_process(pool: DecoderPool, name: str) -> None:
    data = next(path for path in STORED_CLIPS if path.name == name).read_bytes()
    source, _file = opened(pool, name.encode() + b" again", data)
    first = pool.read_frames(source, 3, 20)
    assert isinstance(first, np.ndarray)
    first = first.copy()
    pool._for_all(pool._video_children, decoder_child.DecoderChild.end)
    assert np.array_equal(pool.read_frames(source, 3, 20), first)


@pytest.mark.parametrize("container", ["mkv", "webm"])
def test_a_long_run_of_sound_ends_no_video(pool: DecoderPool, container: str) -> None:
    silent = clip(container, frames=4, fps=0.1)
    expected = list(true_frames(silent))
    source, _file = opened(pool, container.encode() + b" slides", with_sound(silent, 5000))
    assert source.video == VideoInfo(4, 4, pytest.approx(0.1), 160, 96)
    for number in range(4):
        pixels = pool.read_frames(source, number, number)
        assert isinstance(pixels, np.ndarray), pixels
        assert np.array_equal(pixels[0], expected[number])


@pytest.mark.parametrize("seconds", [600, 3600, 1_700_000_000])
@pytest.mark.parametrize("container", ["mkv", "webm"])
def test_a_recording_that_does_not_begin_at_0_is_as_long_as_its_frames(
    pool: DecoderPool, container: str, seconds: int
) -> None:
    data = clip(container, frames=40, fps=10.0, seed=11)
    source, _file = opened(pool, f"{container} at {seconds}".encode(), beginning_at(data, seconds))
    assert source.video == VideoInfo(40, 40, 10.0, 160, 96)
    assert np.array_equal(pool.read_frames(source, 0, 39), [list(true_frames(data))[n] for n in (0, 39)])


def decoded(data: bytes) -> int:
    """Return how many frames a reader gets from the beginning to the end."""
    return len(list(true_frames(data)))


@pytest.mark.parametrize(
    "data",
    [clip("ts", frames=60, fps=25.0, seed=12), next(p for p in STORED_CLIPS if p.name == "h264.ts").read_bytes()],
    ids=["MPEG-2", "H.264"],
)  # fmt: skip
def test_a_stream_that_begins_inside_a_group_of_pictures_has_the_frames_from_its_first_key_frame(
    pool: DecoderPool, data: bytes
) -> None:
    counts = []
    for tenth in range(1, 8):
        cut = data[188 * (len(data) // 188 * tenth // 10) :]
        source, _file = opened(pool, b"cut in %d %d" % (len(data), tenth), cut)
        assert source.video is not None
        counts.append(decoded(cut))
        assert (source.video.frames, source.video.readable_frames) == (counts[-1], counts[-1])
        assert isinstance(pool.read_frames(source, 0, counts[-1] - 1), np.ndarray)
    assert len(set(counts)) > 1, "key frames are lost one by one"


def found_by_vllm(data: bytes) -> int:
    """Return how many frames vLLM's loader finds (`OpenCVVideoBackendMixin.get_video_metadata`)."""
    with tempfile.NamedTemporaryFile(suffix=".mp4") as file:
        file.write(data)
        file.flush()
        capture = cv2.VideoCapture(file.name, cv2.CAP_FFMPEG)
        stated = int(capture.get(cv2.CAP_PROP_FRAME_COUNT))
        if capture.set(cv2.CAP_PROP_POS_AVI_RATIO, 1.0):
            shown = int(capture.get(cv2.CAP_PROP_POS_FRAMES))
            if not capture.grab() and 0 < shown < stated - 1:
                return shown
        return stated


H264 = with_index_first(next(path for path in STORED_CLIPS if path.name == "h264.mp4").read_bytes())
COUNTED = {
    **{f"MPEG-4 up to {n}/10": with_index_first(CLIPS["mp4"])[: len(CLIPS["mp4"]) * n // 10] for n in range(3, 11)},
    **{f"H.264 up to {n}/10": H264[: len(H264) * n // 10] for n in range(4, 11)},
    **{f"MPEG-4 from {n} on": beginning_with_frame(CLIPS["mp4"], n, 30.0) for n in (1, 2, 7, 31)},
}  # fmt: skip


@pytest.mark.parametrize("name", COUNTED)
def test_frames_of_a_cut_mp4_are_counted_as_vllms_loader_counts_them(pool: DecoderPool, name: str) -> None:
    source, _file = opened(pool, name.encode(), COUNTED[name])
    assert source.video is not None
    assert source.video.frames == found_by_vllm(COUNTED[name])
    assert source.video.fps == pytest.approx(30.0)


def test_a_video_that_cannot_be_decoded_is_refused_when_it_is_opened(pool: DecoderPool) -> None:
    unknown = CLIPS["avi in MPEG-4"].replace(b"XVID", b"ZZZZ").replace(b"xvid", b"ZZZZ")
    found = pool.open_video(b"unknown", file_of(unknown))
    assert isinstance(found, InvalidImageError)
    assert "cannot decode" in found.message
    av1 = next(path for path in STORED_CLIPS if path.name == "av1.mp4").read_bytes()
    begin, end = av1.index(b"mdat") + 4, av1.index(b"moov") - 4
    found = pool.open_video(b"damaged", file_of(av1[:begin] + bytes(end - begin) + av1[end:]))
    assert isinstance(found, InvalidImageError)
    assert "no frame of its av1 can be decoded" in found.message


@pytest.mark.attack("a video whose frames nobody writes, to see those of an earlier one")
def test_memory_of_a_process_for_videos_has_known_content() -> None:
    program = (
        "import ctypes; c = ctypes.CDLL(None); c.malloc.restype = ctypes.c_void_p; "
        "print([set(ctypes.string_at(c.malloc(ctypes.c_size_t(size)), size)) for size in (100, 300_000, 1 << 22)])"
    )
    environment = {**decoder_child.SETTINGS, **decoder_child.VIDEO_SETTINGS}
    printed = subprocess.check_output([sys.executable, "-c", program], env=environment, text=True)
    assert printed.strip() == str([{254}] * 3)


def test_an_interrupted_recording_has_the_frames_up_to_the_break(pool: DecoderPool) -> None:
    (path,) = (path for path in STORED_CLIPS if path.stem.endswith("fragmented"))
    data = path.read_bytes()
    source, _file = opened(pool, b"broken off", data[: 2 * len(data) // 3])
    assert source.video is not None
    readable = source.video.readable_frames
    assert 8 < readable < 30
    for number in range(0, readable - 4, 2):  # the last frames may refer to missing ones
        pixels = pool.read_frames(source, number, number + 1)
        assert isinstance(pixels, np.ndarray), pixels
        assert numbers_of(pixels) == [number, number + 1]


def test_the_container_says_rate_and_rotation(pool: DecoderPool) -> None:
    source, _file = opened(pool, b"mov", CLIPS["mov"])
    assert source.video is not None
    assert source.video.fps == pytest.approx(12.5)
    turned, _other = opened(pool, b"turned", CLIPS["turned"])
    assert turned.video == VideoInfo(20, 20, 30.0, 96, 160, 90)


# Frames of a still screen last longer, as in recordings of browsers.
TIMES_MS = [0, *accumulate(random.Random(1).choices([33, 34, 50, 100, 200], k=224))]


@pytest.mark.parametrize("container", ["mkv", "webm"])
def test_a_recording_without_a_rate_is_as_long_as_its_times_say(pool: DecoderPool, container: str) -> None:
    data = recorded(clip(container, frames=len(TIMES_MS), seed=10), TIMES_MS)
    expected = list(true_frames(data))
    assert len(expected) == len(TIMES_MS)
    source, _file = opened(pool, container.encode() + b" recorded", data)
    assert source.video is not None
    assert source.video.frames == source.video.readable_frames == len(TIMES_MS)
    assert source.video.seconds == pytest.approx(TIMES_MS[-1] / 1000, rel=0.03)
    pixels = pool.read_frames(source, 5, len(TIMES_MS) - 1)
    assert isinstance(pixels, np.ndarray), pixels
    assert np.array_equal(pixels, [expected[5], expected[-1]])


@pytest.mark.parametrize("container", ["mp4", "mkv", "webm"])
def test_a_clip_of_one_frame_is_counted(pool: DecoderPool, container: str) -> None:
    source, _file = opened(pool, container.encode() + b" still", clip(container, frames=1))
    assert source.video is not None
    assert (source.video.frames, source.video.readable_frames) == (1, 1)


def test_more_videos_than_can_be_open_are_read_in_turn(pool: DecoderPool) -> None:
    kept = [opened(pool, name.encode(), CLIPS[name]) for name in ("mp4", "mkv", "webm", "vp9")]
    assert len(kept) > OPEN_VIDEOS
    expected = [list(true_frames(CLIPS[name])) for name in ("mp4", "mkv", "webm", "vp9")]
    for number in range(0, 20, 4):
        for (source, _), frames in zip(kept, expected, strict=True):
            assert np.array_equal(
                pool.read_frames(source, number, number + 2), frames[number : number + 3 : 2]
            )


def test_frames_of_a_video_that_is_no_longer_kept_are_an_unknown_image(pool: DecoderPool) -> None:
    source, file = opened(pool, b"gone", CLIPS["mp4"])
    for name in ("mkv", "webm"):  # no process has it open any more
        opened(pool, name.encode(), CLIPS[name])
    del file
    assert isinstance(pool.read_frames(source, 0, 1), UnknownImageError)


@pytest.mark.parametrize("name", ["mkv", "webm", "mp4"])
def test_a_truncated_video_has_the_frames_that_exist(pool: DecoderPool, name: str) -> None:
    whole = with_index_first(CLIPS[name]) if name == "mp4" else CLIPS[name]
    expected = list(true_frames(whole))
    assert len(expected) == len(list(true_frames(CLIPS[name])))
    source, _file = opened(pool, b"cut" + name.encode(), whole[: len(whole) // 2])
    assert source.video is not None
    readable = source.video.readable_frames
    assert 5 < readable < len(expected)
    assert readable <= source.video.frames <= len(expected)
    last = readable - 2  # the very last piece may be cut in the middle
    assert np.array_equal(pool.read_frames(source, 2, last), [expected[2], expected[last]])
    behind = pool.read_frames(source, readable, readable + 1)
    assert isinstance(behind, InvalidImageError)
    assert "cannot be decoded" in behind.message
    assert np.array_equal(pool.read_frames(source, 0, 1), expected[:2]), "the process goes on"


@pytest.mark.parametrize(
    "data",
    [
        clip("mp4")[:2000],  # its index is at the end
        b"\x00\x00\x00\x18ftypisom" + bytes(500),
        b"#EXTM3U\n#EXTINF:1,\nfile:///etc/passwd\n",  # a playlist names other files
        b"ffconcat version 1.0\nfile /etc/passwd\n",
        bytes(1000),
    ],
)
def test_a_file_without_a_video_is_one_error(pool: DecoderPool, data: bytes) -> None:
    found = pool.open_video(b"bad", file_of(data))
    assert isinstance(found, InvalidImageError)
    assert not isinstance(found, UndecodableImageError)


def test_a_video_that_takes_too_long_fails_alone(pool: DecoderPool, monkeypatch: pytest.MonkeyPatch) -> None:
    long = clip("mp4", frames=900, width=640, height=360)
    source, _file = opened(pool, b"long", long)
    monkeypatch.setattr(decoder_child, "FRAME_CPU_S", 0.0)
    monkeypatch.setattr(decoder_child, "_WALL_S", 60.0)  # on a busy machine it may wait long for a core
    child = next(each for each in pool._video_children if each.open_video_key == b"long")
    monkeypatch.setattr(child, "_cpu_s", 0.05)
    found = pool.read_frames(source, 890, 899)
    assert isinstance(found, UndecodableImageError)
    assert "takes more than" in found.message
    monkeypatch.undo()
    assert isinstance(pool.read_frames(source, 0, 1), np.ndarray)


def test_decoding_stops_when_the_frames_are_no_longer_wanted(
    pool: DecoderPool, monkeypatch: pytest.MonkeyPatch
) -> None:
    source, _file = opened(pool, b"left", CLIPS["mp4"])
    monkeypatch.setattr(decoder_child, "_CHECK_S", 0.01)
    deaths = dict(pool.deaths)
    child = next(each for each in pool._video_children if each.open_video_key == b"left")
    os.kill(child.ready().pid, signal.SIGSTOP)  # else it may be done before a busy machine looks
    assert isinstance(pool.read_frames(source, 8, 9, lambda: False), AbandonedError)
    assert pool.deaths == deaths
    assert isinstance(pool.read_frames(source, 0, 1), np.ndarray)


def test_damaged_videos_give_right_frames_or_one_error(pool: DecoderPool) -> None:
    files = [clip("mp4", frames=12, seed=9), *(path.read_bytes() for path in STORED_CLIPS)]
    draw = random.Random(7)
    for number in range(40):
        data = bytearray(files[number % len(files)])
        for _ in range(draw.choice((1, 3, 30))):
            data[draw.randrange(len(data))] = draw.randrange(256)
        file = file_of(bytes(data))
        info = pool.open_video(number.to_bytes(2), file)
        if isinstance(info, EncoderError):
            continue
        source = Source.of_video(number.to_bytes(2), file, info)
        for first in range(0, 12, 2):
            found = pool.read_frames(source, first, first + 1)
            assert isinstance(found, (np.ndarray, EncoderError))
            again = pool.read_frames(source, first, first + 1)
            if isinstance(found, np.ndarray):
                assert np.array_equal(found, again), "a frame has the same pixels on every read"
