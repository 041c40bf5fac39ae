"""The known video that is decoded at start, and what a server does if it comes out wrong."""

from dataclasses import replace
from pathlib import Path

import pytest

from encoder_service.config import Config, ConfigError
from encoder_service.devices.model import load_model
from encoder_service.image import ffmpeg, known_video
from testing.clips import clip

# PyAV 18 made known.mp4: `libx264` with `crf=18, flags=+ildct+ilme, x264-params=tff=1:interlaced=1`, three frames of
# 64x64 in yuv420p, without x264's message (`filter_units=remove_types=6`).


def test_a_server_that_decodes_the_known_video_takes_videos(config: Config) -> None:
    model = load_model(replace(config, video="yes"))
    try:
        assert model.videos == ffmpeg.installed().name
    finally:
        model.decoder.close()


@pytest.mark.parametrize("seed", [1, None])
def test_a_server_that_decodes_it_wrongly_takes_no_videos_and_says_so(
    config: Config, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, seed: int | None
) -> None:
    wrong = tmp_path / "wrong.mp4"
    wrong.write_bytes(
        b"no video" if seed is None else clip("mp4", frames=3, fps=25.0, width=64, height=64, seed=seed)
    )
    monkeypatch.setattr(known_video, "_FILE", wrong)
    with pytest.raises(ConfigError, match=r"--video yes: .* decodes a known video wrongly") as refused:
        load_model(replace(config, video="yes"))
    assert "\n" not in str(refused.value)
    model = load_model(config)
    try:
        assert model.videos == ""
        assert "decodes a known video wrongly" in model.no_videos
    finally:
        model.decoder.close()


@pytest.mark.parametrize(
    ("libraries", "reason"),
    [
        (["libavutil-1.so.57.28", "libavcodec-1.so.59.37", "libavformat-1.so.59.27"], "does not contain FFmpeg 8"),
        ([], "does not contain FFmpeg 8"),
    ],
)  # fmt: skip
def test_an_opencv_with_another_ffmpeg_is_refused_by_name(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, libraries: list[str], reason: str
) -> None:
    info = tmp_path / "opencv_python_headless-4.12.0.88.dist-info"
    info.mkdir()
    (info / "METADATA").write_text(
        "Metadata-Version: 2.1\nName: opencv-python-headless\nVersion: 4.12.0.88\n"
    )
    lines = [f"opencv_python_headless.libs/{name},,\n" for name in libraries]
    (info / "RECORD").write_text("".join(lines))
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(ValueError, match=f"opencv-python-headless 4.12.0.88 {reason}"):
        ffmpeg.installed()
