"""The memory of decoding: within the formula for every format and mode; shortages do not blame the image."""

import json
import subprocess
import sys
from collections.abc import Callable, Iterator
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

from encoder_service.image.pillow import PILLOW_BYTES_PER_PIXEL, is_shortage

ROOT = Path(__file__).resolve().parents[3]
# Large enough that the fixed memory of a decoder does not matter, and that an image does not fit in a shortage.
SIDE = 2000

MODES = [
    ("PNG", "RGB", {}), ("PNG", "RGBA", {}), ("PNG", "P", {}), ("PNG", "P", {"transparency": 0}), ("PNG", "LA", {}),
    ("PNG", "I;16", {}), ("WEBP", "RGBA", {"lossless": True, "method": 0, "quality": 0}),
    ("WEBP", "RGB", {"method": 0}), ("WEBP", "RGBA", {"method": 0}),
    ("JPEG", "CMYK", {"progressive": True, "subsampling": 0}),
    ("GIF", "P", {}), ("BMP", "RGB", {}), ("BMP", "P", {}), ("JPEG", "RGB", {}),
    ("JPEG", "CMYK", {"progressive": True}),
    ("JPEG", "RGB", {"progressive": True, "subsampling": 0}),
    ("TIFF", "RGB", {}), ("TIFF", "RGBA", {"compression": "tiff_lzw"}), ("TIFF", "F", {}), ("TIFF", "CMYK", {}),
    ("TIFF", "YCbCr", {"compression": "jpeg"}),
    ("AVIF", "RGB", {"speed": 10}), ("AVIF", "RGBA", {"speed": 10, "subsampling": "4:4:4"}),
    ("JPEG2000", "RGB", {}), ("JPEG2000", "RGBA", {}), ("JPEG2000", "L", {}),
    ("JPEG2000", "RGBA", {"codeblock_size": (32, 32), "irreversible": True}),
]  # fmt: skip

# Reads the arguments of a measurement from each line and prints its result. Each measurement runs in a fork, so that
# torch is imported once and no measurement reuses memory that another one left in the allocator.
CHILD = """
import json, os, resource, sys
from pathlib import Path
from encoder_contract.geometry import Geometry
from testing.decoding import decode_files, pillow_decoder
from encoder_service.image.resize import to_patches
from encoder_service.image.resize import PlainResize

def most_bytes():
    (line,) = [line for line in open("/proc/self/status") if line.startswith("VmHWM")]
    return int(line.split()[1]) * 1024

def memory(small, large):
    decoder, geometry = pillow_decoder(), Geometry(16, 2, 65536, 1 << 20)
    for file in (small, large):
        before = most_bytes()
        (pixels,) = decode_files(decoder, [Path(file).read_bytes()])
        height, width, _ = pixels.shape
        to_patches([pixels], [geometry.grid(width, height)], PlainResize(geometry))
    return {"bytes": most_bytes() - before, "pixels": width * height}

def shortage(path):
    file = Path(path).read_bytes()
    decoder = pillow_decoder()
    held = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    no_limit = resource.getrlimit(resource.RLIMIT_AS)
    resource.setrlimit(resource.RLIMIT_AS, (held + (8 << 20), no_limit[1]))
    (short,) = decode_files(decoder, [file])
    resource.setrlimit(resource.RLIMIT_AS, no_limit)
    (pixels,) = decode_files(decoder, [file])
    return {"error": type(short).__name__, "retryable": getattr(short, "retryable", None),
            "hint": getattr(short, "retry_after_ms", 0), "then": type(pixels).__name__}

for line in sys.stdin:
    name, *arguments = json.loads(line)
    if not (child := os.fork()):
        print(json.dumps({"memory": memory, "shortage": shortage}[name](*arguments)), flush=True)
        os._exit(0)
    if failed := os.waitpid(child, 0)[1]:
        sys.exit(f"{line}: ended with {failed}")
"""


@cache
def picture(mode: str, side: int) -> Image.Image:
    smooth = Image.fromarray(np.random.default_rng(1).integers(0, 255, (side // 20, side // 20, 3), np.uint8))
    rgb = smooth.resize((side, side))
    if mode == "I;16":
        return Image.fromarray(np.asarray(rgb.convert("L")).astype(np.uint16) * 257)
    return rgb.convert(mode)


Measure = Callable[..., dict[str, Any]]


@pytest.fixture(scope="module")
def measure() -> Iterator[Measure]:
    """Return a function that runs one measurement in a separate process."""
    path = {"PYTHONPATH": f"{ROOT}:{ROOT / 'proto'}", "PATH": "", "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-c", CHILD]
    with subprocess.Popen(
        command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=path
    ) as process:
        assert process.stdin is not None
        assert process.stdout is not None

        def measure(name: str, *arguments: str | Path) -> dict[str, Any]:
            print(json.dumps([name, *map(str, arguments)]), file=process.stdin, flush=True)
            answer = process.stdout.readline()
            assert answer, "the process failed, see its output"
            return json.loads(answer)  # type: ignore[no-any-return]

        yield measure


@pytest.mark.parametrize(("kind", "mode", "options"), MODES)
def test_a_pixel_takes_no_more_memory_than_the_formula_says(measure, tmp_path, kind, mode, options):
    for name, side in (("small", 64), ("large", SIDE)):
        picture(mode, side).save(tmp_path / name, kind, **options)
    most = measure("memory", tmp_path / "small", tmp_path / "large")
    file_bytes = 2 * (tmp_path / "large").stat().st_size
    assert most["bytes"] - file_bytes <= PILLOW_BYTES_PER_PIXEL * most["pixels"], (
        most["bytes"] / most["pixels"]
    )


@pytest.mark.parametrize("kind", ["PNG", "JPEG", "WEBP", "BMP", "GIF"])
def test_a_shortage_of_memory_is_not_the_images_fault(measure, tmp_path, kind):
    picture("RGB", SIDE).save(tmp_path / "image", kind)
    outcome = measure("shortage", tmp_path / "image")
    assert outcome == {"error": "OverloadedError", "retryable": True, "hint": 500, "then": "Tensor"}


def test_system_errors_are_distinguished_from_errors_of_the_file():
    shortages = [MemoryError(), OSError(24, "too many files"), OSError(12, "no memory")]
    others = [OSError("image file is truncated"), ValueError("x"), SyntaxError("x"), RuntimeError("broken")]
    assert all(map(is_shortage, shortages))
    assert not any(map(is_shortage, others))
