"""Sizing: what an image costs the tower, the store and the wire, and how many encoder devices a language model needs.

Arithmetic from the model's own config (the FLOP counter, the geometry), no measurement: the sustained rate is what
`bench.vit`, or a running server's utilisation metric times its peak, says of the hardware at hand.
"""

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from bench.harness.benchmark import Benchmark, Figure, command_line, tell
from encoder_contract.checkpoint import read_spec
from encoder_contract.geometry import Geometry, Grid
from encoder_contract.processor import ProcessorSettings
from encoder_contract.tower_spec import TowerSpec, spec_of
from encoder_service.config import Config
from encoder_service.image.decoder import DECODE_PIXELS
from encoder_service.image.pillow import PILLOW_BYTES_PER_PIXEL
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

BENCHMARK = Benchmark(
    "sizing",
    "What does an image cost, by arithmetic?",
    tuple(
        figure
        for size in SIZES
        for figure in (
            Figure(f"{size}.tflop", f"{size}: work of the tower", "TFLOP"),
            Figure(f"{size}.embedding_mb", f"{size}: embedding", "MB"),
        )
    ),
    limit_s=60,
)


@dataclass(frozen=True)
class Cost:
    """What one image of a size costs."""

    size: str
    patches: int
    tokens: int
    tflop: float
    embedding_mb: float
    embeddings_per_gib: int
    images_per_s: float
    patches_per_s: float


def cost(size: str, grid: Grid, spec: TowerSpec, tokens: int, sustained_tflops: float) -> Cost:
    """Return the cost of an image of a grid."""
    tflop = flops(spec, grid) / 1e12
    embedding_bytes = tokens * spec.width * ELEMENT_BYTES
    rate = sustained_tflops / tflop
    return Cost(
        size,
        grid.patches,
        tokens,
        tflop,
        embedding_bytes / 1e6,
        GIB // embedding_bytes,
        rate,
        rate * grid.patches,
    )


def _model(folder: Path | None) -> tuple[TowerSpec, Geometry]:
    if folder is not None:
        return read_spec(folder), ProcessorSettings.from_folder(folder).geometry
    config = {"model_type": "qwen3_vl", "vision_config": vision_config("qwen3_vl", full=True)}
    return spec_of(config), Geometry(16, 2, 65536, 16777216)


def show(costs: Sequence[Cost], spec: TowerSpec, sustained_tflops: float, llm_billions: float) -> None:
    """Print the tables."""
    print(f"{spec.model_type}, rows of {spec.width}, {sustained_tflops:g} TFLOP/s sustained\n")
    print(
        f"{'image':>6} {'patches':>8} {'tokens':>7} {'TFLOP':>7} {'MB':>7} "
        f"{'per GiB':>8} {'images/s':>9} {'patches/s':>10}"
    )
    for c in costs:
        print(
            f"{c.size:>6} {c.patches:>8} {c.tokens:>7} {c.tflop:>7.2f} {c.embedding_mb:>7.1f} "
            f"{c.embeddings_per_gib:>8} {c.images_per_s:>9.1f} {c.patches_per_s:>10.0f}"
        )
    print(
        f"\nencoder devices for each device that prefills a language model of {llm_billions:g} billion parameters,"
    )
    print("both at the same utilisation, prompts of images only (text and cache hits lower it):")
    for c in costs:
        print(f"{c.size:>6} {c.tflop / prefill_tflop(c.tokens, llm_billions):>7.2f}")
    decoding_gib = decoding_bytes(DECODE_PIXELS, Config.max_image_pixels) / GIB
    print(f"\ndecoding, with the default settings: at most {decoding_gib:.1f} GiB")


def decoding_bytes(decode_pixels: int, max_image_pixels: int) -> int:
    """Return the most memory of the host that images take while they are decoded and resized."""
    largest = max_image_pixels if max_image_pixels > decode_pixels else 0
    return PILLOW_BYTES_PER_PIXEL * (decode_pixels + largest)


def prefill_tflop(tokens: int, billions: float) -> float:
    """Return the TFLOP of a prefill: two operations for each parameter and token; attention left out."""
    return 2 * billions * 1e9 * tokens / 1e12


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
    given = parser.parse_args(arguments)
    spec, geometry = _model(given.model)
    costs = []
    for name, (width, height) in SIZES.items():
        grid = geometry.grid(width, height)
        costs.append(cost(name, grid, spec, geometry.tokens(grid), given.sustained_tflops))
    show(costs, spec, given.sustained_tflops, given.llm_billions)
    tell({c.size: asdict(c) for c in costs}, given)


if __name__ == "__main__":
    main()
