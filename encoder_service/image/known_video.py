"""Whether videos are decoded rightly here: a known one is decoded at start.

FFmpeg comes from another project's wheel. Releases of that project return unwritten memory for each frame of an
interlaced video (docs/decisions/video-decoder.md).
"""

from pathlib import Path

import torch

from encoder_contract.errors import EncoderError, OverloadedError
from encoder_contract.geometry import Grid
from encoder_contract.video import Frames, VideoInfo
from encoder_service.image import ffmpeg
from encoder_service.image.device_decoder import Decoder
from encoder_service.image.source import Source, VideoFile

# Interlaced H.264. Its left half is red and its right half blue, in the second frame the other way round. The program
# that made it is in tests/encoder_service/image/test_known_video.py.
_FILE = Path(__file__).parent / "known.mp4"
_INFO = VideoInfo(3, 3, 25.0, 64, 64, 0)
_RED, _BLUE = (220, 60, 40), (30, 90, 190)
# Levels of 255. Processors round differently, and the encoder lost some.
_TOLERANCE = 8


def check_videos(decoder: Decoder) -> None:
    """Decode the known video. Raises `ValueError` if it comes out wrong, and as `Decoder.decode_frames` does."""
    try:
        _check(decoder)
    finally:
        decoder.close_videos()  # many servers never get a video


def _check(decoder: Decoder) -> None:
    file = VideoFile()
    file.add(_FILE.read_bytes())
    file.seal()
    found = decoder.files.open_video(b"known video", file)
    if found == _INFO:
        source = Source.of_video(b"known video", file, found)
        pixels = decoder.decode_frames(source, Frames(0, 1, Grid(1, 4, 4)), lambda: True)
        if isinstance(pixels, EncoderError):
            found = pixels
        elif _is_right(torch.from_numpy(pixels)):
            return
    if isinstance(found, OverloadedError):  # memory was short, or something ended the process: no verdict
        return
    problem = found.message if isinstance(found, EncoderError) else "other pixels"
    raise ValueError(f"{ffmpeg.installed().name} decodes a known video wrongly ({problem})")


def _is_right(pixels: torch.Tensor) -> bool:
    for frame, (left, right) in zip(pixels, ((_RED, _BLUE), (_BLUE, _RED)), strict=True):
        for half, colour in ((frame[:, :28], left), (frame[:, 36:], right)):
            if (half.float() - torch.tensor(colour)).abs().max() > _TOLERANCE:
                return False
    return True
