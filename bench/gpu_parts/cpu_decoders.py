"""JPEG decoders on this machine's CPU: their cost in CPU time, their distance from Pillow's pixels, and how they fail.

python -m bench.gpu_parts.cpu_decoders      # the table of docs/decisions/jpeg-decoder.md
"""

import time
from collections.abc import Callable, Mapping, Sequence
from statistics import median
from typing import Any

import numpy as np
from numpy.typing import NDArray

from bench.gpu_parts.decode import SMOOTH_CHROMA
from bench.harness.results import hardware
from bench.harness.tables import table
from encoder_contract.errors import EncoderError
from encoder_service.image.decoder import Decoder
from testing.photos import photo

CASES = {"1280×720": (1280, 720, 1), "20 × 960×1280": (960, 1280, 20)}
ROUNDS = 9
Pixels = NDArray[np.uint8]
Decode = Callable[[Sequence[bytes]], list[Pixels | None]]


def main() -> None:
    """Print the table."""
    rows = []
    compared = decoders()
    for case, (width, height, count) in CASES.items():
        files = [photo(width, height, seed) for seed in range(count)]
        truth = [image for image in compared["Pillow"](files) if image is not None]
        for name, decode in compared.items():
            rows.append(
                (case, name, _cpu_ms(decode, files) / count, _apart(decode(files), truth), outcomes(decode))
            )
    heads = (
        "JPEG",
        "decoder",
        "CPU ms an image",
        "largest difference from Pillow",
        "a truncated file among three",
    )
    table(f"{hardware()}: medians of {ROUNDS}", heads, rows)


def decoders() -> Mapping[str, Decode]:
    """Return those that are compared, by name."""
    return {"DALI": _ours("dali"), "nvImageCodec": _nvimgcodec(), "Pillow": _ours("pillow")}


def _ours(backend: Any) -> Decode:
    decoder = Decoder("cpu", threads=1, backend=backend)

    def decode(files: Sequence[bytes]) -> list[Pixels | None]:
        return [None if isinstance(each, EncoderError) else each.numpy() for each in decoder.decode(files)]

    return decode


def _nvimgcodec() -> Decode:
    from nvidia import nvimgcodec

    backend = nvimgcodec.Backend(nvimgcodec.BackendKind.CPU_ONLY)
    where = nvimgcodec.NVIMGCODEC_DEVICE_CPU_ONLY
    decoder = nvimgcodec.Decoder(
        device_id=where, backends=[backend], max_num_cpu_threads=1, options=SMOOTH_CHROMA
    )

    def decode(files: Sequence[bytes]) -> list[Pixels | None]:
        return [None if each is None else np.asarray(each.cpu()) for each in decoder.decode(list(files))]

    return decode


def _cpu_ms(decode: Decode, files: Sequence[bytes]) -> float:
    """CPU time of all threads: what a busy machine does meanwhile is not in it."""
    spent = []
    for _ in range(ROUNDS + 1):
        began = time.process_time()
        decode(files)
        spent.append((time.process_time() - began) * 1e3)
    return median(spent[1:])


def _apart(found: Sequence[Pixels | None], truth: Sequence[Pixels]) -> str:
    apart = [
        int(np.abs(pixels.astype(int) - expected.astype(int)).max())
        for pixels, expected in zip(found, truth, strict=True)
        if pixels is not None
    ]
    return f"{max(apart)} of 255 levels"


def outcomes(decode: Decode) -> str:
    """Return what becomes of three files, the second of which lacks its end."""
    files = [photo(640, 480, seed) for seed in range(3)]
    files[1] = files[1][:-3000]
    return ", ".join("refused" if each is None else "decoded" for each in decode(files))


if __name__ == "__main__":
    main()
