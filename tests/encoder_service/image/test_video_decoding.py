"""Videos in decoder processes: the requested frames, in whatever order they are read, or one error."""

import random
from collections.abc import Iterator
from itertools import accumulate
from pathlib import Path

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
from encoder_service.image import decoder_pool
from encoder_service.image.decoder_pool import OPEN_VIDEOS, DecoderPool
from encoder_service.image.source import Source, VideoFile
from testing.clips import clip, of_variable_rate, recorded, rotated, true_frames, with_index_first

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
# -x265-params bframes=3:keyint=12`.
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
def test_a_recording_without_a_frame_rate_is_as_long_as_its_times_say(
    pool: DecoderPool, container: str
) -> None:
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
    monkeypatch.setattr(decoder_pool, "_FRAME_CPU_S", 0.0)
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
    source, _file = opened(pool, b"left", clip("mp4", frames=900, width=640, height=360))
    monkeypatch.setattr(decoder_pool, "_CHECK_S", 0.01)
    deaths = dict(pool.deaths)
    assert isinstance(pool.read_frames(source, 890, 899, lambda: False), AbandonedError)
    assert pool.deaths == deaths
    assert isinstance(pool.read_frames(source, 0, 1), np.ndarray)


def test_damaged_videos_give_right_frames_or_one_error(pool: DecoderPool) -> None:
    whole = clip("mp4", frames=12, seed=9)
    draw = random.Random(7)
    for number in range(40):
        data = bytearray(whole)
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
