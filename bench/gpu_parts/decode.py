"""Times the server's JPEG decoders and the resize to patches, for one photo and several, until the device is done."""

from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from itertools import cycle, islice
from typing import Any

import torch

from bench.gpu_parts.probe import Probe
from encoder_contract.errors import EncoderError
from encoder_contract.geometry import Geometry, Grid
from encoder_service.image.dali import DaliJpegs
from encoder_service.image.decoder import PillowDecoder
from encoder_service.image.device_decoder import Decoder
from encoder_service.image.resize import PlainResize, Resize, to_patches
from testing.decoding import decode_files, pillow_decoder
from testing.photos import photo

# Name → (width, height, files).
CASES = {
    "32x256": (256, 256, 32),
    "640x480": (640, 480, 1),
    "720p": (1280, 720, 1),
    "20x960x1280": (960, 1280, 20),
    "1080p": (1920, 1080, 4),
}
DRY_CASES = {"20x960x1280": (64, 64, 2)}
THREADS = (2, 8, 16)
GEOMETRY = Geometry(patch_size=16, merge_size=2, min_pixels=65536, max_pixels=16777216)

Decode = Callable[[list[bytes]], object]


def run(probe: Probe) -> None:
    """Note the time of every decoder in every case, then of every resize."""
    cases = DRY_CASES if probe.dry else CASES
    for name, decode in _decoders(probe):
        for case, (width, height, count) in cases.items():
            files = list(islice(cycle([photo(width, height, seed) for seed in range(min(count, 4))]), count))
            probe.attempt(f"{case}, {name}", partial(_decode_ms, probe, decode, files))
    for resize in _resizes(probe):
        for case, sizes in cases.items():
            probe.attempt(f"{case}, resize {resize.name}", partial(_resize_ms, probe, resize, *sizes))


def _decoders(probe: Probe) -> Iterator[tuple[str, Decode]]:
    """Yield DALI and Pillow. On a GPU, a DALI that is not installed is a failure."""
    for threads in THREADS[: 1 if probe.dry else None]:
        name = f"dali, {threads} threads"
        try:
            yield (
                name,
                partial(_decoded, Decoder(probe.device, PillowDecoder(), DaliJpegs(probe.device, threads))),
            )
        except ValueError as error:
            probe.note(name, **{"missing" if probe.dry else "failed": str(error)})
        pool, one = ThreadPoolExecutor(threads), partial(_decoded, pillow_decoder())
        yield (
            f"pillow, {threads} threads",
            lambda files, pool=pool, one=one: list(pool.map(one, [[file] for file in files])),  # type: ignore[misc]
        )


def _decoded(decoder: Decoder, files: list[bytes]) -> None:
    """Decode files. Raises the error of the first one that cannot be decoded."""
    for outcome in decode_files(decoder, files):
        if isinstance(outcome, EncoderError):
            raise outcome


def _decode_ms(probe: Probe, decode: Decode, files: list[bytes]) -> dict[str, Any]:
    return {"images": len(files), "ms": probe.ms_until_done(lambda: decode(files))}


def _resizes(probe: Probe) -> Iterator[Resize]:
    """Yield the plain resize, and the kernels if a server would use them here. On a GPU it should."""
    from encoder_service.vision.load import make_resize  # not at the top: the decoders need no safetensors

    plain, chosen = PlainResize(GEOMETRY), make_resize(GEOMETRY, probe.device)
    yield plain
    if chosen.name != plain.name:
        yield chosen
    elif probe.device.type == "cuda":
        probe.note("resize triton", failed="the kernels cannot be used; the log says why")


def _resize_ms(probe: Probe, resize: Resize, width: int, height: int, count: int) -> dict[str, Any]:
    """Time a resize of pixels on the device to patches on the device."""
    shape = (height, width, 3)
    pixels = [torch.randint(0, 256, shape, dtype=torch.uint8, device=probe.device) for _ in range(count)]
    grids: list[Grid] = [GEOMETRY.grid(width, height)] * count
    return {"images": count, "ms": probe.ms_until_done(lambda: to_patches(pixels, grids, resize))}
