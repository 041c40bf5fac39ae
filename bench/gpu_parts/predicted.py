"""Predicts the time of Qwen3-VL-8B's tower on an H100 and an H200, by arithmetic. It measures nothing and needs no GPU.

python -m bench.gpu_parts.predicted

Products and attention run in whole waves over the processors: products in the best of cuBLAS's tiles, attention in
those of flash attention 3 (192 queries × 144 keys; 72 columns are padded to 96). All other kernels take as long as
their bytes. The floor is products and attention alone.
"""

import heapq
import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import starmap

from bench.harness.benchmark import table
from encoder_contract.tower_spec import TowerSpec, spec_of
from encoder_service.vision.graphs import PATCH_BUDGETS, budgets
from encoder_service.vision.load import BATCH_PATCHES
from testing.checkpoints import vision_config

PROCESSORS = 132
PRODUCT_FLOPS, ATTENTION_FLOPS = 800e12, 620e12  # a second, with full tiles
# Rows and columns of cuBLAS's tiles, and the share of `PRODUCT_FLOPS` that each reaches.
TILES = (
    *((128, 256, 0.98), (256, 128, 0.98), (128, 192, 0.95), (128, 128, 0.86)),
    *((64, 256, 0.80), (64, 128, 0.68), (64, 64, 0.45)),
)
COLUMNS, QUERIES, KEYS = 96, 192, 144  # of a tile of flash attention 3
LAUNCH_S, GAP_S = 2e-6, 1e-6  # a small kernel; the pause between two kernels of a graph
ELEMENT_BYTES = 2  # bfloat16
BYTES_PER_S = {"H100": 3.0e12, "H200": 4.3e12}

SIZES = {  # patches of an image
    "256×256": 256,
    "640×480": 1200,
    "1280×720": 3520,
    "960×1280": 4800,
    "1920×1080": 8160,
    "2560×1440": 14400,
}
BATCHES = (
    *(("256×256", 1), ("256×256", 18), ("256×256", 22), ("640×480", 1), ("640×480", 2), ("640×480", 4)),
    *(("1280×720", 1), ("960×1280", 1), ("1920×1080", 1), ("2560×1440", 1)),
)
LIMITS = (4800, BATCH_PATCHES["cuda"], 9600, 14400)


@dataclass(frozen=True, slots=True)
class Predicted:
    """What one forward of a batch takes, in seconds, bytes and launches."""

    patches: int
    products: float
    attention: float
    rest: float
    bytes: float
    """Read and written between products and attention."""

    @property
    def seconds(self) -> float:
        """The whole forward, in a graph."""
        return self.products + self.attention + self.rest

    @property
    def floor(self) -> float:
        """The time of products and attention alone."""
        return self.products + self.attention


def eager_launches(spec: TowerSpec, images: int) -> int:
    """Return how many kernels an eager forward launches for still images that have their tables.

    A block launches eight, and a merger five: norm, product, GELU, product, and the copy into the rows. A block before
    mergers launches the sum. Flash attention 3 launches another one in each block, which plans its work.
    """
    packing = 3 * (images > 1)  # patches, rotations and positions become one tensor each
    bounds, embedding = 1, 4
    sums = len({*spec.deepstack, spec.depth - 1})
    return packing + bounds + embedding + 8 * spec.depth + sums + 5 * (1 + spec.levels)


def graph_launches(images: int) -> int:
    """Return how many a graph takes: its inputs (6 and the tables of several images), the replay, the copy of rows."""
    return 2 * (images > 1) + 6 + 1 + 1


def product_s(rows: int, columns: int, inner: int, bytes_per_s: float) -> float:
    """Return the time of a product [rows, inner] × [inner, columns]."""
    best = min(
        math.ceil(math.ceil(rows / tall) * math.ceil(columns / wide) / PROCESSORS) * tall * wide / share
        for tall, wide, share in TILES
    )
    size = ELEMENT_BYTES * (rows * inner + columns * inner + rows * columns)
    return max(best * PROCESSORS * 2 * inner / PRODUCT_FLOPS, size / bytes_per_s) + 1.5e-6


def attention_s(
    lengths: Sequence[int],
    heads: int,
    columns: int = COLUMNS,
    queries: int = QUERIES,
    plan_s: float = LAUNCH_S,
) -> float:
    """Return the time of one call: each processor takes the tile with most keys that is left."""
    tiles = [
        math.ceil(length / KEYS) for length in lengths for _ in range(math.ceil(length / queries) * heads)
    ]
    per_keys = 4 * queries * KEYS * columns * PROCESSORS / ATTENTION_FLOPS
    ends = [0.0] * PROCESSORS
    for keys in sorted(tiles, reverse=True):
        heapq.heappush(ends, heapq.heappop(ends) + keys * per_keys)
    return max(ends) + plan_s + LAUNCH_S


