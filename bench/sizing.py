"""Computes an image's cost in the tower, the store and on the wire, and the encoder devices that an LLM needs.

It computes from the model's own config (FLOP count, geometry) and measures nothing. The sustained rate of your hardware
comes from `bench.vit`, or from a running server's utilisation metric times its peak.
"""

import math
from collections.abc import Sequence
from pathlib import Path

from bench.harness.benchmark import Benchmark, Figure, command_line, print_figures, table
from encoder_contract.checkpoint import read_spec
from encoder_contract.geometry import Geometry
from encoder_contract.processor import ProcessorSettings
from encoder_contract.tower_spec import TowerSpec, spec_of
from encoder_service.api.server import unread_bytes
from encoder_service.config import MAX_VIDEO_BYTES, Config
from encoder_service.image.decoder import DECODE_PIXELS
from encoder_service.image.pillow import PILLOW_BYTES_PER_PIXEL
from encoder_service.limits import Budgets
from encoder_service.vision import flops
from testing.checkpoints import vision_config

SIZES = {
    "256": (256, 256),
    "560": (560, 560),
    "720p": (1280, 720),
    "1080p": (1920, 1080),
    "1440p": (2560, 1440),
}
GIB = 1 << 30
ELEMENT_BYTES = 2  # bfloat16
DECODER_BYTES = 168 << 20  # a decoder process and its shared buffers

BENCHMARK = Benchmark(
    "sizing",
    "What does an image cost, by arithmetic?",
    tuple(
        figure
        for size in ("720p", "1440p")
        for figure in (
            Figure(f"{size}.tflop", f"{size}: work of the tower", "TFLOP"),
            Figure(f"{size}.embedding_mb", f"{size}: embedding", "MB"),
        )
    ),
    limit_s=60,
)
HEADS = (
    *("image", "patches", "tokens", "TFLOP", "MB", "per GiB", "images/s", "patches/s", "GB/s out"),
    "encoder devices",
)


def _model(folder: Path | None) -> tuple[TowerSpec, Geometry]:
    if folder is not None:
        return read_spec(folder), ProcessorSettings.from_folder(folder).geometry
    config = {"model_type": "qwen3_vl", "vision_config": vision_config("qwen3_vl", full=True)}
    return spec_of(config), Geometry(16, 2, 65536, 16777216)


def cost(
    size: str, spec: TowerSpec, geometry: Geometry, sustained_tflops: float, llm_billions: float
) -> tuple[str | float, ...]:
    """Return the cost of an image of a size, in the order of `HEADS`.

    "Encoder devices" is the number for each device that prefills a language model of `llm_billions` parameters. Prefill
    takes two operations per parameter and token; attention is not counted.
    """
    grid = geometry.grid(*SIZES[size])
    tokens = geometry.tokens(grid)
    tflop, embedding_bytes = flops(spec, grid) / 1e12, tokens * spec.width * ELEMENT_BYTES
    per_s, prefill_tflop = sustained_tflops / tflop, 2 * llm_billions * tokens / 1e3
    held = GIB // embedding_bytes, per_s, per_s * grid.patches, per_s * embedding_bytes / 1e9
    return size, grid.patches, tokens, tflop, embedding_bytes / 1e6, *held, tflop / prefill_tflop


def example(row: Sequence[str | float], images_per_s: float = 200.0, store_gib: int = 64) -> str:
    """Return what many new images of a row of `costs` take; a device is loaded to 80 %."""
    size, megabytes, per_gib, per_s = row[0], float(row[4]), float(row[5]), float(row[6])
    devices = math.ceil(images_per_s / per_s / 0.8)
    return (
        f"Example: 50 requests/s of four new {size} photos are {images_per_s:g} images/s: "
        f"{devices} device{'s' if devices > 1 else ''} and a spare one, "
        f"{images_per_s * megabytes / 1e3:.1f} GB/s out, of which a host\nwith 100 Gbit/s sends 12.5; "
        f"a store of {store_gib} GiB holds the images of {store_gib * per_gib / images_per_s:.1f} s."
    )


def decoding_bytes(decode_pixels: int, max_image_pixels: int) -> int:
    """Return the most host memory that decoding and resizing images takes."""
    largest = max_image_pixels if max_image_pixels > decode_pixels else 0
    return PILLOW_BYTES_PER_PIXEL * (decode_pixels + largest)


def unread_gib(call_window_kib: int) -> float:
    """Return the most memory that unread data takes with the default limits on calls."""
    config = Config(model=Path(), call_window_kib=call_window_kib)
    return unread_bytes(Budgets.of(config), call_window_kib << 10) / GIB


def memory_gib(config: Config, *, on_gpu: bool) -> float:
    """Return the host memory that a replica with one device needs at most, without what a fresh process takes.

    docs/sizing.md has the parts.
    """
    processes = (config.decode_threads or (8 if on_gpu else 2)) + 5
    parts = (
        (config.store_host_gib + config.source_gib + config.video_gib + 2 * config.max_queued_gib) * GIB,
        2 * 2 * MAX_VIDEO_BYTES,  # open in the server and at the device
        decoding_bytes(DECODE_PIXELS, config.max_image_pixels),
        processes * DECODER_BYTES,
        unread_bytes(Budgets.of(config), config.call_window_kib << 10),
    )
    return sum(parts) / GIB


def main(arguments: Sequence[str] | None = None) -> None:
    """Run the command line."""
    parser = command_line(__doc__)
    parser.add_argument("--model", type=Path, help="checkpoint folder (default: the numbers of Qwen3-VL-8B)")
    parser.add_argument(
        "--sustained-tflops",
        type=float,
        default=400.0,
        help="what the device sustains (default %(default)s, 40 %% of an H100: an assumption)",
    )
    parser.add_argument(
        "--llm-billions",
        type=float,
        default=8.0,
        help="parameters of the language model (default %(default)s)",
    )
    args = parser.parse_args(arguments)
    try:
        spec, geometry = _model(args.model)
    except (OSError, ValueError) as error:
        parser.exit(2, f"bench.sizing: --model {args.model}: {error}\n")
    costs = [cost(size, spec, geometry, args.sustained_tflops, args.llm_billions) for size in SIZES]
    title = f"{spec.model_type}: rows of {spec.width} values, {args.sustained_tflops:g} TFLOP/s sustained"
    table(title, HEADS, costs)
    decoding_gib = decoding_bytes(DECODE_PIXELS, Config.max_image_pixels) / GIB
    print(
        f"\nEncoder devices: the number for each device that prefills a model of {args.llm_billions:g} billion "
        "parameters\nat the same utilisation, for prompts of images only. Text and cache hits lower the number.\n"
        f"Decoding takes at most {decoding_gib:.1f} GiB with the default settings, data of attackers that nobody reads "
        f"{unread_gib(4096):.1f} GiB,\nor {unread_gib(256):.1f} GiB with --call-window-kib 256.\n"
        f"{example(next(row for row in costs if row[0] == '1080p'))}"
    )
    print_figures({str(each[0]): {"tflop": each[3], "embedding_mb": each[4]} for each in costs}, args)


if __name__ == "__main__":
    main()
