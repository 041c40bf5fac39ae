"""Times JPEG decoders and the resize to patches, for one photo and for several, until the device is done."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from itertools import cycle, islice
from typing import Any

import torch
from torch import Tensor

from bench.gpu_parts.probe import Probe
from encoder_contract.errors import EncoderError
from encoder_contract.geometry import Geometry, Grid
from encoder_service.image.dali import DaliJpegs
from encoder_service.image.decoder import Decoder, PillowDecoder
from encoder_service.image.resize import PlainResize, Resize, to_patches
from testing.decoding import decode_files, pillow_decoder
from testing.photos import photo

# Name → (width, height, files).
CASES = {
    "720p": (1280, 720, 1),
    "20x960x1280": (960, 1280, 20),
    "1080p": (1920, 1080, 4),
    "1440p": (2560, 1440, 4),
}
DRY_CASES = {"2x64": (64, 64, 2)}
THREADS = (2, 8, 16)
SMOOTH_CHROMA = ":fancy_upsampling=1"  # as in libjpeg and in our DALI pipeline
DISTINCT_PHOTOS = 4  # a case with more files repeats them
GEOMETRY = Geometry(patch_size=16, merge_size=2, min_pixels=65536, max_pixels=16777216)

Decode = Callable[[list[bytes]], object]


def run(probe: Probe) -> None:
    """Note the time of every decoder in every case, then of every resize."""
    cases = DRY_CASES if probe.dry else CASES
    files = {name: _files(*case) for name, case in cases.items()}
    for label, decode in _decoders(probe):
        for name, batch in files.items():
            probe.attempt({**label, "case": name}, partial(_time_decode, probe, decode, batch))
    for resize in _resizes(probe):
        for name, case in cases.items():
            probe.attempt({"resize": resize.name, "case": name}, partial(_time_resize, probe, resize, *case))


def _files(width: int, height: int, count: int) -> list[bytes]:
    made = [photo(width, height, seed) for seed in range(min(count, DISTINCT_PHOTOS))]
    return list(islice(cycle(made), count))


def _decoders(probe: Probe) -> Iterator[tuple[dict[str, Any], Decode]]:
    """Yield the server's decoders and the alternatives; note the ones that are not installed."""
    on_gpu = probe.device.type == "cuda"
    for threads in THREADS[: 1 if probe.dry else None]:
        for device in ("cuda:0", "cpu") if on_gpu else ("cpu",):
            label = {"decoder": "dali", "on": device.replace("cuda:0", "gpu"), "threads": threads}
            try:
                place = torch.device(device)
                yield label, _raising(Decoder(place, PillowDecoder(), DaliJpegs(place, threads)))
            except ValueError as error:
                _note_missing(probe, label, error)
        yield {"decoder": "pillow", "on": "cpu", "threads": threads}, _pillow_on_threads(threads)
    yield from _nvimgcodec(probe)
    if on_gpu:
        yield from _torchvision(probe)


def _note_missing(probe: Probe, label: Mapping[str, Any], error: Exception) -> None:
    """Note a decoder that is not installed. On a GPU this is a failure, in a dry run it is not."""
    probe.note(**label, **{"missing" if probe.dry else "failed": str(error)})


def _pillow_on_threads(threads: int) -> Decode:
    """Return a call that decodes files with Pillow on `threads` threads, like the server's workers."""
    one, pool = _raising(pillow_decoder()), ThreadPoolExecutor(threads)
    return lambda files: list(pool.map(one, [[file] for file in files]))


def _raising(decoder: Decoder) -> Decode:
    """Return a call that decodes files, and raises the error of the first file that cannot be decoded."""

    def decode(files: list[bytes]) -> list[Tensor]:
        pixels = []
        for outcome in decode_files(decoder, files):
            if isinstance(outcome, EncoderError):
                raise outcome
            pixels.append(outcome)
        return pixels

    return decode


def _nvimgcodec(probe: Probe) -> Iterator[tuple[dict[str, Any], Decode]]:
    """Yield nvImageCodec, the decoder inside DALI, without DALI, on each of its backends."""
    try:
        from nvidia import nvimgcodec
    except ImportError as error:
        _note_missing(probe, {"decoder": "nvimgcodec"}, error)
        return
    kinds = {"cpu": "CPU_ONLY"}
    if probe.device.type == "cuda":
        kinds |= {"hardware": "HW_GPU_ONLY", "cuda": "GPU_ONLY", "hybrid": "HYBRID_CPU_GPU"}
    for name, kind in kinds.items():
        for threads in THREADS[: 1 if probe.dry else None]:
            label = {"decoder": "nvimgcodec", "on": name, "threads": threads}
            try:
                backend = nvimgcodec.Backend(getattr(nvimgcodec.BackendKind, kind))
                device = nvimgcodec.NVIMGCODEC_DEVICE_CPU_ONLY if name == "cpu" else 0
                decoder = nvimgcodec.Decoder(
                    device_id=device, backends=[backend], max_num_cpu_threads=threads, options=SMOOTH_CHROMA
                )
            except Exception as error:  # noqa: BLE001 - the library documents no errors
                probe.note(**label, failed=str(error))
                continue
            yield label, partial(_decode_all, decoder)


def _torchvision(probe: Probe) -> Iterator[tuple[dict[str, Any], Decode]]:
    """Yield torchvision's nvJPEG. It does not smooth chroma, so only its speed is comparable."""
    try:
        from torchvision.io import decode_jpeg
    except ImportError as error:
        _note_missing(probe, {"decoder": "torchvision"}, error)
        return

    def decode(files: list[bytes]) -> object:
        return decode_jpeg(
            [torch.frombuffer(bytearray(file), dtype=torch.uint8) for file in files], device="cuda"
        )

    yield {"decoder": "torchvision", "on": "gpu"}, decode


def _decode_all(decoder: Any, files: list[bytes]) -> Sequence[object]:
    decoded: Sequence[object] = decoder.decode(files)
    if any(each is None for each in decoded):
        raise ValueError("an image was not decoded")
    return decoded


def _time_decode(probe: Probe, decode: Decode, files: list[bytes]) -> dict[str, Any]:
    spent = probe.ms_until_done(lambda: decode(files))
    return {"images": len(files), "ms": spent, "ms_an_image": spent / len(files)}


def _resizes(probe: Probe) -> Iterator[Resize]:
    """Yield the plain resize, and the kernels if a server would use them here. On a GPU it should."""
    plain = PlainResize(GEOMETRY)
    yield plain
    from encoder_service.vision.load import make_resize  # not at the top: the decoders need no safetensors

    chosen = make_resize(GEOMETRY, probe.device)
    if chosen.name != plain.name:
        yield chosen
    elif probe.device.type == "cuda":
        probe.note(resize="triton", failed="the kernels cannot be used; the log says why")


def _time_resize(probe: Probe, resize: Resize, width: int, height: int, count: int) -> dict[str, Any]:
    """Time a resize of pixels on the device to patches on the device."""
    pixels = [
        torch.randint(0, 256, (height, width, 3), dtype=torch.uint8, device=probe.device)
        for _ in range(count)
    ]
    grids: list[Grid] = [GEOMETRY.grid(width, height)] * count
    spent = probe.ms_until_done(lambda: to_patches(pixels, grids, resize))
    return {"images": count, "ms": spent, "ms_an_image": spent / count}