def predict(
    spec: TowerSpec,
    lengths: Sequence[int],
    bytes_per_s: float,
    *,
    norm_passes: int = 4,
    rotation_passes: int = 4,
    columns: int = COLUMNS,
    queries: int = QUERIES,
    plans: int | None = None,
) -> Predicted:
    """Predict the forward of images of these patches; the options are those that a lever changes.

    A norm reads the residual and what is added, and writes the sum and itself: `norm_passes` over the residual. A
    rotation reads and writes queries and keys.
    """
    depth, embed, mergers = spec.depth, spec.embed, 1 + spec.levels
    patches, rows, merged = sum(lengths), sum(lengths) // spec.merge_unit, spec.embed * spec.merge_unit
    value = ELEMENT_BYTES

    def all_s(shapes: Iterable[tuple[int, int, int]]) -> float:
        return sum(product_s(*shape, bytes_per_s) for shape in shapes)

    block = ((patches, 3 * embed, embed), (patches, embed, embed), (patches, spec.intermediate, embed),
             (patches, embed, spec.intermediate))  # fmt: skip
    products = depth * all_s(block) + mergers * all_s(((rows, merged, merged), (rows, spec.hidden, merged)))
    products += all_s([(patches, embed, spec.patch_values)])
    plans = depth if plans is None else plans
    attention = depth * attention_s(lengths, spec.heads, columns, queries, plans / depth * LAUNCH_S)
    # Patches are read and centred, positions added; a merger adds, norms, applies the GELU and copies its rows.
    per_patch = spec.patch_values * (1 + 4 * value) + 2 * value * embed
    per_merged = 6 * value * embed + 2 * value * spec.hidden // spec.merge_unit
    sizes = {  # bytes, and kernels
        "norms": (2 * depth * norm_passes * value * embed * patches, 2 * depth),
        "rotation": (depth * rotation_passes * value * embed * patches, depth if rotation_passes else 0),
        "ends": (patches * (per_patch + mergers * per_merged), 4 + 4 * mergers),
        "finite": (value * spec.width * rows, 4),
        "inputs and rows": (
            (2 * spec.patch_values + 2 * value * embed) * patches + 2 * value * spec.width * rows,
            graph_launches(2),
        ),
    }
    rest = sum(max(size / bytes_per_s, kernels * LAUNCH_S) for size, kernels in sizes.values())
    return Predicted(
        patches,
        products,
        attention,
        rest + eager_launches(spec, 2) * GAP_S,
        float(sum(size for size, _ in sizes.values())),
    )


def qwen3_vl() -> TowerSpec:
    """Return the tower of Qwen3-VL-8B."""
    return spec_of({"model_type": "qwen3_vl", "vision_config": vision_config("qwen3_vl", full=True)})


def forwards(spec: TowerSpec) -> list[tuple[str | float, ...]]:
    """Return a row for each of `BATCHES`."""
    graphs = budgets(PATCH_BUDGETS[-1], BATCH_PATCHES["cuda"], persistent=True)

    def row(size: str, images: int) -> tuple[str | float, ...]:
        lengths = [SIZES[size]] * images
        graph = next(each.patches for each in graphs if each.fits(lengths))
        padding = [graph - sum(lengths)] if graph > sum(lengths) else []
        h100, h200 = (predict(spec, [*lengths, *padding], rate) for rate in BYTES_PER_S.values())
        return (
            f"{images} × {size}",
            f"{sum(lengths)} → {graph}",
            f"{eager_launches(spec, images)} → {graph_launches(images)}",
            h100.bytes / 1e9,
            *(part * 1e3 for part in (h100.products, h100.attention, h100.rest)),
            f"{h100.seconds * 1e3:.3g} ({h200.seconds * 1e3:.3g})",
            f"{h100.seconds / h100.floor:.2f} ({h200.seconds / h200.floor:.2f})",
        )

    return list(starmap(row, BATCHES))


def limits(spec: TowerSpec) -> list[tuple[str, ...]]:
    """Return, for each size of images, the times of an image and of the largest batch within each limit."""

    def cell(patches: int, limit: int) -> str:
        images = max(1, limit // patches)
        batch_ms = predict(spec, [patches] * images, BYTES_PER_S["H100"]).seconds * 1e3
        return f"{batch_ms / images:.3g} ({images}: {batch_ms:.3g})"

    return [
        (size, *(cell(patches, limit) for limit in LIMITS))
        for size, patches in SIZES.items()
        if patches <= LIMITS[-1] // 2
    ]


def savings(spec: TowerSpec) -> list[tuple[str, ...]]:
    """Return what each change would save on an H100, in milliseconds and of the whole, and why it is not made."""

    def cell(lengths: Sequence[int], options: dict[str, int]) -> str:
        no_options: dict[str, int] = {}
        before, after = (
            predict(spec, lengths, BYTES_PER_S["H100"], **each).seconds for each in (no_options, options)
        )
        return f"{(before - after) * 1e3:.2f} ({1 - after / before:.1%})"

    def cells(**options: int) -> list[str]:
        return [cell(lengths, options) for lengths in ([256] * 22, [4800], [8160])]

    return [
        (
            "flash attention 3 plans once a forward",
            *cells(plans=1),
            "a wrong plan gives wrong rows, and only a GPU runs the kernel that reads it",
        ),
        (
            "products read and add the residual",
            *cells(norm_passes=3),
            "torch's add a bias or a residual: each norm would have to add the biases of all layers before it",
        ),
        (
            "products rotate queries and keys",
            *cells(rotation_passes=0),
            "needs a product of our own that is as fast as cuBLAS's",
        ),
        ("attention in 80 columns", *cells(columns=80), "needs an attention kernel of our own"),
        (
            "attention in tiles of 128 queries",
            *cells(queries=128),
            "needs a build of our own: flash attention 3 has one tile for each head size",
        ),
    ]


def main() -> None:
    """Print the tables."""
    spec = qwen3_vl()
    heads = (
        "batch",
        "patches → graph",
        "launches → graph",
        "GB",
        "products",
        "attention",
        "rest",
        "all",
        "÷ floor",
    )
    table("Predicted for a batch on an H100 (H200), ms:", heads, forwards(spec))
    table(
        "By limit of a batch in patches, ms an image (images: ms a batch):",
        ("image", *map(str, LIMITS)),
        limits(spec),
    )
    table(
        "Saved by what is not done, ms:",
        ("", "22 × 256×256", "1 × 960×1280", "1 × 1920×1080", "not done because"),
        savings(spec),
    )


if __name__ == "__main__":
    main()
